"""What people call on a pipe by mistake, or by habit from other libraries.

An entry is the call, a word of the `fix` of its error, and what that fix says, which works: None where it is no call,
or starts processes (`tests/runtime/launch`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

import autopart
from support.models.misleading_models import ROWS, Net

Call = Callable[[Any], Any]


def step(m: Any) -> Any:
    return m.pipe.step(ROWS)


def same_state(m: Any) -> Any:
    return m.pipe.load_state_dict(m.pipe.state_dict())


def save(m: Any) -> Any:
    return m.pipe.save("runs/b", m.optimizer)


def load(m: Any) -> Any:
    return m.pipe.load("runs/a", m.optimizer)


def clip(m: Any) -> Any:
    return m.pipe.clip_grad_norm_(1.0)


def replan(m: Any) -> Any:
    return m.pipe.replan(m.optimizer, steps=1)


def policy(m: Any) -> Any:
    return autopart.freeze.Policy(lambda epoch, norms: 0).apply(m.pipe, 0)


def sampler(m: Any) -> Any:
    return m.pipe.sampler(range(16), rows=2)


OF_CALLS: dict[str, tuple[Call, str, Call | None]] = {
    # batches
    "a step without a batch": (lambda m: m.pipe.step(), "pass the batch", step),
    "a step on None": (
        lambda m: m.pipe.step(None),
        "pipe.needs_data",
        lambda m: m.pipe.step(ROWS if m.pipe.needs_data else None),
    ),
    "a step on a loader": (
        lambda m: m.pipe.step(m.loader),
        "for batch in loader",
        lambda m: [m.pipe.step(*batch) for batch in m.loader],
    ),
    "a step on an iterator": (
        lambda m: m.pipe.step(iter(m.loader)),
        "for batch in loader",
        lambda m: m.pipe.step(*next(iter(m.loader))),
    ),
    "a step on a text": (lambda m: m.pipe.step("text"), "as tensors", step),
    "a step on too many inputs": (lambda m: m.pipe.step(ROWS, ROWS), "without autopart", step),
    "a step on another keyword": (lambda m: m.pipe.step(y=ROWS), "without autopart", lambda m: m.pipe.step(x=ROWS)),
    "a step on an empty batch": (
        lambda m: m.pipe.step(ROWS[:0]),
        "leave out",
        lambda m: [m.pipe.step(b) for b in (ROWS, ROWS[:0]) if len(b)],
    ),
    "a step on another width": (lambda m: m.pipe.step(ROWS[:, :1]), "without autopart", step),
    "a step on an array": (
        lambda m: m.pipe.step(ROWS.numpy()),
        "torch.as_tensor",
        lambda m: m.pipe.step(torch.as_tensor(ROWS.numpy())),
    ),
    "a prediction with a target": (
        lambda m: m.pipe.predict((ROWS, ROWS)),
        "without autopart",
        lambda m: m.pipe.predict(ROWS),
    ),
    "an evaluation of None": (lambda m: m.pipe.eval_loss(None), "pipe.needs_data", lambda m: m.pipe.eval_loss(ROWS)),
    "a step sharded by a text": (lambda m: m.pipe.step(ROWS, sharded="yes"), "call step(", step),
    "the optimizer in a step": (lambda m: m.pipe.step(ROWS, m.optimizer), "pass tensors", step),
    "rows in a list": (lambda m: m.pipe.step(ROWS.tolist()), "as tensors", step),
    "a prediction of a loader": (
        lambda m: m.pipe.predict(m.loader),
        "for batch in loader",
        lambda m: m.pipe.predict(ROWS),
    ),
    # checkpoints and states
    "a checkpoint that is not there": (
        lambda m: m.pipe.load("nothing"),
        "pipe.save",
        lambda m: m.pipe.load("nothing", missing_ok=True),
    ),
    "a file for a checkpoint": (
        lambda m: m.pipe.load("model.pt"),
        "pipe.load_state_dict(torch.load(file))",
        lambda m: m.pipe.load_state_dict(torch.load("state.pt")),
    ),
    "None for a checkpoint": (lambda m: m.pipe.load(None), "runs/a", lambda m: m.pipe.load("runs/a")),
    "a checkpoint onto a file": (lambda m: m.pipe.save("model.pt"), "pass a folder", lambda m: m.pipe.save("runs/b")),
    "the optimizer before the folder": (
        lambda m: m.pipe.save(m.optimizer),
        "runs/a",
        lambda m: m.pipe.save("runs/b", m.optimizer),
    ),
    "the path of a state": (
        lambda m: m.pipe.load_state_dict("model.pt"),
        "state_dict()",
        lambda m: m.pipe.load_state_dict(torch.load("state.pt")),
    ),
    "an empty state": (
        lambda m: m.pipe.load_state_dict({}),
        "state_dict()",
        lambda m: m.pipe.load_state_dict(m.pipe.state_dict()),
    ),
    "a state in a state": (
        lambda m: m.pipe.load_state_dict({"model": m.pipe.state_dict()}),
        "state_dict()",
        lambda m: m.pipe.load_state_dict({"model": m.pipe.state_dict()}["model"]),
    ),
    "a state of DDP": (
        lambda m: m.pipe.load_state_dict({f"module.{k}": v for k, v in m.pipe.state_dict().items()}),
        "removeprefix",
        lambda m: m.pipe.load_state_dict({k.removeprefix("module."): v for k, v in m.pipe.state_dict().items()}),
    ),
    "a state of another size": (
        lambda m: m.pipe.load_state_dict({k: v[:1] for k, v in m.pipe.state_dict().items()}),
        "state_dict()",
        lambda m: m.pipe.load_state_dict(m.pipe.state_dict()),
    ),
    "a number of steps below 0": (
        lambda m: setattr(m.pipe, "steps", -1),
        "an integer",
        lambda m: setattr(m.pipe, "steps", 1),
    ),
    "a closed pipe trains": (lambda m: m.closed.step(ROWS), "compile the model again", lambda m: m.again()),
    "a closed pipe saves": (lambda m: m.closed.save("x"), "compile the model again", lambda m: m.again()),
    "metrics before a step": (lambda m: m.closed.metrics(), "after pipe.step", lambda m: m.pipe.metrics()),
    "the state of an optimizer": (
        lambda m: m.pipe.load_state_dict(m.optimizer.state_dict()),
        "state_dict()",
        same_state,
    ),
    "no state": (lambda m: m.pipe.load_state_dict(None), "state_dict()", same_state),
    "a state of lists": (
        lambda m: m.pipe.load_state_dict({k: v.tolist() for k, v in m.pipe.state_dict().items()}),
        "pass tensors",
        same_state,
    ),
    "a state of torch.compile": (
        lambda m: m.pipe.load_state_dict({f"_orig_mod.{k}": v for k, v in m.pipe.state_dict().items()}),
        "_orig_mod.",
        same_state,
    ),
    "the model for its optimizer": (lambda m: m.pipe.save("runs/b", m.pipe.model), "one optimizer", save),
    "the scheduler before the optimizer": (lambda m: m.pipe.save("runs/b", m.scheduler), "one optimizer", save),
    "a state for an optimizer": (lambda m: m.pipe.save("runs/b", m.optimizer.state_dict()), "one optimizer", save),
    "a state for a scheduler": (
        lambda m: m.pipe.save("runs/b", m.optimizer, m.scheduler.state_dict()),
        "one scheduler",
        lambda m: m.pipe.save("runs/b", m.optimizer, m.scheduler),
    ),
    "a tensor beside a checkpoint": (
        lambda m: m.pipe.save("runs/b", extra={"best": torch.ones(1)}),
        "tensor.tolist()",
        lambda m: m.pipe.save("runs/b", extra={"best": torch.ones(1).tolist()}),
    ),
    "no checkpoint to keep": (
        lambda m: m.pipe.save("runs/b", keep=0),
        "1 or more",
        lambda m: m.pipe.save("runs/b", keep=1),
    ),
    "no folder": (lambda m: m.pipe.save(None), "runs/a", save),
    "another optimizer is saved": (lambda m: m.pipe.save("runs/b", m.other), "pipe.parameters()", save),
    "another optimizer is loaded": (lambda m: m.pipe.load("runs/a", m.other), "pipe.parameters()", load),
    "an optimizer of another class": (
        lambda m: m.pipe.load("runs/a", torch.optim.SGD(m.pipe.parameters(), 0.1)),
        "AdamW",
        load,
    ),
    "an optimizer that was not saved": (
        lambda m: m.pipe.load("runs/w", m.optimizer),
        "without optimizer=",
        lambda m: m.pipe.load("runs/w"),
    ),
    "the step to load": (lambda m: m.pipe.load("runs/a", step=1), "call load(folder", load),
    "a plan for a checkpoint": (lambda m: m.pipe.load("plan.json"), "pipe.save", load),
    "a number of steps as text": (
        lambda m: setattr(m.pipe, "steps", "3"),
        "an integer",
        lambda m: setattr(m.pipe, "steps", 3),
    ),
    # gradients and optimizers
    "clipping parameters": (lambda m: m.pipe.clip_grad_norm_(m.pipe.parameters(), 1.0), "clip_grad_norm_(1.0)", clip),
    "clipping to a text": (lambda m: m.pipe.clip_grad_norm_("1"), "clip_grad_norm_(1.0)", clip),
    "clipping to a number below 0": (lambda m: m.pipe.clip_grad_norm_(-1.0), "clip_grad_norm_(1.0)", clip),
    "a norm of kind 0": (
        lambda m: m.pipe.clip_grad_norm_(1.0, 0),
        "positive",
        lambda m: m.pipe.clip_grad_norm_(1.0, float("inf")),
    ),
    "a scale of 0": (lambda m: m.pipe.step(ROWS, scale=0), "above 0", lambda m: m.pipe.step(ROWS, scale=0.5)),
    "a text as scale": (lambda m: m.pipe.step(ROWS, scale="1"), "above 0", lambda m: m.pipe.step(ROWS, scale=1)),
    "train(batch) for step(batch)": (lambda m: m.pipe.train(ROWS), "optimizer=", step),
    "replan(text)": (lambda m: m.pipe.replan("x"), "one optimizer", lambda m: m.pipe.replan(m.optimizer)),
    "torch's average of a model": (lambda m: autopart.AveragedModel(Net()), "the pipe", None),  # type: ignore[arg-type]
    "the state of averages": (lambda m: m.average.state_dict(), "averaged.applied()", lambda m: m.averages()),
    "loading the state of averages": (lambda m: m.average.load_state_dict({}), "pipe.load", None),
    "the module of averages": (lambda m: m.average.module, "named_parameters", lambda m: m.averages()),
    "the parameters of averages": (lambda m: m.average.parameters(), "named_parameters", lambda m: m.averages()),
    "differentiating a loss": (
        lambda m: torch.autograd.grad(m.pipe.step(ROWS), list(m.pipe.parameters())),
        "leave backward() out",
        step,
    ),
    "a backward of torch.autograd": (
        lambda m: torch.autograd.backward(m.pipe.step(ROWS)),
        "leave backward() out",
        step,
    ),
    "clipping without a norm": (lambda m: m.pipe.clip_grad_norm_(), "call clip_grad_norm_(max_norm", clip),
    "clipping to NaN": (lambda m: m.pipe.clip_grad_norm_(float("nan")), "clip_grad_norm_(1.0)", clip),
    "a norm of a text": (lambda m: m.pipe.clip_grad_norm_(1.0, "two"), "norm_type=2.0", clip),
    "replan(model)": (lambda m: m.pipe.replan(m.pipe.model), "one optimizer", replan),
    "replan for some steps": (lambda m: m.pipe.replan(m.optimizer, steps="many"), "how many training steps", replan),
    "replan with a text for a cache": (lambda m: m.pipe.replan(m.optimizer, cache="1GB"), "AutoCache(", replan),
    "train(loader)": (lambda m: m.pipe.train(m.loader), "optimizer=", lambda m: m.pipe.train()),
    "train(loader, optimizer)": (
        lambda m: m.pipe.train(m.loader, m.optimizer),
        "call train(",
        lambda m: m.pipe.train(),
    ),
    "a policy on a model": (
        lambda m: autopart.freeze.Policy(lambda epoch, norms: 0).apply(m.pipe.model, 0),
        "call apply(pipe, epoch)",
        policy,
    ),
    "an epoch as text": (
        lambda m: autopart.freeze.PipeTransformer().apply(m.pipe, "1"),
        "call apply(pipe, epoch)",
        policy,
    ),
    "a rule that is a number": (lambda m: autopart.freeze.Policy(3), "a function of (epoch, norms)", policy),
    "a rule that returns a name": (
        lambda m: autopart.freeze.Policy(lambda epoch, norms: "l.0").apply(m.pipe, 0),
        "a list of their names",
        policy,
    ),
    "layers that are none": (
        lambda m: autopart.freeze.Policy(lambda epoch, norms: 0, layers="h.*").apply(m.pipe, 0),
        "the nearest paths",
        policy,
    ),
    "all of what still learns": (
        lambda m: autopart.freeze.PipeTransformer(alpha=2),
        "between 0 and 1",
        lambda m: autopart.freeze.PipeTransformer(alpha=1 / 3),
    ),
    "a cache of a text": (
        lambda m: autopart.freeze.AutoCache("8GB"),
        "8 << 30",
        lambda m: autopart.freeze.AutoCache(8 << 30),
    ),
    "a decay for averages": (
        lambda m: autopart.AveragedModel(m.pipe, decay=0.9),
        "avg_fn=None",
        lambda m: m.average.update_parameters(),
    ),
    "averages of the model": (
        lambda m: m.average.update_parameters(m.pipe.model),
        "update_parameters(pipe)",
        lambda m: m.average.update_parameters(m.pipe),
    ),
    "torch's average of a pipe": (
        lambda m: torch.optim.swa_utils.AveragedModel(m.pipe),
        "autopart.AveragedModel(pipe)",
        None,
    ),
    # data
    "a sampler of a number": (
        lambda m: m.pipe.sampler(3, rows=2),
        "__getitem__",
        lambda m: m.pipe.sampler(range(16), rows=2),
    ),
    "a sampler of a loader": (
        lambda m: m.pipe.sampler(m.loader, rows=2),
        "__getitem__",
        lambda m: m.pipe.sampler(m.loader.dataset, rows=2),
    ),
    "a sampler of no rows": (
        lambda m: m.pipe.sampler(range(9), rows=0),
        "at least 1",
        lambda m: m.pipe.sampler(range(16), rows=2),
    ),
    "data_rows of a text": (lambda m: m.pipe.data_rows("a"), "number of rows", lambda m: m.pipe.data_rows(16)),
    "a sampler without rows": (lambda m: m.pipe.sampler(range(16)), "call sampler(dataset, rows", sampler),
    "a sampler of nothing": (lambda m: m.pipe.sampler([], rows=2), "smaller rows=", sampler),
    "a sampler of a stream": (lambda m: m.pipe.sampler(iter(ROWS), rows=2), "map-style dataset", sampler),
    "a seed as text": (lambda m: m.pipe.sampler(range(16), rows=2, seed="x"), "an integer", sampler),
    "an unknown tracker": (
        lambda m: autopart.MetricsLog("a.jsonl", to="tensorbord"),
        "tensorboard",
        lambda m: autopart.MetricsLog("a.jsonl", tensorboard=False),
    ),
    "metrics without a file": (
        lambda m: autopart.MetricsLog(None),
        "call MetricsLog(path",
        lambda m: autopart.MetricsLog("a.jsonl", tensorboard=False),
    ),
    "metrics of a model": (
        lambda m: autopart.MetricsLog("a.jsonl", tensorboard=False).add(m.pipe.model),
        "call add(pipe",
        lambda m: autopart.MetricsLog("a.jsonl", every=10**6, tensorboard=False).add(m.pipe),
    ),
    # a pipe for a module
    "calling a pipe": (lambda m: m.pipe(ROWS), "pipe.step(batch)", step),
    "copying a pipe": (
        lambda m: copy.deepcopy(m.pipe),
        "pipe.state_dict()",
        lambda m: copy.deepcopy(m.pipe.state_dict()),
    ),
    "a property is set": (
        lambda m: setattr(m.pipe, "training", False),
        "docs/pipe.md",
        lambda m: m.pipe.eval().train(),
    ),
    "a layer of a pipe": (lambda m: m.pipe[0], "pipe.model", lambda m: m.pipe.model.l[0]),
    "the layers of a pipe": (lambda m: list(m.pipe), "pipe.model", lambda m: list(m.pipe.model.children())),
    "fully_shard of a pipe": (lambda m: fully_shard(m.pipe), "pipe.model", None),
}

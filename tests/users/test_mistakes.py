"""What people write by mistake, or by habit from other libraries: each is refused by one of our errors, with a way out.

Here are the mistakes that one process can show, besides impossible options (`test_api`), models that are refused
(`test_bad_input`) and torch's own calls on a pipe (`test_torch_habits`).  An entry is the call and a word of its `fix`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.misleading_models import ROWS, Net
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autopart
from autopart.ir.errors import AutopartError

Call = Callable[[Any], Any]


class Setting:
    """What the calls are made with.  pipe: open, after a step.  closed: a closed one.  average: of the pipe."""

    def __init__(self) -> None:
        options: dict[str, Any] = {"sample": ROWS, "micro_batches": 1, "costs": "analytic"}
        self.pipe = autopart.compile(Net(), "cpu:1", **options)
        self.optimizer = torch.optim.AdamW(self.pipe.parameters())
        self.pipe.step(ROWS)
        self.average = autopart.AveragedModel(self.pipe)
        self.loader = DataLoader(TensorDataset(ROWS), batch_size=2)
        with autopart.compile(Net(), "cpu:1", **options) as self.closed:
            pass

    def plan(self, model: Any = None, cluster: Any = "cpu:2", **options: Any) -> Any:
        return autopart.plan(
            Net() if model is None else model, cluster, **{"sample": ROWS, "costs": "analytic", **options}
        )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("mistakes")
    for name, text in {"model.pt": "x", "p.yaml": "a: 1", "empty.json": "{}", "c.yaml": "devices: []"}.items():
        (folder / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        setting = Setting()
        yield setting
        setting.pipe.close()


CALLS: dict[str, tuple[Call, str]] = {
    # batches
    "a step without a batch": (lambda m: m.pipe.step(), "pass the batch"),
    "a step on None": (lambda m: m.pipe.step(None), "pipe.needs_data"),
    "a step on a loader": (lambda m: m.pipe.step(m.loader), "for batch in loader"),
    "a step on an iterator": (lambda m: m.pipe.step(iter(m.loader)), "for batch in loader"),
    "a step on a text": (lambda m: m.pipe.step("text"), "as tensors"),
    "a step on too many inputs": (lambda m: m.pipe.step(ROWS, ROWS), "without autopart"),
    "a step on another keyword": (lambda m: m.pipe.step(y=ROWS), "without autopart"),
    "a step on an empty batch": (lambda m: m.pipe.step(ROWS[:0]), "leave out"),
    "a step on another width": (lambda m: m.pipe.step(ROWS[:, :1]), "without autopart"),
    "a step on an array": (lambda m: m.pipe.step(ROWS.numpy()), "torch.as_tensor"),
    "a prediction with a target": (lambda m: m.pipe.predict((ROWS, ROWS)), "without autopart"),
    "an evaluation of None": (lambda m: m.pipe.eval_loss(None), "pipe.needs_data"),
    "a dataset as sample": (lambda m: m.plan(sample=TensorDataset(ROWS)), "pass tensors"),
    "a loader as sample": (lambda m: m.plan(sample=m.loader), "next(iter(loader))"),
    "a shape as sample": (lambda m: m.plan(sample=(8, 4)), "as tensors"),
    "no sample": (lambda m: m.plan(sample=None), "sample=batch"),
    "a loss beside that of the model": (lambda m: m.plan(loss_fn=nn.MSELoss()), "(inputs, target)"),
    # models and clusters
    "a class for a model": (lambda m: m.plan(Net), "an instance"),
    "a function for a model": (lambda m: m.plan(lambda x: x), "an instance"),
    "a state for a model": (lambda m: m.plan(Net().state_dict()), "an instance"),
    "a name for a model": (lambda m: m.plan("gpt2"), "an instance"),
    "a pipe for a model": (lambda m: m.plan(m.pipe), "an instance"),
    "an optimizer for a model": (lambda m: m.plan(m.optimizer), "an instance"),
    "model and cluster swapped": (lambda m: autopart.compile("cpu:2", Net()), "an instance"),  # type: ignore[arg-type]
    "a number for a cluster": (lambda m: m.plan(cluster=2), "cpu:2"),
    "a batch for a cluster": (lambda m: m.plan(cluster=ROWS), "cpu:2"),
    "an unknown cluster": (lambda m: m.plan(cluster="gpu:2"), "cuda:8"),
    "a preset without its number": (lambda m: m.plan(cluster="h100"), "h100x8"),
    "a cluster of nothing": (lambda m: m.plan(cluster="cpu:0"), "cuda:8"),
    "a list for a cluster": (lambda m: m.plan(cluster=["cpu", "cpu"]), "autopart.Cluster"),
    "a cluster file that is not there": (lambda m: m.plan(cluster="none.yaml"), "check the path"),
    "a cluster file without devices": (lambda m: m.plan(cluster="c.yaml"), "devices: list"),
    # checkpoints and states
    "a checkpoint that is not there": (lambda m: m.pipe.load("nothing"), "pipe.save"),
    "a file for a checkpoint": (lambda m: m.pipe.load("model.pt"), "pipe.load_state_dict(torch.load(file))"),
    "None for a checkpoint": (lambda m: m.pipe.load(None), "runs/a"),
    "a checkpoint onto a file": (lambda m: m.pipe.save("model.pt"), "pass a folder"),
    "the optimizer before the folder": (lambda m: m.pipe.save(m.optimizer), "runs/a"),
    "the path of a state": (lambda m: m.pipe.load_state_dict("model.pt"), "state_dict()"),
    "an empty state": (lambda m: m.pipe.load_state_dict({}), "state_dict()"),
    "a state in a state": (lambda m: m.pipe.load_state_dict({"model": m.pipe.state_dict()}), "state_dict()"),
    "a state of DDP": (
        lambda m: m.pipe.load_state_dict({f"module.{k}": v for k, v in m.pipe.state_dict().items()}),
        "removeprefix",
    ),
    "a state of another size": (
        lambda m: m.pipe.load_state_dict({k: v[:1] for k, v in m.pipe.state_dict().items()}),
        "state_dict()",
    ),
    "a number of steps below 0": (lambda m: setattr(m.pipe, "steps", -1), "an integer"),
    "a closed pipe trains": (lambda m: m.closed.step(ROWS), "compile the model again"),
    "a closed pipe saves": (lambda m: m.closed.save("x"), "compile the model again"),
    "metrics before a step": (lambda m: m.closed.metrics(), "after pipe.step"),
    # gradients and optimizers
    "clipping parameters": (lambda m: m.pipe.clip_grad_norm_(m.pipe.parameters(), 1.0), "clip_grad_norm_(1.0)"),
    "clipping to a text": (lambda m: m.pipe.clip_grad_norm_("1"), "clip_grad_norm_(1.0)"),
    "clipping to a number below 0": (lambda m: m.pipe.clip_grad_norm_(-1.0), "clip_grad_norm_(1.0)"),
    "a norm of kind 0": (lambda m: m.pipe.clip_grad_norm_(1.0, 0), "positive"),
    "a scale of 0": (lambda m: m.pipe.step(ROWS, scale=0), "above 0"),
    "a text as scale": (lambda m: m.pipe.step(ROWS, scale="1"), "above 0"),
    "train(batch) for step(batch)": (lambda m: m.pipe.train(ROWS), "optimizer="),
    "replan(text)": (lambda m: m.pipe.replan("x"), "one optimizer"),
    "torch's average of a model": (lambda m: autopart.AveragedModel(Net()), "the pipe"),  # type: ignore[arg-type]
    "the state of averages": (lambda m: m.average.state_dict(), "averaged.applied()"),
    "loading the state of averages": (lambda m: m.average.load_state_dict({}), "pipe.load"),
    "the module of averages": (lambda m: m.average.module, "named_parameters"),
    "the parameters of averages": (lambda m: m.average.parameters(), "named_parameters"),
    # data
    "a sampler of a number": (lambda m: m.pipe.sampler(3, rows=2), "__getitem__"),
    "a sampler of a loader": (lambda m: m.pipe.sampler(m.loader, rows=2), "__getitem__"),
    "a sampler of no rows": (lambda m: m.pipe.sampler(range(9), rows=0), "at least 1"),
    "data_rows of a text": (lambda m: m.pipe.data_rows("a"), "number of rows"),
    # files
    "a report as PDF": (lambda m: m.pipe.report("x.pdf"), ".html"),
    "a trace of another kind": (lambda m: autopart.save_trace(m.pipe.timeline(ROWS), "x.bin"), ".json"),
    "a pipe saved as a plan": (lambda m: autopart.save_plan(m.pipe, "x.json"), "docs/pipe.md"),
    "a plan of YAML": (lambda m: autopart.load_plan("p.yaml"), "autopart.plan("),
    "an empty plan": (lambda m: autopart.load_plan("empty.json"), "autopart.plan("),
    "a folder for a plan": (lambda m: autopart.load_plan("."), "check the path"),
    "metrics every 0 steps": (lambda m: autopart.MetricsLog("x.jsonl", every=0), "number of steps"),
    # launching
    "launching a script": (lambda m: autopart.launch("train.py", "cpu:2"), "torchrun"),  # type: ignore[arg-type]
    "launching a result": (lambda m: autopart.launch(None, "cpu:2"), "pass a function"),  # type: ignore[arg-type]
    "launching on a number": (lambda m: autopart.launch(print, 2), "cpu:2"),  # type: ignore[arg-type]
    "launching a lambda": (lambda m: autopart.launch(lambda: 1, "cpu:2"), "top level"),
    "restarts below 0": (lambda m: autopart.launch(print, "cpu:2", restarts=-1), "at least 0"),
    "elastic the wrong way round": (lambda m: autopart.launch(print, "cpu:2", elastic=(3, 2)), "(least, most)"),
    "verifying in one process": (
        lambda m: autopart.verify(Net(), "cpu:2", sample=ROWS, costs="analytic"),
        "torchrun --standalone",
    ),
    # a pipe for a module
    "calling a pipe": (lambda m: m.pipe(ROWS), "pipe.step(batch)"),
    "copying a pipe": (lambda m: copy.deepcopy(m.pipe), "pipe.state_dict()"),
}
ATTRIBUTES = {
    "pipe.step(batch)": "forward backward generate fit loss evaluate validate test train_step training_step",
    "before compile": "to cuda cpu half float double bfloat16 gradient_checkpointing_enable",
    "pipe.model": "module share_memory register_forward_hook apply get_submodule add_module requires_grad_ type",
    "scale=1 / n": "no_sync",
    "pipe.world_size": "size",
    "pipe.cluster": "device",
    "docs/pipe.md": "dtype config optimizer hf_device_map lr_scheduler logger push_to_hub unshard",
}
"""A word of the fix, and the attributes of other wrappers that have it."""
OPTIONS = {
    "sample=": "batch_size train_batch_size", "stages=": "num_stages pp_size", "cluster=": "device_map device_ids",
    "micro_batches=": "gradient_accumulation_steps chunks", "zero=": "fsdp", "precision=": "dtype mixed_precision",
    "drop it": "find_unused_parameters broadcast_buffers", "cluster file": "max_memory",
}  # fmt: skip
"""A word of the fix, and the options of other libraries that have it."""


@pytest.mark.parametrize("name", CALLS)
def test_a_mistake_is_refused_with_a_way_out(made: Setting, name: str) -> None:
    call, word = CALLS[name]
    with pytest.raises(AutopartError) as caught:
        call(made)
    assert word in caught.value.fix, str(caught.value)
    assert "\n" not in caught.value.what and len(caught.value.what) < 160


def test_attributes_and_options_of_other_libraries_are_refused_with_ours(made: Setting) -> None:
    for word, names in ATTRIBUTES.items():
        for name in names.split():
            with pytest.raises(AutopartError, match=f"no attribute '{name}'") as caught:
                getattr(made.pipe, name)
            assert word in caught.value.fix, str(caught.value)
    for word, names in OPTIONS.items():
        for name in names.split():
            with pytest.raises(AutopartError, match=f"no option {name}=") as caught:
                made.plan(**{name: 1})
            assert word in caught.value.fix, str(caught.value)


def test_after_all_mistakes_the_pipe_trains_as_before(made: Setting) -> None:
    plain, loss = Net(), made.pipe.step(ROWS)
    plain.load_state_dict(made.pipe.state_dict())
    assert loss.item() == pytest.approx(plain(ROWS).item(), rel=1e-6)
    assert not list(Path().glob("x*"))  # what was refused has left no file

"""What people give by mistake, or by habit from other libraries, to compile, plan, launch and files.

An entry is the call, a word of the `fix` of its error, and what that fix says, which works: None where it is no call,
or starts processes (`tests/runtime/launch`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import autopart
from support.models.misleading_models import ROWS, Net

Call = Callable[[Any], Any]


def plan(m: Any) -> Any:
    return m.plan()


def save_plan(m: Any) -> Any:
    return autopart.save_plan(m.made, "a.json")


def simulate(m: Any) -> Any:
    return autopart.simulate(m.made, Net(), "cpu:2", sample=ROWS)


OF_ARGUMENTS: dict[str, tuple[Call, str, Call | None]] = {
    # samples
    "a dataset as sample": (
        lambda m: m.plan(sample=TensorDataset(ROWS)),
        "pass tensors",
        lambda m: m.plan(sample=TensorDataset(ROWS).tensors),
    ),
    "a loader as sample": (
        lambda m: m.plan(sample=m.loader),
        "next(iter(loader))",
        lambda m: m.plan(sample=tuple(next(iter(m.loader)))),
    ),
    "a shape as sample": (lambda m: m.plan(sample=(8, 4)), "as tensors", lambda m: m.plan(sample=torch.zeros(8, 8))),
    "no sample": (lambda m: m.plan(sample=None), "sample=batch", plan),
    "a loss beside that of the model": (lambda m: m.plan(loss_fn=nn.MSELoss()), "(inputs, target)", plan),
    "examples in a list": (
        lambda m: m.plan(sample=[{"x": ROWS[0]}, {"x": ROWS[1]}]),
        "without autopart",
        lambda m: m.plan(sample=torch.utils.data.default_collate([{"x": ROWS[0]}, {"x": ROWS[1]}])),
    ),
    # models and clusters
    "a class for a model": (lambda m: m.plan(Net), "an instance", plan),
    "a function for a model": (lambda m: m.plan(lambda x: x), "an instance", plan),
    "a state for a model": (lambda m: m.plan(Net().state_dict()), "an instance", plan),
    "a name for a model": (lambda m: m.plan("gpt2"), "an instance", plan),
    "a pipe for a model": (lambda m: m.plan(m.pipe), "an instance", lambda m: m.plan(m.pipe.model)),
    "an optimizer for a model": (lambda m: m.plan(m.optimizer), "an instance", plan),
    "model and cluster swapped": (
        lambda m: autopart.compile("cpu:2", Net()),
        "an instance",
        lambda m: m.plan(Net(), "cpu:2"),
    ),  # type: ignore[arg-type]
    "a number for a cluster": (lambda m: m.plan(cluster=2), "cpu:2", lambda m: m.plan(cluster="cpu:2")),
    "a batch for a cluster": (lambda m: m.plan(cluster=ROWS), "cpu:2", lambda m: m.plan(cluster="cpu:2", sample=ROWS)),
    "an unknown cluster": (lambda m: m.plan(cluster="gpu:2"), "cuda:8", lambda m: m.plan(cluster="cuda:8")),
    "a preset without its number": (lambda m: m.plan(cluster="h100"), "h100x8", lambda m: m.plan(cluster="h100x8")),
    "a cluster of nothing": (lambda m: m.plan(cluster="cpu:0"), "cuda:8", lambda m: m.plan(cluster="cpu:1")),
    "a list for a cluster": (
        lambda m: m.plan(cluster=["cpu", "cpu"]),
        "autopart.Cluster",
        lambda m: m.plan(cluster="cpu:2"),
    ),
    "a cluster file that is not there": (lambda m: m.plan(cluster="none.yaml"), "check the path", None),
    "a cluster file without devices": (lambda m: m.plan(cluster="c.yaml"), "devices: list", None),
    "layers in a list": (lambda m: m.plan([nn.Linear(8, 8)]), "an instance", plan),
    "a plan for a cluster": (lambda m: m.plan(cluster=m.made), "cpu:2", plan),
    "compiling in one process": (
        lambda m: autopart.compile(Net(), "cpu:2", sample=ROWS, costs="analytic"),
        "torchrun --standalone",
        lambda m: autopart.compile(Net(), "cpu:1", sample=ROWS, costs="analytic").close(),
    ),
    # options
    "a plan file that is not there": (
        lambda m: m.plan(plan="none.json"),
        "check the path",
        lambda m: m.plan(plan="plan.json"),
    ),
    "a number for a plan": (lambda m: m.plan(plan=3), "an autopart.Plan", lambda m: m.plan(plan=m.made)),
    "a plan and stages": (lambda m: m.plan(plan=m.made, stages=2), "drop stages=", lambda m: m.plan(plan=m.made)),
    "a cut at no module": (lambda m: m.plan(cuts=["layer.1"]), "the nearest paths", lambda m: m.plan(cuts=["l.1"])),
    "a pin of no module": (
        lambda m: m.plan(pins={"layer.1": 0}),
        "the nearest paths",
        lambda m: m.plan(pins={"l.1": 0}),
    ),
    "a pin behind the last stage": (lambda m: m.plan(pins={"l.1": 5}), "0 to 1", lambda m: m.plan(pins={"l.1": 1})),
    "more stages than devices": (lambda m: m.plan(stages=3), "at most 2", lambda m: m.plan(stages=2)),
    "more replicas than devices": (lambda m: m.plan(replicas=3), "at most 2", lambda m: m.plan(replicas=2)),
    "an unknown optimizer": (lambda m: m.plan(optimizer="lion"), "adamw", lambda m: m.plan(optimizer="adamw")),
    "an optimizer by number": (
        lambda m: m.plan(optimizer=3),
        "torch.optim.AdamW",
        lambda m: m.plan(optimizer=torch.optim.AdamW),
    ),
    "weights in a table": (lambda m: m.plan(weights={"a": 1}), "safetensors", lambda m: m.plan(weights="init")),
    "an unknown backend": (lambda m: m.plan(backend="inductr"), "inductor", lambda m: m.plan(backend="eager")),
    "an unknown transport": (lambda m: m.plan(transport="mpi"), "gloo", lambda m: m.plan(transport="gloo")),
    "a loss for each row": (
        lambda m: m.plan(nn.Linear(8, 8), sample=(ROWS, ROWS), loss_fn=nn.MSELoss(reduction="none")),
        "return one number",
        lambda m: m.plan(nn.Linear(8, 8), sample=(ROWS, ROWS), loss_fn=nn.MSELoss()),
    ),
    # files
    "a report as PDF": (lambda m: m.made.report("x.pdf"), ".html", lambda m: m.made.report("a.html")),
    "a trace of another kind": (
        lambda m: autopart.save_trace(simulate(m), "x.bin"),
        ".json",
        lambda m: autopart.save_trace(simulate(m), "a.json"),
    ),
    "a pipe saved as a plan": (
        lambda m: autopart.save_plan(m.pipe, "x.json"),
        "docs/pipe.md",
        lambda m: autopart.save_plan(m.made, "a.json"),
    ),
    "a plan of YAML": (
        lambda m: autopart.load_plan("p.yaml"),
        "autopart.plan(",
        lambda m: autopart.load_plan("plan.json"),
    ),
    "an empty plan": (
        lambda m: autopart.load_plan("empty.json"),
        "autopart.plan(",
        lambda m: autopart.load_plan("plan.json"),
    ),
    "a folder for a plan": (
        lambda m: autopart.load_plan("."),
        "check the path",
        lambda m: autopart.load_plan("plan.json"),
    ),
    "metrics every 0 steps": (
        lambda m: autopart.MetricsLog("x.jsonl", every=0),
        "number of steps",
        lambda m: autopart.MetricsLog("a.jsonl", every=1, tensorboard=False),
    ),
    "plan and path swapped": (lambda m: autopart.save_plan("a.json", m.made), "call save_plan(plan, path)", save_plan),
    "a folder that is not there": (lambda m: autopart.save_plan(m.made, "no/a.json"), "that exists", save_plan),
    "a plan for its file": (
        lambda m: autopart.load_plan(m.made),
        "call load_plan(path)",
        lambda m: autopart.load_plan("plan.json"),
    ),
    "a trace of a plan": (
        lambda m: autopart.save_trace(m.made, "a.json"),
        "call save_trace(timeline",
        lambda m: autopart.save_trace(simulate(m), "a.json"),
    ),
    "a report without a path": (lambda m: m.made.report(None), "call report(path", lambda m: m.made.report("a.html")),
    "a report into no folder": (lambda m: m.made.report("no/a.html"), "that exists", lambda m: m.made.report("a.html")),
    "simulating the wrong way round": (
        lambda m: autopart.simulate(Net(), m.made, "cpu:2", sample=ROWS),
        "an instance",
        simulate,
    ),
    "simulating another cluster": (
        lambda m: autopart.simulate(m.made, Net(), "cpu:3", sample=ROWS),
        "autopart.plan(",
        simulate,
    ),
    # launching
    "launching a script": (lambda m: autopart.launch("train.py", "cpu:2"), "torchrun", None),  # type: ignore[arg-type]
    "launching a result": (lambda m: autopart.launch(None, "cpu:2"), "pass a function", None),  # type: ignore[arg-type]
    "launching on a number": (lambda m: autopart.launch(print, 2), "cpu:2", None),  # type: ignore[arg-type]
    "launching a lambda": (lambda m: autopart.launch(lambda: 1, "cpu:2"), "top level", None),
    "restarts below 0": (lambda m: autopart.launch(print, "cpu:2", restarts=-1), "at least 0", None),
    "elastic the wrong way round": (lambda m: autopart.launch(print, "cpu:2", elastic=(3, 2)), "(least, most)", None),
    "verifying in one process": (
        lambda m: autopart.verify(Net(), "cpu:2", sample=ROWS, costs="analytic"),
        "torchrun --standalone",
        lambda m: autopart.verify(Net(), "cpu:1", sample=ROWS, costs="analytic"),
    ),
    "processes by nprocs=": (lambda m: autopart.launch(print, nprocs=2), "call launch(fn, cluster", None),
    "arguments by args=": (lambda m: autopart.launch(print, "cpu:2", args=(1,)), "call launch(fn, cluster", None),
    "a time limit as text": (lambda m: autopart.launch(print, "cpu:2", timeout="5"), "a number of seconds", None),
    "a pipe for an argument": (lambda m: autopart.launch(print, "cpu:2", m.pipe), "top level", None),
    "a pause as text": (lambda m: autopart.launch(print, "cpu:2", elastic=(1, 2), rejoin="soon"), "seconds", None),
    "elastic as in torchrun": (lambda m: autopart.launch(print, "cpu:2", elastic="1:2"), "(least, most)", None),
}

"""PipeTransformer's evaluation (He et al., ICML 2021, tables 2 and 3): its plans and ours, SIMULATED on its machines.

    python -m benchmarks.papers.pipe_transformer               about 25 minutes; writes results/pipe_transformer.json
    python -m benchmarks.papers.pipe_transformer --only squad  one case; the recorded others are kept

Two hosts with 8 Quadro RTX 5000 each (11.2 TFLOP/s in fp32, 448 GB/s, 16 GB; PCIe 15.75 GB/s, between hosts 5 GB/s), of
whose rates kernels reach the shares that our presets assume. Ten epochs; before each the closed form freezes
`ceil(L (1 - (1 - alpha)^epoch))` layers, with alpha = 1/3. Speed-ups are those of all ten epochs, against eight GPipe
stages with two replicas and no freezing, as in the paper. Left out on both sides: the changes of plan (in their log 9
to 40 s each), input pipelines, and what their code does without need.

Rows: "freeze" keeps the plan of epoch 0; "autopipe" shortens the pipeline, with two replicas; "autodp" gives free
devices to replicas; "cache" starts behind the frozen layers, whose activations are read from host memory. "theirs" are
plans by the rules of their code (`planners/pipe_transformer.py`), in our simulator. "ours" are those of autopart's
planner for the model with frozen layers: where theirs keep two replicas, ours keep those of our plan of epoch 0.
Figures of the paper are published, on real machines.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import transformers
from torch import nn

from autopart.batch.batch import flatten
from autopart.capture import CaptureCache
from autopart.extras.freezing.policies import closed_form
from autopart.files.presets import MEMORY_REACHED, REACHED
from autopart.ir.cluster import Cluster, Device, Level, Link
from autopart.options import Options, read_options
from autopart.passes.simulation.estimate import estimate
from autopart.planning.make import Planned, make_plan
from autopart.planning.simulated import estimated_plan
from autopart.session.executors.kinds import projected
from benchmarks.papers.planners.pipe_transformer import MICRO_BATCHES, balanced, stages_for
from benchmarks.shared.common import recorded, write

GB = 10**9
GPU = Device("cuda", 16 * GB, 11_200 * GB, 448 * GB, "RTX 5000", (), REACHED, MEMORY_REACHED)
HOST_LINK, NETWORK = Link(10_000, 15_750_000_000), Link(20_000, 5 * GB)
CLUSTER = Cluster((GPU,) * 16, (Level(8, HOST_LINK), Level(16, NETWORK)))
STAGES, REPLICAS, EPOCHS, ALPHA = 8, 2, 10, 1 / 3
ALPHAS = (1 / 5, 1 / 4, 1 / 3, 2 / 5, 1 / 2)
ROWS = ("freeze", "autopipe+cache", "autopipe+autodp", "all")
PUBLISHED = {
    "imagenet": {"speed_up": 26.5 / 9.35, "freeze": 0.95, "autopipe+cache": 1.26, "autopipe+autodp": 2.27, "all": 2.83},
    "cifar100": {
        "speed_up": 35.1 / 12.383,
        "alphas": {"1/5": 2.04, "1/4": 2.44, "1/3": 2.83, "2/5": 3.29, "1/2": 3.86},
    },
    "squad": {"speed_up": 5.117 / 2.433},
}
"""Elastic training against the baseline: from the times of table 1, the ablation of figure 8, the sweep of table 2."""


# ---- models ----------------------------------------------------------------------------------------------------------


class Rest(nn.Module):
    """The layers behind the frozen ones, which read cached activations. tail: what follows the last layer."""

    def __init__(self, layers: nn.ModuleList, tail: nn.Module) -> None:
        super().__init__()
        self.layers, self.tail = layers, tail

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            out = layer(hidden)
            hidden = out[0] if isinstance(out, tuple) else out
        loss: torch.Tensor = self.tail(hidden, labels)
        return loss


class Classified(nn.Module):
    """Norm, classifier of the first token, and loss of a ViT."""

    def __init__(self, model: transformers.ViTForImageClassification) -> None:
        super().__init__()
        self.norm, self.head = model.vit.layernorm, model.classifier

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.norm(hidden)[:, 0]), labels)


class Answered(nn.Module):
    """Start and end of an answer, and their loss, of a BERT."""

    def __init__(self, model: transformers.BertForQuestionAnswering) -> None:
        super().__init__()
        self.head = model.qa_outputs

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(hidden)
        return (
            nn.functional.cross_entropy(logits[..., 0], labels[:, 0])
            + nn.functional.cross_entropy(logits[..., 1], labels[:, 1])
        ) / 2


@dataclass(frozen=True)
class Case:
    """A row of the paper.

    count: of layers; samples: of an epoch; rows: of a batch of all pipelines; layers: path of the layers; sub: of the
    second sub-layer in a layer; sizes: millions of parameters of the two sub-layers; hidden: of a cached sample,
    tokens and width; tail: what follows the layers; labels: of a number of rows."""

    count: int
    samples: int
    rows: int
    model: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, torch.Tensor]]
    layers: str
    sub: str
    sizes: tuple[float, float]
    hidden: tuple[int, int]
    tail: Callable[[Any], nn.Module]
    labels: Callable[[int], torch.Tensor]


def _vit(classes: int) -> Callable[[], nn.Module]:
    return lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(num_labels=classes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    )


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.BertForQuestionAnswering(config)


def _images(rows: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.empty(rows, 3, 224, 224), "labels": _classes(rows)}


def _questions(rows: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(rows, LENGTH, dtype=torch.long)
    ends = torch.zeros(rows, dtype=torch.long)
    return {"input_ids": ids, "start_positions": ends, "end_positions": ends}


def _classes(rows: int) -> torch.Tensor:
    return torch.zeros(rows, dtype=torch.long)


LENGTH = 384
_VIT = ("vit.layers", "layernorm_after", (2.36, 4.72), (197, 768), Classified, _classes)
CASES = {
    "imagenet": Case(12, 1_281_167, 384, _vit(1000), _images, *_VIT),
    "cifar100": Case(12, 50_000, 384, _vit(100), _images, *_VIT),
    "squad": Case(
        24, 88_524, 128, _bert, _questions, "bert.encoder.layer", "intermediate", (4.2, 8.4), (LENGTH, 1024), Answered,
        lambda rows: torch.zeros(rows, 2, dtype=torch.long),
    ),
}  # fmt: skip


# ---- plans -----------------------------------------------------------------------------------------------------------


def layer_list(model: nn.Module, case: Case) -> nn.ModuleList:
    """Return the layers of a model."""
    found = model.get_submodule(case.layers)
    assert isinstance(found, nn.ModuleList)
    return found


@cache
def captured(name: str, frozen: int, *, cached: bool) -> tuple[CaptureCache, Any]:
    """Return what captures a case whose first layers are frozen, and its batch. cached: without what is frozen."""
    case = CASES[name]
    with torch.device("meta"):
        model = case.model().train()
        layers = layer_list(model, case)
        if cached and frozen:
            rest: nn.Module = Rest(nn.ModuleList(list(layers)[frozen:]), case.tail(model))
            given = {"hidden": torch.empty(case.rows, *case.hidden), "labels": case.labels(case.rows)}
            return CaptureCache(rest), flatten(given)
        if frozen:
            body = model.get_submodule(case.layers.split(".")[0])
            for module in (body.embeddings, *list(layers)[:frozen]):
                module.requires_grad_(False)
        return CaptureCache(model), flatten(case.batch(case.rows))


def their_options(name: str, frozen: int, *, cached: bool, more_replicas: bool) -> dict[str, Any]:
    """Return the options of the plan that their rules make."""
    case = CASES[name]
    sizes = [size for _ in range(case.count) for size in case.sizes]
    active = max(1, len(sizes) - 2 * frozen)
    stages = stages_for(sizes, active, STAGES) if frozen else STAGES
    replicas = len(CLUSTER.devices) // stages if more_replicas else REPLICAS
    cuts, place = [], len(sizes) - active
    for taken in balanced(sizes[place:], stages)[:-1]:
        place += taken
        layer, second = divmod(place, 2)
        layer -= frozen if cached and frozen else 0
        home = "layers" if cached and frozen else case.layers
        cuts.append(f"{home}.{layer}" + (f".{case.sub}" if second else ""))
    return {
        "stages": stages, "replicas": replicas, "micro_batches": MICRO_BATCHES[stages], "schedule": "gpipe",
        "cuts": cuts, "recompute": "off",
    }  # fmt: skip


def step_s(name: str, frozen: int, options: Mapping[str, Any], *, cached: bool) -> tuple[float, str]:
    """Return the simulated seconds of a step under the best plan that the options allow, and the plan in a line."""
    captures, batch = captured(name, frozen, cached=cached)
    read = read_options(optimizer="adam", costs="analytic", cache=False, **options)
    plan = make_plan(captures, batch, CLUSTER, read, to_run=False).plan
    seconds = plan.step_ns * 1e-9
    if cached and frozen:
        seconds = max(seconds, reading_s(CASES[name], plan.decision.copies))
    widths = "+".join(str(len(stage.ranks)) for stage in plan.stages)
    return (
        seconds,
        f"{len(plan.stages)} stages of {widths} ranks, {len(plan.micro_rows)} micro-batches, {plan.schedule}",
    )


def reading_s(case: Case, copies: int) -> float:
    """Return the seconds in which the cached activations of a batch come from host memory to the first stages. A host
    has one root for its cards, so copies on a host share its link; reading is ahead of computing."""
    tokens, width = case.hidden
    return case.rows * tokens * width * 4 / (HOST_LINK.bytes_per_s * min(copies, 2))


@cache
def dense(name: str, *, theirs: bool) -> Planned:
    """Return the plan of epoch 0, by their rules or by our planner."""
    captures, batch = captured(name, 0, cached=False)
    return make_plan(captures, batch, CLUSTER, _dense_options(name, theirs=theirs), to_run=False)


def _dense_options(name: str, *, theirs: bool) -> Options:
    options = their_options(name, 0, cached=False, more_replicas=False) if theirs else {}
    return read_options(optimizer="adam", costs="analytic", cache=False, **options)


def kept_s(name: str, frozen: int, *, theirs: bool) -> float:
    """Return the simulated seconds of a step if the plan for the model without freezing stays."""
    first = dense(name, theirs=theirs)
    captures, batch = captured(name, frozen, cached=False)
    program = captures(batch, first.captured.graph.size)
    plan = replace(first.plan, decision=projected(program, first.captured.graph, first.plan.decision))
    options = _dense_options(name, theirs=theirs)
    return estimate(*estimated_plan(plan, program, captures, batch, CLUSTER, options)).step_ns * 1e-9


# ---- the evaluation --------------------------------------------------------------------------------------------------


class Times:
    """Simulated steps of a case by who plans, what may change, and how many layers are frozen; each is made once.

    plans: what was chosen, in a line."""

    def __init__(self, name: str) -> None:
        self.name, self.case = name, CASES[name]
        self.plans: dict[str, str] = {}
        self._found: dict[tuple[str, str, int], float] = {}

    def step(self, who: str, row: str, frozen: int) -> float:
        """Return the seconds of a step."""
        key = (who, row if frozen else "none", frozen)
        if key not in self._found:
            self._found[key], plan = self._made(*key)
            said = self.plans[" ".join(map(str, key))] = f"{self._found[key]:.3f} s, {plan}"
            print(f"{self.name} {' '.join(map(str, key))}: {said}", flush=True)
        return self._found[key]

    def _made(self, who: str, row: str, frozen: int) -> tuple[float, str]:
        theirs, free = who == "theirs", row in ("autopipe+autodp", "all")
        if row == "freeze":
            return kept_s(self.name, frozen, theirs=theirs), "the plan of epoch 0"
        cached = row in ("autopipe+cache", "all")
        if theirs:
            options = their_options(self.name, frozen, cached=cached, more_replicas=free)
        else:
            options = {} if free or not frozen else {"replicas": self._width()}
        return step_s(self.name, frozen, cached=cached, options=options)

    def _width(self) -> int:
        """Return the most replicas of a stage in our plan of epoch 0."""
        self.step("ours", "none", 0)
        return max(map(int, self.plans["ours none 0"].split(" of ")[1].split()[0].split("+")))

    def hours(self, who: str, row: str, alpha: float = ALPHA) -> float:
        """Return the hours of ten epochs."""
        frozen = [0 if row == "none" else closed_form(self.case.count, alpha, epoch) for epoch in range(EPOCHS)]
        return sum(self.step(who, row, each) for each in frozen) * self.case.samples / self.case.rows / 3600


def evaluated(name: str, alphas: Sequence[float]) -> dict[str, Any]:
    """Return hours and speed-ups of a case."""
    times = Times(name)
    base = times.hours("theirs", "none")
    found: dict[str, Any] = {"published": PUBLISHED[name], "hours": {}, "speed_up": {}, "alphas": {}}
    for who in ("theirs", "ours"):
        hours = {row: times.hours(who, row) for row in ("none", *ROWS)}
        found["hours"][who] = hours
        found["speed_up"][who] = {row: base / value for row, value in hours.items()}
        found["alphas"][who] = {f"{alpha:.2f}": base / times.hours(who, "all", alpha) for alpha in alphas}
    rows = found["speed_up"]
    found["claims"] = {
        "ours is not slower in any row": all(rows["ours"][row] >= rows["theirs"][row] for row in rows["ours"]),
        "the rows are in the order of the paper": all(
            own["freeze"] <= own["autopipe+cache"] <= own["all"] and own["autopipe+autodp"] <= own["all"]
            for own in rows.values()
        ),
    }
    return {**found, "plans": times.plans}


def main() -> None:
    """Read the command line, evaluate, print and write."""
    parser = argparse.ArgumentParser(description="PipeTransformer's evaluation, simulated.")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    asked = parser.parse_args()
    for name in asked.only:
        own = evaluated(name, ALPHAS if name == "cifar100" else ())
        for who, rows in own["speed_up"].items():
            print(name, who, {row: f"{value:.2f}x" for row, value in rows.items()})
        print(name, own["alphas"], own["claims"])
        cases = {**recorded("pipe_transformer", "cases"), name: own}
        found = {"simulated": True, "cases": cases}
        write("pipe_transformer", found, command="python -m benchmarks.papers.pipe_transformer")


if __name__ == "__main__":
    main()

"""What slices would take is said unasked, where devices idle for long."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import autopart
from autopart.batch.batch import flatten
from autopart.capture import CaptureCache
from autopart.files.clusters import parse_cluster
from autopart.options import read_options
from autopart.planning.make import make_plan

ROWS, TOKENS, WIDTH, VOCAB = 64, 1024, 256, 64
BATCH = dict.fromkeys(("ids", "labels"), torch.zeros(ROWS, TOKENS, dtype=torch.long))
OPTIONS = {"stages": 2, "replicas": 1, "costs": "analytic", "cache": False}


class Wide(nn.Module):
    """A few wide layers, each token for itself, or each with what stands before and behind it."""

    def __init__(self, *, causal: bool = True) -> None:
        super().__init__()
        self.table, self.head, self.causal = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB), causal
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x if self.causal else x + x.mean(1, keepdim=True)))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def planned(model: nn.Module, **options: Any) -> autopart.Plan:
    return autopart.plan(model, "cuda:2", sample=BATCH, **{**OPTIONS, **options})


def tried(plan: autopart.Plan) -> list[tuple[int, str]]:
    return [(a.step_ns, a.why) for a in plan.outlook.alternatives if a.name == 'token_slices="auto"']


def test_slices_are_an_alternative_of_a_plan_that_idles() -> None:
    plan = planned(Wide(), micro_batches=1)
    assert plan.outlook.bubble > 0.15 and not plan.decision.token_slices
    ((step_ns, why),) = tried(plan)
    asked = planned(Wide(), micro_batches=1, token_slices="auto")
    assert asked.decision.token_slices and step_ns == asked.step_ns < plan.step_ns and "tokens" in why


def test_slices_that_save_nothing_are_noted() -> None:
    plan = planned(Wide(), micro_batches=64)
    assert not tried(plan) and (plan.outlook.bubble < 0.15 or any("slices of sequences save" in n for n in plan.notes))


def test_a_start_does_not_capture_another_length_to_try_slices() -> None:
    """A plan that is run costs no more captures than one of whole sequences that were asked for."""

    def captured(*, to_run: bool, **options: Any) -> tuple[int, autopart.Plan]:
        captures, given = CaptureCache(Wide()), {**OPTIONS, "micro_batches": 1, **options}
        made = make_plan(captures, flatten(BATCH), parse_cluster("cuda:2"), read_options(**given), to_run=to_run)
        return captures.made, made.plan

    (asked, _), (started, start), (planned_alone, alone) = (
        captured(to_run=True, token_slices=1),
        captured(to_run=True),
        captured(to_run=False),
    )
    assert start.outlook.bubble > 0.15 and not tried(start) and tried(alone)
    assert asked == started < planned_alone


def test_whole_sequences_that_are_asked_for_are_not_tried_in_slices() -> None:
    assert not tried(planned(Wide(), micro_batches=1, token_slices=1))


def test_a_model_that_cannot_be_sliced_says_so() -> None:
    plan = planned(Wide(causal=False), micro_batches=1)
    assert not tried(plan) and any("sequences are whole" in note for note in plan.notes)

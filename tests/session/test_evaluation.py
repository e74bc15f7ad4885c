"""Evaluation in micro-batches that overlap: the loss of the whole batch, or the batch stays whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.grids import sampled
from support.workers import Workers
from torch import nn

import autopart
from autopart.session.session import Session


class Scored(nn.Module):
    """Tokens with ignored labels: micro-batches count differently.  kind: what it does in eval mode alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.table, self.middle, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, kind = self.middle(self.table(ids)), "" if self.training else self.kind
        if kind == "batch statistics":
            x = nn.functional.batch_norm(x.transpose(1, 2), None, None, training=True).transpose(1, 2)
        elif kind == "dropout":
            x = nn.functional.dropout(x, 0.5, training=True)
        elif kind == "a counter":
            self.seen += 1
            x = x * self.seen
        scores = self.head(x.tanh())
        if kind == "largest":
            return scores.max() - scores.mean()
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


CUT = {"tokens": True, "batch statistics": False, "dropout": False, "a counter": False, "largest": False}


def data(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(rows)
    ids = torch.randint(0, 11, (rows, 5), generator=source)
    labels = torch.where(torch.rand(ids.shape, generator=source) < 0.4, -100, ids)
    return ids, labels


def evaluated(kind: str, options: dict[str, Any], rows: tuple[int, ...]) -> dict[str, Any]:
    """Return the losses of batches of these rows, given to the first rank alone, those of one process, and how many
    micro-batches were run.
    """
    torch.set_num_threads(1)
    found: dict[str, Any] = {"losses": [], "expected": [], "micros": []}
    given = {"schedule": "1f1b", "costs": "analytic", **options}
    with autopart.compile(Scored(kind), sample=data(8), **given) as pipe:
        session: Session = pipe.session
        for count in rows:
            batch = data(count) if pipe.rank == pipe.plan.stages[0].ranks[0] else None
            found["losses"].append(pipe.eval_loss(batch).item() if batch is None else pipe.eval_loss(*batch).item())
            found["expected"].append(Scored(kind).eval()(*data(count)).item() if kind != "a counter" else 0.0)
            found["micros"].append(len(session.road.rows))
    return found


@pytest.mark.parametrize("kind", sampled(CUT))
def test_a_loss_is_evaluated_in_micro_batches_where_that_is_exact(pair: Workers, kind: str) -> None:
    options = {"cluster": "cpu:2", "stages": 2, "micro_batches": 4}
    for found in pair.run(evaluated, kind, options, (3, 8, 7)):
        if kind not in ("dropout", "a counter"):
            assert found["losses"] == pytest.approx(found["expected"], rel=1e-6)
        assert found["micros"] == ([2, 4, 4] if CUT[kind] else [1, 1, 1])


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [(1, 2), (2, 1), (1, 3), (2, 2)])
def test_all_replicas_but_those_of_the_first_stage_evaluate(workers: Workers, replicas: tuple[int, ...]) -> None:
    options = {"cluster": "cpu:4", "stages": 2, "replicas": replicas, "micro_batches": 3}
    for found in workers.run(evaluated, "tokens", options, (8, 9, 2, 1)):
        assert found["losses"] == pytest.approx(found["expected"], rel=1e-6)

"""What is counted of a batch before a step: shares of micro-batches, and numbers of the whole batch."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from support.loss_oracle import derive
from torch import nn

from autopart.capture import capture
from autopart.capture.batch import flatten
from autopart.ir.errors import BatchError
from autopart.ir.graph import LossReduction
from autopart.ir.size import Size
from autopart.runtime.tensors import LocalTensors
from autopart.session.batch_counts import BatchCounts, Inputs

CPU = torch.device("cpu")
ROWS = (2, 3)


class Smoothed(nn.Module):
    """Class 0 weighs nothing; the loss of the places is divided by how many are of class 3."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("balance", torch.tensor([0.0, 1.0, 2.0, 4.0]))
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        classes = F.cross_entropy(hidden, y, weight=self.balance, label_smoothing=0.1, ignore_index=1)
        return classes + hidden.square().sum() / (y == 3).sum()


def counted(target: list[int]) -> tuple[BatchCounts, LossReduction, list[Inputs]]:
    model, batch = Smoothed(), flatten((torch.ones(5, 4), torch.tensor(target)))
    captures = [capture(model, batch, size=Size(rows)) for rows in ROWS]
    reduction = derive(captures[0], captures[1], batch)
    counts = BatchCounts(LocalTensors(CPU), CPU)
    for captured in captures:
        counts.add(captured, reduction)
    names = captures[0].graph.inputs
    return counts, reduction, [dict(zip(names, piece, strict=True)) for piece in batch.micro(ROWS)]


def test_each_term_has_its_own_number_and_a_count_is_that_of_the_whole_batch() -> None:
    counts, reduction, inputs = counted([1, 2, 3, 3, 0])
    assert reduction.kind == "sum" and counts.shares(reduction, ROWS, inputs) == [1.0, 1.0]
    places = {("whole" if a.reader is None else a.weight.kind): place for place, a in enumerate(reduction.adjusted)}
    first, second = counts.numbers(reduction, ROWS, inputs)
    assert (first[places["tokens"]], second[places["tokens"]]) == (2 / 10, 8 / 10)
    assert first[places["whole"]] == second[places["whole"]] == 2
    assert first[places["sum"]] == second[places["sum"]] == 1
    assert LossReduction.from_json(json.loads(json.dumps(asdict(reduction)))) == reduction


def test_ignored_targets_weigh_nothing_and_smoothed_targets_of_classes_without_weight_are_refused() -> None:
    counts, reduction, inputs = counted([1, 1, 3, 2, 0])
    places = [place for place, a in enumerate(reduction.adjusted) if a.weight.kind == "tokens"]
    assert [row[places[0]] for row in counts.numbers(reduction, ROWS, inputs)] == [0.0, 1.0]
    counts, reduction, inputs = counted([0, 1, 3, 2, 0])
    with pytest.raises(BatchError, match="classes that weigh 0"):
        counts.numbers(reduction, ROWS, inputs)

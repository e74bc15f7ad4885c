"""What is counted of a batch before a step: shares of micro-batches, and numbers of the whole batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.oracles.loss_oracle import derive
from torch import nn

from autopart.batch.batch import flatten
from autopart.capture import capture
from autopart.ir.errors import BatchError
from autopart.ir.graph import LossReduction, Size
from autopart.ir.shares import Division
from autopart.runtime.tensors import LocalTensors
from autopart.session.step.batch_counts import BatchCounts, weighted_loss
from autopart.session.step.loss_shares import is_uneven, loss_shares, pieces_of, whole_shares

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


def counted(target: list[int]) -> tuple[LossReduction, list[tuple[float, ...]]]:
    """How the losses combine, and the share of each micro-batch."""
    model, batch = Smoothed(), flatten((torch.ones(5, 4), torch.tensor(target)))
    captures = [capture(model, batch, size=Size(rows)) for rows in ROWS]
    reduction = derive(captures[0], captures[1], batch)
    counts = BatchCounts(LocalTensors(CPU), CPU)
    for captured in captures:
        counts.add(captured, reduction)
    names = captures[0].graph.inputs
    inputs = [dict(zip(names, piece, strict=True)) for piece in batch.micro(ROWS)]
    shares = loss_shares(reduction, ROWS, (Division(),), counts.measured(reduction, ROWS, inputs))
    return reduction, [share for (share,) in shares[Division()]]


def test_each_term_has_its_own_number_and_a_count_is_that_of_the_whole_batch() -> None:
    reduction, (first, second) = counted([1, 2, 3, 3, 0])
    assert reduction.kind == "sum" and (first[0], second[0]) == (1.0, 1.0)
    places = {("whole" if a.reader is None else a.weight.kind): 1 + n for n, a in enumerate(reduction.adjusted)}
    assert (first[places["tokens"]], second[places["tokens"]]) == (2 / 10, 8 / 10)
    assert first[places["whole"]] == second[places["whole"]] == 2
    assert first[places["sum"]] == second[places["sum"]] == 1


def test_ignored_targets_weigh_nothing_and_smoothed_targets_of_classes_without_weight_are_refused() -> None:
    reduction, shares = counted([1, 1, 3, 2, 0])
    places = [1 + place for place, a in enumerate(reduction.adjusted) if a.weight.kind == "tokens"]
    assert [share[places[0]] for share in shares] == [0.0, 1.0]
    with pytest.raises(BatchError, match="classes that weigh 0"):
        counted([0, 1, 3, 2, 0])


def test_shares_of_replicas_that_cut_a_micro_batch_differently_are_added_up_from_pieces() -> None:
    halves, thirds = Division((1, 1)), Division((1, 1, 1))
    pieces = pieces_of((6, 5), (halves, thirds))
    assert pieces[:4] == ((0, 0, 2), (0, 2, 3), (0, 3, 4), (0, 4, 6))
    measured = [float(end - first) for _, first, end in pieces]
    for reduction in (LossReduction("rows"), LossReduction("tokens", "count")):
        shares = loss_shares(reduction, (6, 5), (halves, thirds), measured)
        assert [[share[0] * 11 for share in replicas] for replicas in shares[halves]] == [[3, 3], [3, 2]]
        assert [[share[0] * 11 for share in replicas] for replicas in shares[thirds]] == [[2, 2, 2], [2, 2, 1]]
        assert not is_uneven(shares) and whole_shares(shares) == [6 / 11, 5 / 11]


def test_a_replica_without_rows_weighs_nothing() -> None:
    shares = loss_shares(LossReduction("sum"), (1,), (Division((1, 1)),))
    assert shares[Division((1, 1))] == [[(1.0,), (0.0,)]] and is_uneven(shares) and whole_shares(shares) == [1.0]


def test_losses_are_added_up_in_the_order_of_the_micro_batches_and_those_without_weight_are_left_out() -> None:
    losses = {micro: torch.rand((), dtype=torch.float64) for micro in range(7)} | {
        3: torch.tensor(float("nan")).double()
    }
    shares = [0.1, 0.2, 0.3, 0.0, 0.15, 0.05, 0.2]
    expected = torch.zeros((), dtype=torch.float64)
    for micro, share in enumerate(shares):
        expected = expected + losses[micro] * share if share else expected
    assert weighted_loss(losses, shares) == expected.item()
    assert weighted_loss({}, shares) == 0.0

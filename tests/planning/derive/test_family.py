"""One model's program at every size: captured, or on the line between two captures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopart.batch.batch import Batch, flatten
from autopart.capture import CaptureCache, Captured
from autopart.ir.errors import GraphError, RefusedError
from autopart.ir.graph import Size
from autopart.planning.derive.family import another_size, capture_family


class Net(nn.Module):
    """One row may run another program; `bent`: its sizes do not lie on a line."""

    def __init__(self, *, unlike_at_one: bool = False, bent: bool = False) -> None:
        super().__init__()
        self.layer, self.shift = nn.Linear(6, 6), nn.Parameter(torch.zeros(1, 6))
        self.unlike_at_one, self.bent = unlike_at_one, bent

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = self.shift
        if self.unlike_at_one and x.shape[0] > 1:
            shift = shift.expand(x.shape[0], -1)
        if self.bent:
            shift = shift * torch.ones(x.shape[0] // 2).sum()
        return self.layer(x + shift)


class Counted(CaptureCache):
    """Remembers the sizes that were captured, in order."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sizes: list[Size] = []

    def __call__(self, batch: Batch, size: Size, mode: str = "step") -> Captured:
        self.sizes.append(size)
        return super().__call__(batch, size, mode)


def counted(**options: bool) -> tuple[Counted, Batch]:
    data = torch.ones(8, 6), torch.ones(8, 6)
    return Counted(Net(**options), F.mse_loss), flatten(data, with_target=True)


def test_two_captures_tell_every_size() -> None:
    captures, batch = counted()
    family = capture_family(captures, batch, Size(4), [Size(4), Size(2)])
    assert captures.sizes == [Size(4), Size(2)] and not family.on_meta
    assert family.known([Size(1), Size(3), Size(8)])
    for rows in (1, 3, 4, 8):
        assert family.at(Size(rows)).shape_digest() == family.captured(Size(rows)).graph.shape_digest()


def test_without_another_size_only_the_own_one_is_known() -> None:
    captures, batch = counted()
    family = capture_family(captures, batch, Size(4))
    assert captures.sizes == [Size(4)] and family.other is None
    assert family.known([Size(4)]) and not family.known([Size(4), Size(2)])
    assert family.at(Size(4)) == family.base.graph
    with pytest.raises(GraphError, match="the program of 2 rows is not known from that of 4 rows"):
        family.at(Size(2))


def test_sizes_off_the_line_are_not_known() -> None:
    captures, batch = counted(bent=True)
    family = capture_family(captures, batch, Size(4), [Size(2)])
    assert family.known([Size(4), Size(2)]) and not family.known([Size(3)])
    with pytest.raises(GraphError, match="3 rows"):
        family.at(Size(3))
    alone = family.alone(Size(3))
    assert alone.base.graph.size == Size(3) and alone.other is None


def test_another_program_at_a_size_is_refused_and_is_no_measure_of_growth() -> None:
    captures, batch = counted(unlike_at_one=True)
    family = capture_family(captures, batch, Size(4), [Size(2)])
    with pytest.raises(RefusedError, match="different operations on 4 and on 1 rows"):
        family.captured(Size(1))
    with pytest.raises(RefusedError, match="different operations"):
        family.based_at(Size(1))
    unlike = capture_family(captures, batch, Size(4), [Size(1)])
    assert unlike.known([Size(4)]) and not unlike.known([Size(2)])
    assert unlike.alone(Size(1)).base.graph.size == Size(1)


def test_the_base_may_move_to_the_size_that_runs() -> None:
    captures, batch = counted()
    family = capture_family(captures, batch, Size(4), [Size(2)])
    moved = family.based_at(Size(8))
    assert moved.base.graph.size == Size(8) and moved.other is family.base
    assert moved.at(Size(4)).shape_digest() == family.base.graph.shape_digest()


def test_the_size_to_compare_with_is_one_that_may_run() -> None:
    assert another_size(Size(4), [Size(4), Size(2), Size(8)]) == Size(2)
    assert another_size(Size(4), [Size(4)]) == another_size(Size(4), []) == Size(5)

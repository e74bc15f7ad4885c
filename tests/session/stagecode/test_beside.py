"""Which states calls beside the ops read: a closed list."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from autopart.passes.shards.states import PARTIAL, WHOLE, State, cut
from autopart.runtime.stages.slice_functions import counted, joined, last_of, part_of
from autopart.runtime.stages.stage_module import StateBuffer
from autopart.stagecode.beside import states_beside

_aten = torch.ops.aten
PLACE = StateBuffer("keys", (2, 8, 4), torch.float64, torch.device("cpu"), 1, 0, 2, 4)


def called(target: Any, *more: Any) -> fx.Node:
    """Return a call that reads one tensor first."""
    graph = fx.Graph()
    return graph.call_function(target, (graph.placeholder("x"), *more))


@pytest.mark.parametrize(
    ("target", "more", "held", "expected"),
    [
        *((each, (1,), cut(1), (WHOLE, WHOLE)) for each in (part_of, joined, last_of, _aten.slice.Tensor)),
        *((each, (1,), cut(2), (cut(2), cut(2))) for each in (part_of, joined, last_of, _aten.slice.Tensor)),
        (part_of, (1,), PARTIAL, (PARTIAL, PARTIAL)),
        (counted, (), PARTIAL, (WHOLE, WHOLE)),
        (_aten.constant_pad_nd.default, ([1, 0],), cut(2), (WHOLE, WHOLE)),
        (_aten.add.Tensor, (), cut(1), (cut(1), cut(1))),
        (_aten.div.Tensor, (3,), PARTIAL, (PARTIAL, WHOLE)),
        (PLACE.append, (), cut(2), (cut(2), cut(2))),
        (PLACE.append, (), cut(1), None),
        (_aten.exp.default, (), WHOLE, None),
        (operator.add, (), WHOLE, None),
    ],
)
def test_a_call_reads_all_entries_of_an_axis_along_which_it_moves_them(
    target: Any, more: tuple[Any, ...], held: State, expected: tuple[State, State] | None
) -> None:
    assert states_beside(called(target, *more), held) == expected

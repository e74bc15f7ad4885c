"""Messages between stages with other numbers of replicas: cut where they leave, whole again where they arrive."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pytest
import torch

from autopart.ir.actions import BACKWARD, FORWARD, Action, Slot
from autopart.ir.program import Edge, Program
from autopart.ir.shares import RowLayout, division
from autopart.runtime.messages.row_routes import RowRoutes, rows_of

LAYOUTS = {"rows": RowLayout(0), "inside": RowLayout(1, 3)}
NAMES = ("rows", "inside", "whole")
ORDERS = {"rows": (1, 0), "inside": (1, 0)}


def of_rows(first: int, count: int) -> dict[str, torch.Tensor]:
    """Values of some rows: (rows * 2, 2), (2, 3 * rows) with the rows inside, and one without rows."""
    row = torch.arange(first, first + count, dtype=torch.float64)
    flat = (row[:, None] * 10 + torch.arange(2)).reshape(-1)
    inside = (torch.arange(3)[:, None] * 100 + row).reshape(-1)
    return {
        "rows": torch.stack([flat, -flat], 1),
        "inside": torch.stack([inside, -inside]),
        "whole": torch.ones(4, dtype=torch.float64),
    }


def specs_of(values: dict[str, torch.Tensor], orders: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    return {
        name: torch.empty_permuted(t.shape, orders.get(name, tuple(range(t.dim()))), dtype=t.dtype, device="meta")
        for name, t in values.items()
    }


def played(
    way: str, senders: int, receivers: int, rows: int, orders: Mapping[str, tuple[int, ...]] = MappingProxyType({})
) -> list[dict[str, torch.Tensor] | None]:
    """What arrives on the ranks of the other stage; None on one without rows."""
    ranks = (tuple(range(senders)), tuple(range(10, 10 + receivers)))
    program = Program(1, 20, ranks, (), (Edge(0, 1, NAMES, NAMES),))
    src, dst = (0, 1) if way == FORWARD else (1, 0)
    send = Action("SF" if way == FORWARD else "SB", Slot(src, 0), dst)
    mail: dict[tuple[int, int], tuple[list[torch.Tensor], list[tuple[int, ...]]]] = {}
    for rank, window in zip(ranks[src], division(len(ranks[src])).windows(0, rows), strict=True):
        routes = RowRoutes(rank, program, LAYOUTS, orders)
        for part in routes.parts(send, rows):
            values = of_rows(window.first, window.own)
            strides = [spec.stride() for spec in routes.specs(part, specs_of(values, orders))]
            mail[rank, part.peer] = routes.cut(part, values), strides
    found: list[dict[str, torch.Tensor] | None] = []
    for rank, window in zip(ranks[dst], division(len(ranks[dst])).windows(0, rows), strict=True):
        routes = RowRoutes(rank, program, LAYOUTS, orders)
        specs = specs_of(of_rows(0, window.own), orders)
        parts, coming = routes.parts(send.other_end, rows), []
        for part in parts:
            tensors, strides = mail.pop((part.peer, rank))
            coming.append(tensors)
            expected = routes.specs(part, specs)
            assert [spec.shape for spec in expected] == [tuple(t.shape) for t in tensors]
            assert [spec.stride() for spec in expected] == strides
        found.append(routes.joined(way, parts, coming, specs) if parts else None)
    assert not mail
    return found


@pytest.mark.parametrize(("senders", "receivers"), [(1, 1), (2, 1), (1, 2), (2, 2), (3, 2), (2, 3), (5, 3), (4, 2)])
@pytest.mark.parametrize("rows", [1, 2, 5, 6])
@pytest.mark.parametrize("way", [FORWARD, BACKWARD])
@pytest.mark.parametrize("orders", [{}, ORDERS], ids=["in the order of axes", "in another order"])
def test_every_receiver_has_its_own_rows(
    way: str, senders: int, receivers: int, rows: int, orders: dict[str, tuple[int, ...]]
) -> None:
    found = played(way, senders, receivers, rows, orders)
    windows = division(receivers if way == FORWARD else senders).windows(0, rows)
    for window, tensors in zip(windows, found, strict=True):
        assert (tensors is None) == (window.own == 0)
        for name, expected in of_rows(window.first, window.own).items() if tensors is not None else ():
            if name != "whole":
                assert torch.equal(tensors[name], expected)


@pytest.mark.parametrize(("senders", "receivers"), [(1, 3), (3, 1), (2, 3), (3, 2)])
def test_what_has_no_rows_is_taken_from_one_and_its_gradient_goes_back_to_that_one(
    senders: int, receivers: int
) -> None:
    assert all(torch.equal(found["whole"], torch.ones(4)) for found in played(FORWARD, senders, receivers, 6) if found)
    back = [found["whole"] for found in played(BACKWARD, senders, receivers, 6) if found and "whole" in found]
    assert torch.equal(torch.stack(back).sum(0), torch.full((4,), float(receivers)))


def test_rows_inside_an_axis_are_cut_there() -> None:
    tensor = torch.arange(12).reshape(2, 6)  # two rows, each three times along the axis
    assert rows_of(tensor, RowLayout(1, 3), own=2, first=1, count=1).tolist() == [[1, 3, 5], [7, 9, 11]]

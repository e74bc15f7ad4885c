"""A capture leaves no traced tensor behind: tables that forward() fills are filled anew, wherever they are kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._device import _device_constructors

from autopart.batch.batch import flatten
from autopart.capture import CaptureCache
from autopart.capture.python.habits.habits import patched
from autopart.ir.errors import AutopartError, CaptureError
from autopart.ir.graph import Size

ROWS = torch.arange(24.0).sin().reshape(6, 4)
TABLES: dict[Any, Any] = {"inner": {}}
LAST: torch.Tensor | None = None


def made(width: int) -> torch.Tensor:
    return torch.arange(width).float()


class Store:
    """What a user keeps tables in."""

    shared: dict[int, torch.Tensor] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.table: torch.Tensor | None = None

    def get(self, width: int) -> torch.Tensor:
        if self.table is None:
            self.table = made(width)
        return self.table


STORE = Store()


class Unready:
    """Answers for no attribute, not even `__dict__`, as objects of libraries do before they are built."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"not ready, so no {name}")


UNREADY = Unready()


def in_global_table(m: nn.Module, width: int) -> torch.Tensor:
    return TABLES["inner"].setdefault(width, made(width))


def in_global_name(m: nn.Module, width: int) -> torch.Tensor:
    global LAST
    if LAST is None:
        LAST = made(width)
    return LAST


def in_class(m: nn.Module, width: int) -> torch.Tensor:
    return Store.shared.setdefault(width, made(width))


def in_buffer(m: nn.Module, width: int) -> torch.Tensor:
    if not hasattr(m, "late"):
        m.register_buffer("late", made(width))
    return m.late


@functools.lru_cache
def remembered(width: int) -> torch.Tensor:
    return made(width)


def in_attribute(m: nn.Module, width: int) -> torch.Tensor:
    if m.table is None:
        m.table = made(width)
    return m.table


def in_list(m: nn.Module, width: int) -> torch.Tensor:
    if not m.options["tables"]:
        m.options["tables"].append(made(width))
    return m.options["tables"][0]


KEPT: dict[str, Callable[[nn.Module, int], torch.Tensor]] = {
    "global table": in_global_table,
    "class": in_class,
    "lazy buffer": in_buffer,
    "lru_cache": lambda m, width: remembered(width),
}
REFUSED = {
    "global name": in_global_name,
    "object": lambda m, width: STORE.get(width),
    "attribute": in_attribute,
    "list of an attribute": in_list,
    "object of an attribute": lambda m, w: m.own.get(w),
}


class Tabled(nn.Module):
    """asks: whether it branches on an activation after it has filled its table, which is refused."""

    def __init__(self, table: Callable[[nn.Module, int], torch.Tensor], asks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.kept, self.asks, self.table = table, asks, None
        self.own, self.options = Store(), {"tables": []}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x) * self.kept(self, 4)
        if self.asks and hidden.sum() > 0:
            return hidden.sum()
        return hidden.square().mean()


def _expected() -> torch.Tensor:
    return Tabled(lambda m, width: made(width))(ROWS)


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("table", KEPT.values(), ids=KEPT.keys())
def test_tables_are_no_traced_tensors_after_a_capture_nor_after_a_refusal(table, asks):
    model = Tabled(table, asks)
    if asks:
        with pytest.raises(CaptureError):
            CaptureCache(model)(flatten(ROWS), Size(3))
        model.asks = False
    else:
        cache = CaptureCache(model)
        assert {cache(flatten(ROWS), Size(rows)).graph.rows for rows in (3, 6)} == {3, 6}
    torch.testing.assert_close(model(ROWS), _expected())


@pytest.mark.filterwarnings("ignore:forward.. assigns attribute")
@pytest.mark.parametrize("table", REFUSED.values(), ids=REFUSED.keys())
def test_what_becomes_a_tensor_in_forward_is_refused_by_its_name_and_left_alone(table):
    model = Tabled(table)
    with pytest.raises(AutopartError, match=r"and then changes it|forward\(\) changes"):
        CaptureCache(model)(flatten(ROWS), Size(3))
    torch.testing.assert_close(model(ROWS), _expected())


def test_a_device_context_still_has_all_constructors_after_a_trace_in_which_it_was_used_first() -> None:
    _device_constructors.cache_clear()
    with patched(), torch.device("cpu"):
        torch.arange(4)
    with torch.device("meta"):
        assert torch.tensor(0).is_meta

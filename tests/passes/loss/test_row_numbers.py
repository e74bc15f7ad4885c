"""Places counted by arange: x[arange(n)] keeps every row where it is, if n is the size of the axis of the rows."""

from __future__ import annotations

import pytest
import torch
from support.oracles.loss_oracle import Bench

from autopart.ir.errors import RefusedError

INPUTS = (torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64), torch.arange(5) % 4)
KEPT = {
    "rows": lambda s, x, t: (x * s.w)[torch.arange(x.shape[0])].square().mean(),
    "three to a row": lambda s, x, t: (x * s.w).flatten(0, 1)[torch.arange(3 * x.shape[0])].square().mean(),
    "and a place in each": lambda s, x, t: (
        (x * s.w)
        .flatten(0, 1)[torch.arange(3 * x.shape[0])[:, None], t.repeat_interleave(3, 0)[:, None]]
        .square()
        .mean()
    ),
}
REFUSED = {
    "fewer than there are": lambda s, x, t: (x * s.w).flatten(0, 1)[torch.arange(x.shape[0])].square().mean(),
    "used as numbers": lambda s, x, t: ((x * s.w).flatten(0, 1).sum(1) * torch.arange(3 * x.shape[0])).mean(),
}


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench([*KEPT.values(), *REFUSED.values()], INPUTS)


@pytest.mark.parametrize("name", KEPT)
def test_rows_taken_in_order_stay_apart(bench: Bench, name: str) -> None:
    place = list(KEPT).index(name)
    weight = bench.weight(place)
    assert weight.kind == "rows"
    assert bench.whole(place).error(bench.combined(place, weight)) < 1e-12


@pytest.mark.parametrize("name", REFUSED)
def test_some_of_them_and_numbers_of_them_are_refused(bench: Bench, name: str) -> None:
    with pytest.raises(RefusedError):
        bench.weight(len(KEPT) + list(REFUSED).index(name))

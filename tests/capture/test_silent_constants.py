"""What Python reads while a model is traced, changed between two steps: the next program is the plain model's, or the
change is refused by name.  Never is it silent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.grids import sampled
from support.models.changed_constants import HOLDERS, Case
from support.models.constant_values import VALUES

from autopart.batch.batch import flatten
from autopart.capture import CaptureCache
from autopart.ir.errors import AutopartError
from autopart.ir.size import Size

ROWS, TARGETS = torch.arange(8.0).sin().reshape(2, 4), torch.arange(8.0).cos().reshape(2, 4)
_TOLD = (
    "float with an attribute", "dict order", "__getattr__", "vars", "hides its class attribute", "AttrDict",
    "deep copy", "cached property", "bound method", "list of objects", "partial", "tensor of a different shape",
    "tensor becomes a float", "item() after a change of .data", "item() of a computed tensor", "torch's generator",
)  # fmt: skip
QUICK = [("attribute", value) for value in _TOLD] + [(holder, "float() of a tensor") for holder in HOLDERS]
GRID = [(holder, value) for holder in HOLDERS for value in VALUES if (holder, value) not in QUICK]


def check(holder: str, value: str) -> None:
    """Raises AssertionError where the program is not that of the plain model."""
    case = HOLDERS[holder](VALUES[value])
    cache = CaptureCache(case.model, case.loss)
    batch = flatten((ROWS, TARGETS), with_target=True)
    for _ in range(2):  # what stays the same is not captured again
        try:
            assert run(cache, batch) == pytest.approx(plain(case), rel=1e-5), "before the change"
        except AutopartError:
            return
        assert cache.refresh(training=True) == []
    before = plain(case)
    case.change()
    assert plain(case) != pytest.approx(before, rel=1e-5)
    try:
        cache.refresh(training=True)
        found = run(cache, batch)
    except AutopartError as error:
        assert error.fix
        return
    assert found == pytest.approx(plain(case), rel=1e-5), "silent"


def plain(case: Case) -> float:
    return case.loss(case.model(ROWS), TARGETS).item()


def run(cache: CaptureCache, batch: Any) -> float:
    captured = cache(batch, Size(2))
    names = captured.names
    given = {node: captured.tensors[name] for node, name in names.params.items()}
    given |= dict(zip(names.inputs, batch.tensors, strict=True))
    results = captured.module(*(given[node.name] for node in captured.module.graph.nodes if node.op == "placeholder"))
    return (results[0] if isinstance(results, tuple) else results).item()


@pytest.mark.parametrize(("holder", "value"), sampled(QUICK), ids=str)
def test_a_change_is_followed_or_refused(holder: str, value: str) -> None:
    check(holder, value)


@pytest.mark.slow
@pytest.mark.parametrize(("holder", "value"), GRID, ids=str)
def test_a_change_is_followed_or_refused_wherever_it_is_held(holder: str, value: str) -> None:
    check(holder, value)

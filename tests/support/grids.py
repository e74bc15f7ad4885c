"""Grids of test cases: combinations in which every pair of settings meets, and samples that run by default."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def with_rotated(axes: Sequence[Iterable[Any]], values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return all combinations of the axes, each with one of the values, which rotate like a Latin square.

    Every pair of a setting and a value occurs if some other axis has at least as many settings as there are values.
    """
    numbered = [list(enumerate(axis)) for axis in axes]
    return [
        (*(setting for _, setting in combination), values[sum(number for number, _ in combination) % len(values)])
        for combination in itertools.product(*numbered)
    ]


def sampled(cases: Iterable[Any], every: int = 2) -> list[Any]:
    """Return the cases for `parametrize`, of which the first, and then every so many, run by default, the others with
    `-m slow`.
    """
    given = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=[pytest.mark.slow] if place % every else []) for place, case in enumerate(given)]

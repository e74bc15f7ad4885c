"""Grids of test cases in which every pair of settings meets, without every combination."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any


def with_rotated(axes: Sequence[Iterable[Any]], values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return all combinations of the axes, each with one of the values, which rotate like a Latin square.

    Every pair of a setting and a value occurs if some other axis has at least as many settings as there are values.
    """
    numbered = [list(enumerate(axis)) for axis in axes]
    return [
        (*(setting for _, setting in combination), values[sum(number for number, _ in combination) % len(values)])
        for combination in itertools.product(*numbered)
    ]

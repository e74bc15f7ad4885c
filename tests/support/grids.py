"""Samples of test cases that run by default."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], every: int = 2) -> list[Any]:
    """Return the cases for `parametrize`, of which the first, and then every so many, run by default, the others with
    `-m slow`.
    """
    given = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=[pytest.mark.slow] if place % every else []) for place, case in enumerate(given)]

"""A free planner is no slower than one that is told what to do, and more of anything is no slower than less.

`benchmarks/planning/promises.py` runs all of these cases and records them.
"""

from __future__ import annotations

from random import Random

import pytest
from support.grids import sampled
from support.oracles.drawn_clusters import CLOSE, EQUAL, beside_less, beside_names, drawn


@pytest.mark.parametrize("seed", sampled(range(200), every=40))
def test_no_schedule_by_name_makes_a_better_plan_than_auto(seed: int) -> None:
    assert max(beside_names(drawn(seed, devices=3, layers=6)).values(), default=0.0) <= EQUAL


@pytest.mark.parametrize("seed", sampled(range(300), every=40))
def test_more_memory_faster_links_and_more_devices_are_no_slower(seed: int) -> None:
    found = beside_less(drawn(seed, devices=3, layers=6), Random(seed))
    assert found is None or found[1] <= CLOSE, found

"""What `state_dict()` makes of a model is applied to the whole model alone, and its tensors move by their own names."""

from __future__ import annotations

from typing import Any

import pytest
from support.jobs import own_state_jobs as jobs

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 100), marks=pytest.mark.slow)], ids=["few", "many"])
def test_hooks_of_states_and_extra_state_round_trip_as_in_plain_torch(pair: Any, tmp_path: Any, seeds: range) -> None:
    for seed in seeds:
        for rank, wrong in enumerate(pair.run(jobs.round_trips, seed, str(tmp_path))):
            assert not wrong, (rank, seed, jobs.drawn(seed), wrong)

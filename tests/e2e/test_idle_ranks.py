"""Ranks without trainable parameters: every usual way to build an optimizer works, as in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.jobs import idle_jobs as jobs

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("seeds", [(8, 11, 14), pytest.param(range(80), marks=pytest.mark.slow)], ids=["few", "many"])
def test_an_optimizer_is_built_as_usual_where_a_rank_has_frozen_layers_alone(
    pair: Any, tmp_path: Any, seeds: Sequence[int]
) -> None:
    idle, start = 0, jobs.Tower(set(), torch.float64).state_dict()
    for seed in seeds:
        run, expected = jobs.drawn(seed), jobs.alone(seed)
        for state, without in pair.run(jobs.divided, seed, str(tmp_path)):
            idle += without
            for name, value in expected.items():
                if run["masters"]:  # gradients in half precision: what moved, and what did not
                    change, own = value - start[name], state[name].double() - start[name]
                    assert bool(change.abs().max() > 0.01) == bool(own.abs().max() > 0.01), (name, run)
                else:
                    assert torch.allclose(state[name], value, rtol=1e-9, atol=1e-12), (name, run)
    assert idle >= len(seeds) // 2  # the draws reach what is tested

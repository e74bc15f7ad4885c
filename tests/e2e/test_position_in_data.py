"""Each sample once an epoch, and the losses of plain training, however a run is cut and whatever reads ahead."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from support.jobs.position_jobs import Drawn, Progress, trained_part

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # of torchdata 0.11 with torch 2.13
]
ALONE = [{"schedule": "1f1b"}, {"schedule": "pipedream"}]
PAIRS = [
    {"stages": 2, "replicas": 1, "cuts": ("2",)},
    {"stages": 1, "replicas": 2},
    {"stages": 2, "replicas": 1, "cuts": ("2",), "schedule": "pipedream"},
]


def same(found: Progress, expected: Progress, drawn: Drawn, *, exact: bool) -> None:
    assert found.seen == expected.seen, drawn
    if not exact:  # batches in flight have older weights
        return
    for number, loss in found.losses.items():
        assert loss == pytest.approx(expected.losses[number], rel=1e-12), drawn
    assert found.state is not None and expected.state is not None
    for name, tensor in expected.state.items():
        torch.testing.assert_close(found.state[name], tensor, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 120), marks=pytest.mark.slow)])
def test_a_run_that_is_cut_anywhere_is_that_of_plain_training(tmp_path: Path, seeds: range) -> None:
    pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    for seed in seeds:
        draw = random.Random(seed)
        drawn = Drawn.of(draw, [ALONE[1]] if seed % 4 == 0 else [ALONE[0]] if seed % 4 == 1 else ALONE)
        found = Progress()
        while found.state is None:
            found = trained_part(drawn, tmp_path / str(seed), "cpu:1", found)
        same(found, drawn.expected(), drawn, exact=True)


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 25), marks=pytest.mark.slow)])
def test_a_run_that_changes_plan_and_number_of_ranks_is_that_of_plain_training(
    pair, tmp_path: Path, seeds: range
) -> None:
    pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    for seed in seeds:
        draw = random.Random(seed)
        drawn = Drawn.of(draw, [*PAIRS, *ALONE])
        found = Progress()
        while found.state is None:
            job = trained_part, drawn, tmp_path / str(seed), "cpu:2", found
            alone = drawn.plans[found.part] in ALONE
            found = trained_part(*job[1:3], "cpu:1", found) if alone else pair.run(*job)[0]
        stale = PAIRS[2] in drawn.plans
        same(found, drawn.expected(), drawn, exact=not stale)

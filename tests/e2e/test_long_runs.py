"""Thirty steps in which processes end after ten: the same plan gives the same bits, another plan the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs import long_run_jobs as jobs

import autopart

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BOTH = {"stages": 2, "replicas": 2, "micro_batches": 2, "zero": 1, "precision": "fp16"}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "fewer stages": ("cpu:4", {"stages": 1, "replicas": 4, "micro_batches": 2, "zero": 1, "precision": "fp16"}),
    "more stages": ("cpu:4", {"stages": 4, "micro_batches": 4, "precision": "fp16"}),
    "fewer ranks": ("cpu:2", {"stages": 2, "micro_batches": 2, "precision": "fp16"}),
    "one rank": ("cpu:1", {"stages": 1, "micro_batches": 1, "precision": "fp16"}),
    "slices": ("cpu:2", {"stages": 2, "micro_batches": 2, "token_slices": 2, "precision": "fp16"}),
}


def test_new_processes_go_on_to_the_bit_under_the_same_plan_and_in_rounding_under_others(tmp_path: Path) -> None:
    folder, whole = str(tmp_path), range(4)
    wanted = autopart.launch(jobs.run, "cpu:4", folder, BOTH, "cpu:4", 0, jobs.STEPS, timeout=200)
    again = autopart.launch(jobs.run, "cpu:4", folder, BOTH, "cpu:4", jobs.SAVED, jobs.STEPS, timeout=200)
    for rank in whole:
        assert again[rank][0] == wanted[rank][0][jobs.SAVED :]
        assert again[rank][1].keys() == wanted[rank][1].keys()
        assert all(torch.equal(again[rank][1][name], value) for name, value in wanted[rank][1].items())
    state = {name: value for _, part in wanted for name, value in part.items()}
    for name, (cluster, options) in OTHERS.items():
        found = autopart.launch(jobs.run, cluster, folder, options, cluster, jobs.SAVED, jobs.STEPS, timeout=200)
        torch.testing.assert_close(found[0][0], wanted[0][0][jobs.SAVED :], rtol=2e-3, atol=0, msg=name)
        other = {each: value for _, part in found for each, value in part.items()}
        assert other.keys() == state.keys(), name

"""Versions of weights: a forward and its backward see the same, and memory of those that are gone is used again."""

from __future__ import annotations

import pytest
import torch

from autopart.ir.actions import Slot
from autopart.runtime.stages.versions import WeightVersions


@pytest.mark.parametrize("lag", [0, 1, 2, 3])
def test_as_much_memory_as_versions_is_used_however_many_updates(lag: int) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    tied = {"one": parameter, "same": parameter, "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False)}
    step = 0
    versions = WeightVersions(tied, lambda slot: max(0, step - lag))
    places, seen = set(), {}

    def change() -> None:
        with torch.no_grad():
            parameter.add_(1)

    for step in range(12):
        leaves, _ = versions.take(Slot(0, step))
        assert leaves.keys() == {"one", "same"} and leaves["one"] is leaves["same"]
        seen[step] = leaves["one"]
        back = step - lag
        if back < 0:
            continue
        before = max(0, back - lag)  # updates that the forward of this micro-batch saw
        assert torch.equal(seen.pop(back).detach(), torch.full((3,), float(before)))
        with versions.collecting(Slot(0, back)):
            pass
        versions.update(change, needed=max(0, step + 1 - lag))
        assert torch.equal(parameter.detach(), torch.full((3,), float(back + 1)))
        places.add(parameter.data_ptr())
    assert versions.most_held == lag + 1
    assert len(places) <= lag + 1

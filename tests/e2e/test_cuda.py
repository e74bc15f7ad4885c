"""On CUDA devices, over NCCL: the loss and every gradient of one process."""

from __future__ import annotations

import pytest
import torch
from support.cuda_jobs import train_on_cuda

from autopart.passes.program.schedules import AUTOMATIC as SCHEDULES
from autopart.runtime.launch.local import launch

DEVICES = torch.cuda.device_count()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),  # a deadlock between the streams of two devices ends here
    pytest.mark.skipif(DEVICES < 2, reason=f"needs two CUDA devices; this machine shows {DEVICES}"),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["stack", "tied", "skips"])
def test_two_stages_on_two_devices_train_as_one_process(name: str, schedule: str) -> None:
    results = launch(train_on_cuda, "cuda:2", name, 2, schedule, 4, 10, timeout=200)
    losses, found = results[0]
    assert all(others == losses for others, _ in results)
    assert found.within(), found

"""What the tests on CUDA devices run on every rank; importable there by name."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

import autopart
from support.one_process import Expected, difference, plain_step
from support.step_jobs import ALL


def train_on_cuda(name: str, stages: int, schedule: str, micros: int, rows: int) -> tuple[list[float], Any]:
    """Two training steps without zeroing in between, a device for each stage, beside one process on the first device.

    The second step finds every channel in use already.  Every rank returns its losses, rank 0 how far off they and
    the summed gradients are.
    """
    case = ALL[name]
    batch = case.batch(rows)
    options = {"stages": stages, "schedule": schedule, "micro_batches": micros, "costs": "analytic"}
    with autopart.compile(case.model(), f"cuda:{stages}", sample=batch, loss_fn=case.loss_fn, **options) as pipe:
        losses = [pipe.step(batch).item() for _ in range(2)]
        gradients, state, leads = pipe.gradients(), pipe.state_dict(), pipe.rank == 0
    if not leads:
        return losses, None
    reference = case.model().cuda()
    plain = [plain_step(case, reference, moved(batch, "cuda"), micros) for _ in range(2)]
    expected = Expected.of(plain[-1].cpu(), reference.cpu())
    return losses, difference(losses[-1], moved(gradients, "cpu"), moved(state, "cpu"), expected)


def moved(tensors: Any, device: str) -> Any:
    """The same tensors on a device."""
    return pytree.tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, tensors)

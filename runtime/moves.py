"""Tensors that move from rank to rank when the plan changes, many at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from autopart.runtime.group.world import World
from autopart.runtime.tensors import dense

Route = tuple[str, int, int]
"""Name of a tensor, the rank that has it, the rank that needs it."""
WINDOW_BYTES = 64 << 20
"""Bytes that a rank has under way at once, or a single larger tensor; it bounds the host memory of copies."""


def move_tensors(world: World, routes: Sequence[Route], local: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors between ranks, in place.  Collective.  Bytes sent: those of the tensors that move.

    routes: in the same order on every rank.  local: by name, what this rank sends and what it receives into.

    Each rank posts the next of its own messages up to `WINDOW_BYTES` and waits for them.  This cannot hang: both ends
    of the first message in the order of the routes that is not done have done all of theirs before it, so both have
    posted it.
    """
    window: list[tuple[Route, torch.Tensor]] = []
    under_way = 0
    for route in routes:
        name, source, target = route
        if world.rank not in (source, target) or source == target:
            continue
        tensor = local[name]
        if under_way and under_way + tensor.nbytes > WINDOW_BYTES:
            _exchange(world, window)
            window, under_way = [], 0
        window.append((route, tensor))
        under_way += tensor.nbytes
    _exchange(world, window)


def _exchange(world: World, window: Sequence[tuple[Route, torch.Tensor]]) -> None:
    """Send and receive these tensors, all at once; wait until all have come and gone."""
    waits: list[Callable[[], None]] = []
    arriving: list[tuple[torch.Tensor, torch.Tensor]] = []
    sent: list[torch.Tensor] = []  # kept until the end, since some are copies
    for (_, source, target), tensor in window:
        data = dense(tensor.detach())
        if world.rank == source:
            sent.append(data.cpu().contiguous())
            waits.append(world.begin_moving(sent[-1], source, target))
            continue
        direct = data.device.type == "cpu" and data.is_contiguous()
        own = data if direct else torch.empty(data.shape, dtype=data.dtype)
        arriving.append((tensor, own))
        waits.append(world.begin_moving(own, source, target))
    for wait in waits:
        wait()
    with torch.no_grad():
        for tensor, own in arriving:
            if own.data_ptr() == tensor.data_ptr():
                torch.autograd.graph.increment_version(tensor)  # as a copy would
            else:
                tensor.copy_(own)

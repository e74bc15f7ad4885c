"""What a change of plan moves between ranks, and how long that takes on these machines."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from autopart.extras.freezing.carried import spread
from autopart.ir.graph import Graph
from autopart.ir.shares import overlap, whole
from autopart.runtime.group.world import World
from autopart.runtime.messages.moves import move_tensors
from autopart.session.placement import Placement, routes

Pairs = Mapping[tuple[int, int], int]
"""Bytes by sending and receiving rank."""
PROBE_SHARE, LEAST_PROBE, MOST_PROBE = 0.05, 1 << 20, 32 << 20
"""Part of what moves that is sent on trial, and its limits in bytes for each pair of ranks."""


@dataclass(frozen=True, slots=True)
class KeptBytes:
    """The bytes that a rank keeps besides the tensors of the model, by parameter.

    state: of the optimizer.  beside: of the master weight and the gradient, of parameters that the rank owns.
    """

    state: Mapping[str, int]
    beside: Mapping[str, int]


def moved_bytes(graph: Graph, old: Placement, new: Placement, kept: Sequence[KeptBytes]) -> dict[tuple[int, int], int]:
    """Return the bytes that move when `new` follows `old`, by the pair of ranks.

    kept: by each rank.  Tensors, masters and gradients come from the rank that owns them (`placement.relocate`), the
    optimizer's state from any that has it (`carried.spread`).  O(parameters * ranks)."""
    sizes = {param.name: param.size_bytes for param in graph.params}
    beside = {name: size for own in kept for name, size in own.beside.items()}
    pairs: Counter[tuple[int, int]] = Counter()
    for (piece, needed), source, target in routes(old.owners, old.holders, new.holders):
        pairs[source, target] += int(sizes.get(piece.name, 0) * overlap(piece, needed))
    for (piece, needed), source, target in routes(old.owners, old.keepers, new.keepers):
        pairs[source, target] += int(beside.get(piece.name, 0) * piece.parts * overlap(piece, needed))
    having: dict[str, list[int]] = {}
    state: dict[str, int] = {}
    for rank, own in enumerate(kept):
        for name, size in own.state.items():
            having.setdefault(name, []).append(rank)
            state.setdefault(name, size)
    for name, source, target in spread(having, {name: new.keepers.get(whole(name), ()) for name in having}, state):
        pairs[source, target] += state[name]
    return dict(pairs)


def predicted_s(world: World, pairs: Pairs) -> float:
    """Return the seconds that moving these bytes will take, from sending a part of them.  Collective; equal on all
    ranks.  Takes about a twentieth of that time, and memory for `MOST_PROBE` bytes for each pair of a rank."""
    moving = {pair: size for pair, size in sorted(pairs.items()) if size and pair[0] != pair[1]}
    if not moving or world.size == 1:
        return 0.0
    largest = max(moving.values())
    part = min(1.0, max(PROBE_SHARE, LEAST_PROBE / largest), MOST_PROBE / largest)
    probes = {
        f"{source}>{target}": torch.zeros(max(1, int(size * part)), dtype=torch.uint8)
        for (source, target), size in moving.items()
        if world.rank in (source, target)
    }
    probed = [(f"{source}>{target}", source, target) for source, target in moving]
    world.gather_numbers([0.0])  # all begin at once
    began = time.perf_counter()
    move_tensors(world, probed, probes)
    taken = max(row[0] for row in world.gather_numbers([time.perf_counter() - began]))
    return taken / part

"""Which rank writes each tensor of a checkpoint: the ranks that have its newest value share the work by bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autopart.ir.shares import whole
from autopart.session.placement import Placement


def writers(sizes: Mapping[str, int], placement: Placement, updated: frozenset[str], world: int) -> dict[str, int]:
    """Return the rank that writes each parameter and buffer, with everything that belongs to it.

    sizes: bytes of each, tied ones once.  updated: buffers that change in training: their owner's value counts.  One
    that no stage uses is written by the rank with the least.  Longest processing time first (Graham 1969): no rank
    writes more than 4/3 of the best deal's.  O(tensors * ranks of each).
    """
    load = [0] * world
    found: dict[str, int] = {}
    for name in sorted(sizes, key=lambda each: (-sizes[each], each)):
        pieces = placement.pieces(name)
        owner = placement.owner(name) if name in updated else None
        ranks = [rank for piece in pieces for rank in placement.keepers.get(piece, ())] if owner is None else [owner]
        found[name] = min(ranks or range(world), key=lambda rank: (load[rank], rank))
        load[found[name]] += sizes[name]
    return found


def by_keepers(names: Iterable[str], placement: Placement, updated: frozenset[str]) -> dict[tuple[int, ...], list[str]]:
    """Return the names of tensors by the ranks that have the newest value; () stands for all ranks, which have what no
    stage uses.

    updated: buffers that change in training: all replicas take the value of their owner at the end of a step."""
    found: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        ranks = (placement.holders if name in updated else placement.keepers).get(whole(name), ())
        found.setdefault(ranks, []).append(name)
    return dict(sorted(found.items()))

"""Who owns which parameter where the replicas of a stage share the optimizer's state.

Whole parameters, the largest first, each to the replica that has least.  Rules of optimizers by name or by number of
axes keep working so, and each parameter is updated exactly as without sharing.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 5.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heapreplace


def owners_of(sizes: Mapping[str, int], replicas: int) -> dict[str, int]:
    """The replica that owns each parameter.  sizes: in bytes; those of one size are taken by name.

    O(parameters * log(parameters * replicas)).
    """
    names = sorted(sizes, key=lambda name: (-sizes[name], name))
    return dict(zip(names, _dealt([sizes[name] for name in names], replicas), strict=True))


def largest_share(sizes: Iterable[int], replicas: int) -> int:
    """Bytes of the replica that owns most.  O(parameters * log(parameters * replicas))."""
    ordered, owned = sorted(sizes, reverse=True), [0] * replicas
    for size, owner in zip(ordered, _dealt(ordered, replicas), strict=True):
        owned[owner] += size
    return max(owned)


def _dealt(descending: Sequence[int], replicas: int) -> Iterator[int]:
    """Who gets each."""
    owned = [(0, replica) for replica in range(replicas)]  # a heap
    for size in descending:
        has, owner = owned[0]
        heapreplace(owned, (has + size, owner))
        yield owner

"""What was used last, up to a number of entries and a number of bytes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MOST_BYTES = 1 << 30
"""Estimated bytes of host memory that the captures of one rank may hold, and as many for its kinds of batches."""


class Recent(Generic[K, V]):
    """Entries by key; the least recently used go first, once there are more than `most` or they hold more bytes.

    size_of: estimates the bytes of a value.  The newest entry is always kept.  size_bytes: of all entries.  hits: how
    often an entry was found.
    """

    def __init__(self, most: int, size_of: Callable[[V], int], most_bytes: int = MOST_BYTES) -> None:
        self.most, self.most_bytes = most, most_bytes
        self.size_bytes = self.hits = 0
        self._size_of = size_of
        self._entries: dict[K, tuple[V, int]] = {}  # the first one is forgotten next

    def get(self, key: K) -> V | None:
        """Return the value of a key, which then counts as used now; None if it is not kept.  O(1)."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        self._entries[key] = entry
        self.hits += 1
        return entry[0]

    def peek(self, key: K) -> V | None:
        """Return the value of a key without using it; None if it is not kept.  O(1)."""
        entry = self._entries.get(key)
        return entry[0] if entry is not None else None

    def add(self, key: K, value: V) -> None:
        """Keep a value, and forget the least recently used ones beyond the bounds."""
        self._forget(key)
        size = self._size_of(value)
        self._entries[key] = value, size
        self.size_bytes += size
        while len(self._entries) > 1 and (len(self._entries) > self.most or self.size_bytes > self.most_bytes):
            self._forget(next(iter(self._entries)))

    def _forget(self, key: K) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.size_bytes -= entry[1]

    def clear(self) -> None:
        """Forget all entries."""
        self._entries.clear()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def values(self) -> Iterator[V]:
        """Yield all values without using them, the least recently used first."""
        return (value for value, _ in self._entries.values())

    def __str__(self) -> str:
        mib = f"{self.size_bytes / 2**20:.1f} of at most {self.most_bytes / 2**20:.0f} MiB (estimated)"
        return f"{len(self)} of at most {self.most}, {mib}, {self.hits} hits"

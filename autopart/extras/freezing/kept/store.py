"""Tensors by key in host memory first, then on disk, each bounded in bytes.

What does not fit is not kept, and replaces nothing. In an epoch every sample comes once, so no replacement rule finds
more than the part of the samples that fits, and that of the least recently used finds none where the order repeats:
what comes next is what it threw away first.

The file has no name from the start: no other process can read or change it, and after the end of this one, also by
SIGKILL while it writes, its space is free.  So only entries are lost, and nothing that was read has to be validated but
what this process wrote: each record has a checksum, and one that differs counts as missing.
"""

from __future__ import annotations

import os
import tempfile
import warnings
import weakref
import zlib
from bisect import insort
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import IO, Any

import torch

Tag = tuple[tuple[str, ...], bytes]
"""What tensors are: their names, and a digest of all that they depend on but the inputs."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Tensors that are kept under a key.  tag: what they are.  digest: of what they were computed from."""

    tag: Tag
    digest: bytes
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Record:
    """An entry on disk: where its bytes are, and what tensors they make."""

    tag: Tag
    digest: bytes
    kinds: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    offset: int
    size: int
    checksum: int


class Extents:
    """Free space of a file of at most `limit` bytes: the first gap that is large enough is taken."""

    def __init__(self, limit: int) -> None:
        self.used = 0
        self._gaps: list[tuple[int, int]] = [(0, limit)] if limit else []  # offset and size, ascending, never adjacent

    def take(self, size: int) -> int | None:
        """Return the offset of `size` bytes that are taken now, None if no gap has them.  O(gaps)."""
        for place, (offset, gap) in enumerate(self._gaps):
            if gap >= size:
                self._gaps[place : place + 1] = [(offset + size, gap - size)] if gap > size else []
                self.used += size
                return offset
        return None

    def give(self, offset: int, size: int) -> None:
        """Free bytes that were taken.  O(gaps)."""
        self.used -= size
        insort(self._gaps, (offset, size))
        joined: list[tuple[int, int]] = []
        for start, length in self._gaps:
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((start, length))
        self._gaps = joined


class SampleStore:
    """Entries by key within bounds.  memory_used, disk_used: bytes of the tensors that are kept."""

    def __init__(self, memory_bytes: int, disk_bytes: int = 0, folder: str | None = None) -> None:
        """folder: where the file is made, None for the folder of temporary files.  Raises OSError if it cannot be."""
        self.memory_bytes, self.disk_bytes = memory_bytes, disk_bytes
        self.memory_used = 0
        self._memory: dict[Hashable, Entry] = {}
        self._disk: dict[Hashable, _Record] = {}
        self._extents = Extents(disk_bytes)
        self._file: IO[bytes] | None = tempfile.TemporaryFile(dir=folder, buffering=0) if disk_bytes else None  # noqa: SIM115
        if self._file is not None:
            weakref.finalize(self, self._file.close)

    @property
    def disk_used(self) -> int:
        """Bytes of the records on disk."""
        return self._extents.used

    def __len__(self) -> int:
        return len(self._memory) + len(self._disk)

    @property
    def keys(self) -> list[Any]:
        """The keys of all entries."""
        return [*self._memory, *self._disk]

    def get(self, key: Hashable) -> Entry | None:
        """Return the entry of a key, None if there is none, or if its record cannot be read as it was written."""
        entry = self._memory.get(key)
        if entry is not None or key not in self._disk:
            return entry
        record, data = self._disk[key], self._read(self._disk[key])
        if data is None:
            self.drop(key)
            return None
        return Entry(record.tag, record.digest, _tensors(record, data))

    def put(self, key: Hashable, tag: Tag, digest: bytes, tensors: Sequence[torch.Tensor]) -> bool:
        """Keep a copy of these CPU tensors instead of what the key had, if there is room; return whether there was."""
        self.drop(key)
        size = sum(tensor.nbytes for tensor in tensors)
        if self.memory_used + size <= self.memory_bytes:
            copies = tuple(tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors)
            self._memory[key] = Entry(tag, digest, copies)
            self.memory_used += size
            return True
        offset = self._extents.take(size) if self.disk_bytes else None
        if offset is None:
            return False
        data = b"".join(_bytes(tensor) for tensor in tensors)
        if not self._write(offset, data):
            self._extents.give(offset, size)
            return False
        kinds = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        self._disk[key] = _Record(tag, digest, kinds, offset, size, zlib.crc32(data))
        return True

    def drop(self, key: Hashable) -> None:
        """Forget what is kept under a key."""
        entry = self._memory.pop(key, None)
        if entry is not None:
            self.memory_used -= sum(tensor.nbytes for tensor in entry.tensors)
        record = self._disk.pop(key, None)
        if record is not None:
            self._extents.give(record.offset, record.size)

    def clear(self) -> None:
        """Forget everything, and free its space on disk."""
        self._memory.clear()
        self._disk.clear()
        self.memory_used, self._extents = 0, Extents(self.disk_bytes)
        if self._file is not None:
            os.ftruncate(self._file.fileno(), 0)

    def close(self) -> None:
        """Free memory and disk; nothing is kept afterwards."""
        self.clear()
        if self._file is not None:
            self._file.close()
        self.memory_bytes, self.disk_bytes, self._extents, self._file = 0, 0, Extents(0), None

    def _write(self, offset: int, data: bytes) -> bool:
        """Write a record; without space nothing more goes to the disk, and a warning says so."""
        assert self._file is not None
        try:
            left = memoryview(data)
            while left:
                written = os.pwrite(self._file.fileno(), left, offset)
                offset, left = offset + written, left[written:]
        except OSError as error:
            self.disk_bytes = 0
            warnings.warn(f"no more activations are kept on disk: {error}", stacklevel=2)
            return False
        return True

    def _read(self, record: _Record) -> bytearray | None:
        assert self._file is not None
        data = bytearray(record.size)
        try:
            read = os.preadv(self._file.fileno(), [data], record.offset)
        except OSError:
            return None
        return data if read == record.size and zlib.crc32(data) == record.checksum else None


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _tensors(record: _Record, data: bytearray) -> tuple[torch.Tensor, ...]:
    found, start = [], 0
    for shape, dtype in record.kinds:
        count = torch.Size(shape).numel()
        flat = torch.frombuffer(data, dtype=dtype, count=count, offset=start) if count else torch.empty(0, dtype=dtype)
        found.append(flat.reshape(shape))
        start += count * dtype.itemsize
    return tuple(found)

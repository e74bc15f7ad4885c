"""Real text that every Python installation carries: the source files of its standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

from autopart.ir.errors import UsageError

LIMIT = 4_000_000  # bytes


def library_bytes(limit: int = LIMIT) -> torch.Tensor:
    """The first `limit` bytes of the standard library's modules, sorted by name: int64, one number a byte.

    Raises UsageError when the installation carries no source files.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = bytearray()
    for path in sorted(folder.glob("*.py")):
        found += path.read_bytes()
        if len(found) >= limit:
            break
    if len(found) < 100_000:
        raise UsageError("this Python carries no source files of its standard library", where=str(folder))
    return torch.frombuffer(found[:limit], dtype=torch.uint8).long()


class Batches:
    """Random windows of a text: batch i is the same wherever it is asked for."""

    def __init__(self, text: torch.Tensor, rows: int, seq: int, seed: int = 0) -> None:
        self._text, self._rows, self._seq, self._seed = text, rows, seq, seed

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
        starts = torch.randint(len(self._text) - self._seq, (self._rows, 1), generator=generator)
        ids = self._text[starts + torch.arange(self._seq)]
        return {"input_ids": ids, "labels": ids.clone()}

"""The tensors that activations are computed from, with checksums of their numbers.

Torch counts the writes to a tensor, but not those through `.data`, through numpy, or to memory that it shares with
others.  These show where some numbers of a tensor are looked at, which costs next to nothing on the CPU, if they touch
them; and once all numbers are read again.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopart.ir.errors import RefusedError

_version = operator.attrgetter("_version")
_address = operator.methodcaller("data_ptr")
_LOOKED_AT = 64
"""Bytes of each tensor that are looked at before every step."""


class Sources:
    """Tensors, as they were when they were last followed.  constants: those that are not the model's own."""

    def __init__(self, names: Sequence[str], constants: Mapping[str, torch.Tensor]) -> None:
        """names: of all tensors."""
        self._names, self._constants = tuple(names), constants
        self._tensors: list[torch.Tensor] = []
        self._sums: dict[str, int] = {}
        self._places: list[Any] = []
        self._before: tuple[Any, ...] = ()

    def follow(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return whether other tensors are held now, or one of them was seen to change.  tensors: the model's."""
        now = [self._constants[name] if name in self._constants else tensors[name] for name in self._names]
        same = len(now) == len(self._tensors) and all(map(operator.is_, now, self._tensors))
        if same and self._before == self._state():
            return False
        self._tensors = now
        self._places = [place for tensor in now if (place := _place(tensor)) is not None]
        self._before, self._sums = self._state(), self._read()
        return True

    def _state(self) -> tuple[Any, ...]:
        return [*map(_version, self._tensors)], [*map(_address, self._tensors)], b"".join(self._places)

    def _read(self) -> dict[str, int]:
        return {name: _checksum(tensor) for name, tensor in zip(self._names, self._tensors, strict=True)}

    def checksum(self, name: str) -> int:
        """Return a checksum of the numbers of a tensor, its shape and type."""
        return self._sums[name]

    def prove(self) -> None:
        """Raise RefusedError if the numbers of a tensor are others than when it was last followed.  Reads all."""
        known, self._sums = self._sums, self._read()
        changed = [name for name, found in self._sums.items() if found != known[name]]
        if changed:
            self._before = ()
            raise RefusedError(
                f"{changed[0]} of a frozen layer was written to unnoticed while activations were kept",
                why="torch does not count writes through .data, numpy or shared memory; steps since the last check, at "
                "most one pass over the samples, may have used activations of the earlier values",
                fix=f"write to it where torch counts: with torch.no_grad(): {changed[0]}.copy_(...); the next step "
                "computes what is kept anew",
            )


def _place(tensor: torch.Tensor) -> Any:
    """Return a window to some bytes in the middle of a tensor, None if it has none that can be looked at for free."""
    if tensor.device.type != "cpu" or tensor.numel() == 0 or not tensor.is_contiguous():
        return None
    numbers = tensor.detach().view(-1).view(torch.uint8).numpy()
    middle = len(numbers) // 2
    return numbers[max(0, middle - _LOOKED_AT // 2) : middle + _LOOKED_AT // 2].data


def _checksum(tensor: torch.Tensor) -> int:
    numbers = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return zlib.crc32(numbers.data, zlib.crc32(repr((tensor.shape, tensor.dtype)).encode()))

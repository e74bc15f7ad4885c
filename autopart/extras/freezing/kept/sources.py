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
    """Tensors, as they were when they were last followed.  sums: checksums of their numbers, shapes and types."""

    def __init__(self, names: Sequence[str], constants: Mapping[str, torch.Tensor]) -> None:
        """names: of all tensors.  constants: those that are not the model's own."""
        self._names, self._constants = names, constants
        self._tensors: list[torch.Tensor] = []
        self._strided: list[torch.Tensor] = []
        self._places: list[Any] = []
        self._before: tuple[Any, ...] = ()
        self.sums: dict[str, int] = {}

    def follow(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return whether other tensors are held now, or one was seen to change: then all numbers are read.

        tensors: the model's.  O(tensors)."""
        now = [self._constants[name] if name in self._constants else tensors[name] for name in self._names]
        same = len(now) == len(self._tensors) and all(map(operator.is_, now, self._tensors))
        if same and self._before == self._state():
            return False
        self._tensors = now
        self._strided = [tensor for tensor in now if tensor.layout is torch.strided]
        self._places = [_place(tensor) for tensor in self._strided if _is_plain(tensor)]
        self._before, self.sums = self._state(), self._summed()
        return True

    def _state(self) -> tuple[Any, ...]:
        return [*map(_version, self._tensors)], [*map(_address, self._strided)], b"".join(self._places)

    def _summed(self) -> dict[str, int]:
        return {name: _checksum(tensor) for name, tensor in zip(self._names, self._tensors, strict=True)}

    def prove(self) -> None:
        """Read all numbers.  Raises RefusedError if some are others than when tensors were last followed."""
        changed = [name for name, found in self._summed().items() if found != self.sums[name]]
        if changed:
            self._before = ()  # the next step follows them
            raise RefusedError(
                f"{changed[0]} of a frozen layer was written to unnoticed while activations were kept",
                why="torch does not count writes through .data, numpy or shared memory; steps since the last check, at "
                "most one pass over the samples, may have used activations of the earlier values",
                fix=f"write to it where torch counts: with torch.no_grad(): {changed[0]}.copy_(...); the next step "
                "computes what is kept anew",
            )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the bytes of a tensor can be looked at for free."""
    dense = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return tensor.device.type == "cpu" and tensor.numel() > 0 and dense


def _place(tensor: torch.Tensor) -> Any:
    """Return a window to some bytes in the middle of a tensor."""
    numbers = tensor.detach().view(-1).view(torch.uint8).numpy()
    middle = len(numbers) // 2
    return numbers[max(0, middle - _LOOKED_AT // 2) : middle + _LOOKED_AT // 2].data


def _checksum(tensor: torch.Tensor) -> int:
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    numbers = dense.cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy()
    return zlib.crc32(numbers.data, zlib.crc32(repr((tensor.shape, tensor.dtype)).encode()))

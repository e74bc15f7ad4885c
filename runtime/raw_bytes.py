"""The bytes of tensors, without numpy."""

from __future__ import annotations

import ctypes

import torch


def from_bytes(data: bytes) -> torch.Tensor:
    """The bytes (at least one) as a CPU tensor of uint8 with memory of its own."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def to_bytes(tensor: torch.Tensor) -> bytes:
    """A copy of the bytes of a contiguous CPU tensor."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor where they lie; valid while the tensor lives."""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))

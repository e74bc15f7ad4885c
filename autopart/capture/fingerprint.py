"""What a Python value is, told so that a later change of it shows."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, type)
_DEPTH = 3
_MOST = 2000
"""Entries of a container that are looked at; of a longer one its length and identity count."""


def is_plain(value: object) -> bool:
    """True for numbers, texts and the like, and tuples of them, which are told by comparing them."""
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(map(is_plain, value)))


def fingerprint(value: Any, depth: int = _DEPTH) -> Any:
    """Something hashable-free that compares equal as long as the value stays as it is.  O(entries).

    Numbers and texts by their value; tensors, modules and functions by identity; containers, and objects that hold
    attributes (a configuration), by what they hold.
    """
    if is_plain(value):
        return (type(value), repr(value)) if isinstance(value, float) else (type(value), value)
    if (state := _state_of_generator(value)) is not None:
        return (id(value), state)
    if isinstance(value, (torch.Tensor, nn.Module)) or depth == 0 or callable(value):
        return id(value)
    if isinstance(value, Mapping) and len(value) <= _MOST:
        return (id(value), [(repr(key), fingerprint(part, depth - 1)) for key, part in value.items()])
    if isinstance(value, (list, tuple, set, frozenset)) and len(value) <= _MOST:
        own = id(value) if isinstance(value, list) else type(value)
        parts = sorted(map(repr, value)) if isinstance(value, (set, frozenset)) else value
        return (own, [fingerprint(part, depth - 1) for part in parts])
    held = getattr(value, "__dict__", None)
    if isinstance(held, dict) and len(held) <= _MOST:
        return (id(value), [(name, fingerprint(part, depth - 1)) for name, part in held.items()])
    return id(value)


def _state_of_generator(value: Any) -> Any:
    """The state of a generator of random numbers: what it draws changes it and nothing else."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return bytes(value.get_state())
    if type(value).__module__.startswith("numpy.random"):
        source = getattr(value, "bit_generator", value)
        state = value.get_state() if hasattr(value, "get_state") else getattr(source, "state", None)
        return repr(state)
    return None


def described(value: Any) -> str:
    """A value in a message."""
    if is_plain(value):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"

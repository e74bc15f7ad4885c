"""What a Python value is, told so that a later change of it shows."""

from __future__ import annotations

import functools
import hashlib
import logging
import random
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import nn

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, type)
_BY_IDENTITY = (
    torch.Tensor, nn.Module, Enum, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, logging.Filterer,
    logging.LoggerAdapter,
)  # fmt: skip
_MADE_ANEW = (tuple, set, frozenset, types.MethodType, functools.partial)
_LISTED = (dict, list, tuple, set, frozenset, deque)
_CONTAINERS = (Mapping, *_LISTED)
_DEPTH = 6
_MOST = 20_000
"""Entries of a container that are looked at; of a longer one its length and identity count."""
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib"))


def is_plain(value: object) -> bool:
    """True for numbers, texts and the like, and tuples of them, which are told by comparing them."""
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(map(is_plain, value)))


def fingerprint(value: Any) -> Any:
    """Something hashable-free that compares equal as long as the value stays as it is.  O(entries).

    Numbers and texts by their value; tensors, modules and functions by identity; containers, and objects that hold
    attributes (a configuration), by what they hold.
    """
    return _fingerprint(value, _DEPTH, set())


def _fingerprint(value: Any, depth: int, seen: set[int]) -> Any:
    if isinstance(value, (float, complex)):
        return (type(value), repr(value))  # 0.0 is not -0.0, and nan is nan
    if type(value) is not tuple and is_plain(value):
        return (type(value), value)
    if (state := _state(value)) is not None:
        return (id(value), state)
    inner = _inner(value) if depth > 0 and id(value) not in seen else None
    if inner is None:
        return (id(value), len(value)) if isinstance(value, _CONTAINERS) else id(value)
    own = type(value) if isinstance(value, _MADE_ANEW) else id(value)
    if isinstance(value, (set, frozenset)):
        return (own, sorted(map(repr, value)))
    if own is not type(value):
        seen.add(id(value))
    return (own, [(repr(key), _fingerprint(part, depth - 1, seen)) for key, part in inner])


def containers(value: Any, depth: int = _DEPTH, seen: set[int] | None = None) -> Iterator[Any]:
    """The dictionaries, lists and sets whose entries `fingerprint` looks at.

    Of a value of which `has_state` is False nothing else can change unseen.
    """
    seen = set() if seen is None else seen
    inner = _inner(value) if depth > 0 and id(value) not in seen and not is_plain(value) else None
    if inner is None:
        return
    seen.add(id(value))
    whole = value if isinstance(value, (dict, list, set, deque)) else attributes_of(value)
    if isinstance(whole, (dict, list, set, deque)):
        yield whole
    for _, part in inner:
        yield from containers(part, depth - 1, seen)


def has_state(value: Any, depth: int = _DEPTH, seen: set[int] | None = None) -> bool:
    """Whether a value, or what it holds, may change while it holds the very same objects, as a generator does."""
    seen = set() if seen is None else seen
    if is_plain(value) or depth == 0 or id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, _CONTAINERS) and (len(value) > _MOST or not isinstance(value, _LISTED)):
        return True
    if _state(value) is not None or _slots(value):
        return True
    return any(has_state(part, depth - 1, seen) for _, part in _inner(value) or ())


def _inner(value: Any) -> list[tuple[Any, Any]] | None:
    """What a value holds, by key; None for what is told by its identity."""
    if isinstance(value, _BY_IDENTITY):
        return None
    if isinstance(value, types.MethodType):
        return [("self", value.__self__), ("func", value.__func__)]
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if callable(value) and from_library(type(value)):
        return None  # an op, a compiled function: what it keeps for itself is its own affair
    found: list[tuple[Any, Any]] | None = None
    if isinstance(value, _CONTAINERS):
        if len(value) > _MOST:
            return None
        found = list(value.items()) if isinstance(value, Mapping) else list(enumerate(value))
    held = attributes_of(value)
    if isinstance(held, dict) and len(held) <= _MOST:
        found = [*(found or ()), *held.items()]
    slots = _slots(value)
    return [*(found or ()), *((name, getattr(value, name)) for name in slots)] if slots else found


def _slots(value: Any) -> list[str]:
    """The slots of an object of the user's that are filled."""
    if isinstance(value, (*_PLAIN, *_BY_IDENTITY)) or from_library(type(value)):
        return []
    listed = [vars(kind)["__slots__"] for kind in type(value).__mro__ if "__slots__" in vars(kind)]
    names = [name for slots in listed for name in ([slots] if isinstance(slots, str) else slots)]
    return [name for name in names if name not in ("__dict__", "__weakref__") and hasattr(value, name)]


def attributes_of(value: Any) -> Any:
    """What holds the attributes of an object, None where there is none.  A class may answer for `__dict__` itself with
    an error of its own, as those of libraries do that are not ready yet: that is none, too."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


def from_library(kind: type) -> bool:
    """Whether a class is Python's own or of an installed library."""
    return _is_library(kind.__module__)


@functools.lru_cache(1024)
def _is_library(name: str) -> bool:
    home = sys.modules.get(name)
    if home is None or name == "__main__":
        return False
    file = getattr(home, "__file__", None)
    return file is None or file.startswith(LIBRARIES)


def _state(value: Any) -> Any:
    """Of a generator of random numbers, what it draws next; of an array its bytes: no object that it holds tells."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return bytes(value.get_state())
    kind = type(value)
    if kind.__module__.startswith("numpy.random"):
        source = getattr(value, "bit_generator", value)
        state = value.get_state() if hasattr(value, "get_state") else getattr(source, "state", None)
        return repr(state)
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return (value.shape, str(value.dtype), hashlib.blake2b(value.tobytes(), digest_size=16).hexdigest())
    if isinstance(value, bytearray):
        return bytes(value)
    return None


def described(value: Any) -> str:
    """A value in a message."""
    if is_plain(value):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"

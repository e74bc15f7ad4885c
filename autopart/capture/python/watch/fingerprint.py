"""Fingerprints of Python values, by which a later change of them shows.

Numbers and texts are compared by value, tensors, modules and functions by identity, containers by their entries.  An
object whose attribute reads can be intercepted (`is_followed`) is compared by identity: what forward() read of it is
compared by itself (`observed`).  Any other object is compared by all its attributes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import random
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from autopart.capture.source_location import INSTALLED, LIBRARIES

ABSENT = object()
_VALUES = (float, complex, int, str, bytes)
_PLAIN = frozenset((type(None), bool, *_VALUES, torch.dtype, torch.device))
_BY_IDENTITY = (
    torch.Tensor, nn.Module, Enum, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType,
    logging.Filterer, logging.LoggerAdapter,
)  # fmt: skip
_WRAPPERS = (types.MethodType, functools.partial, staticmethod, classmethod, property, functools.cached_property)
_BY_CONTENT = (tuple, set, frozenset, *_WRAPPERS)
_LISTED = (dict, list, tuple, set, frozenset, deque)
_CONTAINERS = (Mapping, *_LISTED)
_DEPTH = 6
_MOST = 20_000
"""Entries of a container that are compared; a longer one is compared by length and identity."""
_HEAP, _IMMUTABLE = 1 << 9, 1 << 8
_STANDARD = sysconfig.get_path("stdlib")


def is_plain(value: object) -> bool:
    """Return whether a value cannot change in place: a number, a text, a class, or a tuple of them."""
    return type(value) in _PLAIN or isinstance(value, type) or (type(value) is tuple and all(map(is_plain, value)))


def fingerprint(value: Any) -> Any:
    """Return something that compares equal as long as the value does not change.  O(entries)."""
    return _fingerprint(value, _DEPTH, {}, frozenset())


def _fingerprint(value: Any, depth: int, met: dict[int, tuple[int, int, Any]], above: frozenset[int]) -> Any:
    """Return the fingerprint of a value down to a depth.

    met: of each object that was looked at, its number, the depth left there and the object, so that its id is not used
    again: to look at it again would take a time that doubles with each pair of objects that know the next one.
    above: the objects that this one lies in.
    """
    kind = type(value)
    if isinstance(value, (torch.dtype, torch.device)) or value is None:
        return (kind, value)
    if isinstance(value, _VALUES) and not isinstance(value, Enum):
        base: Any = next(base for base in _VALUES if isinstance(value, base))
        # 0.0 is not -0.0, and nan is nan; a subclass may print and compare as it likes
        exact = base.__repr__(value) if base in (float, complex) else base.__getnewargs__(value)[0]
        return (kind, exact, _fingerprint(attributes_of(value), depth - 1, {}, above) if kind not in _PLAIN else None)
    if (state := _state(value)) is not None:
        return (id(value), state)
    inner = parts(value) if depth > 0 and id(value) not in above and not is_followed(value) else None
    if inner is None:
        return (id(value), len(value)) if isinstance(value, _CONTAINERS) else id(value)
    number, deepest, _ = met.get(id(value), (len(met), 0, None))
    if deepest >= depth:
        return ("met", number)
    met[id(value)] = number, depth, value
    above |= {id(value)}
    if isinstance(value, (set, frozenset)):
        return (kind, sorted(repr(_fingerprint(part, depth - 1, {}, above)) for _, part in inner))
    own = kind if isinstance(value, _BY_CONTENT) else id(value)
    return (own, [tuple(_fingerprint(each, depth - 1, met, above) for each in pair) for pair in inner])


def containers(value: Any) -> tuple[list[Any], bool]:
    """Return the dictionaries, lists and sets whose entries `fingerprint` looks at.

    Second, whether the value may change while those hold the same objects, as a generator of random numbers does.
    """
    seen: set[int] = set()
    found: list[Any] = []

    def may_change(value: Any, depth: int) -> bool:
        if is_plain(value) or depth == 0 or id(value) in seen or is_followed(value):
            return False
        seen.add(id(value))
        inner = parts(value)
        if inner is not None:
            found.extend(w for w in (value, attributes_of(value)) if isinstance(w, (dict, list, set, deque)))
        unlisted = isinstance(value, _CONTAINERS) and (len(value) > _MOST or not isinstance(value, _LISTED))
        if unlisted or _state(value) is not None or _slots(value):
            return True
        return any([may_change(part, depth - 1) for _, part in inner or ()])

    return found, may_change(value, _DEPTH)


def parts(value: Any) -> list[tuple[Any, Any]] | None:
    """Return what a value holds, by key; None for a value that is compared by identity."""
    if isinstance(value, _BY_IDENTITY) or type(value) in _PLAIN:
        return None
    if isinstance(value, types.MethodType):
        return [("self", value.__self__), ("func", value.__func__)]
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, _WRAPPERS) or (callable(value) and from_library(type(value)) and not is_followed(value)):
        return None  # an op, a compiled function: how it works inside is not ours
    found: list[tuple[Any, Any]] | None = None
    if isinstance(value, _CONTAINERS):
        if len(value) > _MOST:
            return None
        found = list(value.items()) if isinstance(value, Mapping) else list(enumerate(value))
    held = attributes_of(value)
    if isinstance(held, dict) and len(held) <= _MOST:
        found = [*(found or ()), *held.items()]
    slots = _slots(value)
    return [*(found or ()), *slots] if slots else found


def is_followed(value: Any) -> bool:
    """Return whether the attribute reads of an object can be intercepted while forward() runs."""
    if isinstance(value, (*_BY_IDENTITY, *_VALUES, *_CONTAINERS, random.Random)):
        return isinstance(value, nn.Module)
    kind: Any = type(value)
    return _followed_kind(kind)


@functools.lru_cache(4096)
def _followed_kind(kind: Any) -> bool:
    if not kind.__flags__ & _HEAP or kind.__flags__ & _IMMUTABLE or type(kind).__name__ == "pybind11_type":
        return False
    home = str(kind.__module__)
    file = getattr(sys.modules.get(home), "__file__", None) or ""
    standard = home in sys.builtin_module_names or (file.startswith(_STANDARD) and not file.startswith(INSTALLED))
    return not standard and home.split(".")[0] not in ("torch", "numpy", "autopart")


def _slots(value: Any) -> list[tuple[Any, Any]]:
    """Return the slots of an object that are filled, by name; none for objects of the standard library."""
    kind = type(value)
    if isinstance(value, _BY_IDENTITY) or kind in _PLAIN or (from_library(kind) and not is_followed(value)):
        return []
    listed = [vars(base)["__slots__"] for base in kind.__mro__ if "__slots__" in vars(base)]
    found = []
    for name in (name for slots in listed for name in ([slots] if isinstance(slots, str) else slots)):
        with contextlib.suppress(AttributeError):
            if name not in ("__dict__", "__weakref__"):
                found.append((name, object.__getattribute__(value, name)))
    return found


def attributes_of(value: Any) -> Any:
    """Return the dictionary of an object's attributes, None if it has none.

    A class may raise an error of its own for `__dict__`, as lazy objects of libraries do.
    """
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


def from_library(kind: type) -> bool:
    """Return whether a class is Python's own or of an installed library."""
    return _is_library(kind.__module__)


@functools.lru_cache(1024)
def _is_library(name: str) -> bool:
    home = sys.modules.get(name)
    if home is None or name == "__main__":
        return False
    file = getattr(home, "__file__", None)
    return file is None or file.startswith(LIBRARIES)


def numbers_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a tensor's shape, type and bytes, also while a model is traced."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tuple(tensor.shape), tensor.dtype, hashlib.blake2b(content, digest_size=16).digest()


def _state(value: Any) -> Any:
    """Return the state of a generator of random numbers, or the content of an array or bytearray; else None."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return value.get_state().numpy().tobytes()
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
    """Return a value as a message names it."""
    if value is ABSENT:
        return "absent"
    if is_plain(value):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"

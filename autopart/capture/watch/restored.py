"""The model, and the Python around it, as they were before it was traced: a fake tensor may stay in nothing of it.

torch.export puts back what forward() assigns to attributes.  It does not put back buffers that forward() registers,
hooks that a library installs, entries of dictionaries and lists, attributes of other objects, globals, and what
`functools.lru_cache` remembers.  A table that was filled while tracing is filled anew when it is next asked for.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from autopart.capture.source_location import is_user_file
from autopart.capture.watch.closure_reads import is_library_file
from autopart.capture.watch.fingerprint import attributes_of

_DEPTH = 4
"""Containers inside containers that are looked at."""
_MOST = 2000
"""Entries of a container that are looked into; of a longer one only which there are."""
_CONTAINERS_LOOKED_AT = 20_000
_CONTAINERS = frozenset({dict, list, set, OrderedDict, defaultdict})
_PLAIN = frozenset({str, bytes, int, float, bool, type(None), tuple, type, types.FunctionType, types.ModuleType})


@contextlib.contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Undo what the body does to the modules' attributes, and take every traced tensor out of what the model and the
    user's files hold.  O(attributes, and entries of their containers).

    Yields what takes out traced tensors and keeps all else, for a body that runs forward() once more.
    """
    held = [(home, dict(home)) for module in model.modules() for home in _homes(module)]
    around = _Around(model)

    def settle() -> None:
        for home, before in held:
            _clean(home, before)
        around.clean()

    try:
        yield settle
    finally:
        for home, before in held:
            if len(home) != len(before) or any(home.get(k, before) is not value for k, value in before.items()):
                home.clear()
                home.update(before)
        around.clean()


def _homes(module: nn.Module) -> list[dict[str, Any]]:
    """A module's attributes, and the dictionaries that torch keeps among them: parameters, buffers, modules, hooks."""
    own = vars(module)
    return [own, *(own[name] for name in _OWN if isinstance(own.get(name), dict))]


_OWN = tuple(vars(nn.Module()))


class _Around:
    """Containers, objects and caches that forward() may fill, with what they hold."""

    def __init__(self, model: nn.Module) -> None:
        self._seen: set[int] = set()
        self._held: list[tuple[Any, Any]] = []
        self._caches: list[tuple[Any, int]] = []
        for module in model.modules():
            for name, value in list(vars(module).items()):
                if name not in _OWN:
                    self._look_into(value, _DEPTH)
        for kind in _classes(model):
            for member in list(vars(kind).values()):
                self._look_at(_unwrapped(member))
        for namespace in _namespaces(model):
            self._note(namespace)
            for name, value in list(namespace.items()):
                if not name.startswith("__"):
                    self._look_at(value)

    def _look_at(self, value: Any) -> None:
        """A global: caches of functions, classes of the user's with what they hold, else containers and objects."""
        if isinstance(value, type):
            if id(value) not in self._seen and is_user_file(_file_of(value)) and not is_library_file(_file_of(value)):
                self._seen.add(id(value))
                for member in list(vars(value).values()):
                    self._look_at(_unwrapped(member))
        elif isinstance(value, functools._lru_cache_wrapper):
            self._caches.append((value, value.cache_info().misses))
        else:
            self._look_into(value, _DEPTH)

    def _look_into(self, value: Any, depth: int) -> None:
        inside = _container(value)
        if inside is None or depth == 0 or id(inside) in self._seen or len(self._held) > _CONTAINERS_LOOKED_AT:
            return
        self._note(inside)
        if len(inside) <= _MOST:
            for part in list(_parts(inside)):
                self._look_into(part, depth - 1)

    def _note(self, container: Any) -> None:
        self._seen.add(id(container))
        self._held.append((container, container.copy()))

    def clean(self) -> None:
        """Take traced tensors out."""
        for cache, misses in self._caches:
            if cache.cache_info().misses != misses:
                cache.cache_clear()
        for container, before in self._held:
            _clean(container, before)


def _unwrapped(member: Any) -> Any:
    return member.__func__ if isinstance(member, (staticmethod, classmethod)) else member


def _clean(container: Any, before: Any) -> None:
    """Put back the entries of a container that hold traced tensors."""
    same = len(container) == len(before)
    if isinstance(container, dict):
        if same and all(map(operator.is_, container.values(), before.values())):
            return
        for name, value in list(container.items()):
            if value is before.get(name, container) or not _holds_traced(value):
                continue
            if name in before:
                container[name] = before[name]
            else:
                del container[name]
        container.update({name: value for name, value in before.items() if name not in container})
    elif not (same and all(map(operator.is_, container, before))) and any(map(_holds_traced, container)):
        container.clear()
        (container.extend if isinstance(container, list) else container.update)(before)


def _container(value: Any) -> Any:
    """The dictionary, list or set that a value is, or that holds an object's attributes; None for anything else."""
    if type(value) in _CONTAINERS:
        return value
    if type(value) in _PLAIN:
        return None
    if isinstance(value, (torch.Tensor, nn.Module, type)) or callable(value) or type(value).__module__ == "builtins":
        return None
    held = attributes_of(value)
    return held if type(held) is dict else None


def _parts(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _holds_traced(value: Any, depth: int = _DEPTH) -> bool:
    """Whether a value is a traced tensor, or holds one."""
    if isinstance(value, FakeTensor):
        return True
    inside = value if type(value) is tuple else _container(value)
    if inside is None or depth == 0 or len(inside) > _MOST:
        return False
    return any(_holds_traced(part, depth - 1) for part in list(_parts(inside)))


def _classes(model: nn.Module) -> list[type]:
    """The classes of a model's modules, but for torch's own."""
    classes = dict.fromkeys(kind for module in model.modules() for kind in type(module).__mro__)
    return [kind for kind in classes if not kind.__module__.startswith(("torch.", "builtins"))]


def _namespaces(model: nn.Module) -> list[dict[str, Any]]:
    """The globals of the user's files, and of those that define the model's classes."""
    names = {kind.__module__ for kind in _classes(model)}
    loaded = list(sys.modules.items())
    return [vars(module) for name, module in loaded if module is not None and (name in names or _is_users(module))]


def _is_users(module: Any) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and is_user_file(file) and not is_library_file(file)


def _file_of(kind: type) -> str:
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or "<"

"""The model, and the Python around it, as they were before it was traced: no fake tensor may stay in them.

torch.export puts back what forward() assigns to attributes.  It does not put back buffers that forward() registers,
hooks that a library installs, entries of dictionaries and lists, attributes of other objects, globals, and what
`functools.lru_cache` remembers.  A table that was filled while tracing is filled again when it is next read.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from autopart.capture.python.watch.fingerprint import attributes_of
from autopart.capture.source_location import is_library_file, is_user_file

_DEPTH = 4
"""Levels of nested containers that are looked at."""
_MOST = 2000
"""Entries of a container that are looked into; longer containers are only compared as a whole."""
_CONTAINERS_LOOKED_AT = 20_000
_CONTAINERS = frozenset({dict, list, set, OrderedDict, defaultdict})
_PLAIN = frozenset({str, bytes, int, float, bool, type(None), tuple, types.FunctionType, types.ModuleType})
"""Types of values without containers or caches, most of what a program holds: passed over before anything is asked."""
_OWN = tuple(vars(nn.Module()))


@contextlib.contextmanager
def left_as_it_was(models: Sequence[nn.Module]) -> Iterator[Callable[[], None]]:
    """Undo what the body does to the modules' attributes, and remove every traced tensor from what the models and the
    user's files hold.  O(attributes, and entries of their containers).

    Yields a function that removes traced tensors and keeps all else, for a body that runs forward() once more.
    """
    modules = [module for model in models for module in model.modules()]
    own = [vars(module) for module in modules]
    # with the dictionaries that torch keeps among a module's attributes: parameters, buffers, hooks
    inner = [names[name] for names in own for name in _OWN if isinstance(names.get(name), dict)]
    held = [(home, dict(home)) for home in (*own, *inner)]
    around = _Around(modules)

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


class _Around:
    """Containers, objects and caches that forward() may fill, with what they hold.

    Looked at are the modules' attributes, their classes, the user's files and the files that define those classes.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._seen: set[int] = set()
        self._held: list[tuple[Any, Any]] = []
        self._caches: list[tuple[Any, int]] = []
        kinds = dict.fromkeys(kind for module in modules for kind in type(module).__mro__)
        classes = [kind for kind in kinds if not kind.__module__.startswith(("torch.", "builtins"))]
        homes = {kind.__module__ for kind in classes}
        loaded = list(sys.modules.items())
        files = [vars(module) for name, module in loaded if module is not None and (name in homes or _is_users(name))]
        attributes = [{key: value for key, value in vars(module).items() if key not in _OWN} for module in modules]
        for namespace in files:
            self._note(namespace)
        for names in (*attributes, *(dict(vars(kind)) for kind in classes), *map(dict, files)):
            for name, value in names.items():
                if type(value) not in _PLAIN and not name.startswith("__"):
                    self._look_into(value)

    def _look_into(self, value: Any, depth: int = _DEPTH) -> None:
        """Note the caches and containers in a value, and in the members of a class of the user's."""
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, functools._lru_cache_wrapper):
            self._caches.append((value, value.cache_info().misses))
        if depth == 0 or id(value) in self._seen or len(self._held) > _CONTAINERS_LOOKED_AT:
            return
        inside = _container(value)
        if inside is not None:
            self._note(inside)
        elif isinstance(value, type) and _is_users(value.__module__):
            inside = dict(vars(value))
        self._seen.add(id(value))
        if inside is not None and len(inside) <= _MOST:
            for part in list(_parts(inside)):
                if type(part) not in _PLAIN:
                    self._look_into(part, depth - 1)

    def _note(self, container: Any) -> None:
        self._held.append((container, container.copy()))

    def clean(self) -> None:
        """Remove traced tensors."""
        for cache, misses in self._caches:
            if cache.cache_info().misses != misses:
                cache.cache_clear()
        for container, before in self._held:
            _clean(container, before)


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
    """Return the dictionary, list or set that a value is or that holds its attributes; None for anything else."""
    if type(value) in _CONTAINERS:
        return value
    if type(value) in _PLAIN:
        return None
    if isinstance(value, (torch.Tensor, nn.Module, types.ModuleType, type)) or callable(value):
        return None  # a module may have a class of its own, as that of transformers
    if type(value).__module__ == "builtins":
        return None
    held = attributes_of(value)
    return held if type(held) is dict else None


def _parts(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _holds_traced(value: Any, depth: int = _DEPTH) -> bool:
    """Return whether a value is a traced tensor, or holds one."""
    if isinstance(value, FakeTensor):
        return True
    inside = value if type(value) is tuple else _container(value)
    if inside is None or depth == 0 or len(inside) > _MOST:
        return False
    return any(_holds_traced(part, depth - 1) for part in list(_parts(inside)))


def _is_users(name: str) -> bool:
    """Return whether a module, by name, is a file of the user's."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return isinstance(file, str) and _is_users_file(file)


@functools.lru_cache(None)
def _is_users_file(file: str) -> bool:
    return is_user_file(file) and not is_library_file(file)

"""The model, and the caches around it, as they were before it was traced: a fake tensor may stay in none of them.

torch.export puts back what forward() assigns to attributes.  It does not put back buffers that forward() registers,
entries of global dictionaries, and what `functools.lru_cache` remembers.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree


@contextlib.contextmanager
def left_as_it_was(model: nn.Module, *, settled: bool = False) -> Iterator[None]:
    """Undo what the body does to the modules' attributes, and empty the caches that it filled.  O(attributes).

    settled: keep what holds no fake tensor, for a body that runs forward() once more.
    """
    held = [(home, dict(home)) for module in model.modules() for home in _homes(module)]
    caches = list(_caches(model))
    known = [(cache, cache.cache_info().misses) for cache in caches]
    tables = [(table, dict(table)) for table in _tables(model)]
    try:
        yield
    finally:
        for home, before in held:
            _put_back(home, before, settled)
        for cache, misses in known:
            if cache.cache_info().misses != misses:
                cache.cache_clear()
        for table, entries in tables:
            if _is_fake(table):
                table.clear()
                table.update(entries)


def _put_back(home: dict[str, Any], before: dict[str, Any], settled: bool) -> None:
    if settled:
        for name, value in list(home.items()):
            if value is not before.get(name, home) and _is_fake(value):
                del home[name]
        before = {**home, **{name: value for name, value in before.items() if name not in home}}
    if len(home) != len(before) or any(home.get(name, before) is not value for name, value in before.items()):
        home.clear()
        home.update(before)


def _is_fake(value: Any) -> bool:
    """Whether a value, or a container of values, holds a tensor that was traced."""
    return any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(value))


def _homes(module: nn.Module) -> list[dict[str, Any]]:
    """A module's attributes, and the dictionaries that torch keeps among them: parameters, buffers, modules, hooks."""
    own = vars(module)
    return [own, *(own[name] for name in _OWN if isinstance(own.get(name), dict))]


_OWN = tuple(vars(nn.Module()))


def _namespaces(model: nn.Module) -> list[dict[str, Any]]:
    """The globals of the files that define the model's classes, and the classes' own attributes."""
    classes = dict.fromkeys(kind for module in model.modules() for kind in type(module).__mro__)
    ours = [kind for kind in classes if not kind.__module__.startswith(("torch.", "builtins"))]
    files = dict.fromkeys(kind.__module__ for kind in ours)
    globals_ = [vars(sys.modules[name]) for name in files if name in sys.modules]
    return [*globals_, *(dict(vars(kind)) for kind in ours)]


def _caches(model: nn.Module) -> Iterator[Any]:
    for namespace in _namespaces(model):
        for value in list(namespace.values()):
            value = getattr(value, "__func__", value)
            if callable(getattr(type(value), "cache_clear", None)) and callable(getattr(value, "cache_info", None)):
                yield value


def _tables(model: nn.Module) -> Iterator[dict[Any, Any]]:
    for namespace in _namespaces(model):
        for name, value in list(namespace.items()):
            if type(value) is dict and not name.startswith("__"):
                yield value

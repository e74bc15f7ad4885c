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
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Undo what the body does to the modules' attributes, and empty the caches that it filled.  O(attributes)."""
    held = [
        (home, dict(home))
        for module in model.modules()
        for home in (vars(module), module._parameters, module._buffers, module._modules)
    ]
    caches = list(_caches(model))
    known = [(cache, cache.cache_info().misses) for cache in caches]
    tables = [(table, dict(table)) for table in _tables(model)]
    try:
        yield
    finally:
        for home, before in held:
            if len(home) != len(before) or any(home.get(name, held) is not value for name, value in before.items()):
                home.clear()
                home.update(before)
        for cache, misses in known:
            if cache.cache_info().misses != misses:
                cache.cache_clear()
        for table, entries in tables:
            if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(table)):
                table.clear()
                table.update(entries)


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

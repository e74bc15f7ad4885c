"""The sources of generated code, which torch.fx keeps for the life of the process, for tracebacks."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx import graph_module

_SOURCES: dict[str, str] = graph_module._loader.eval_cache
_GENERATED = "<eval_with_key>"


@contextmanager
def forgotten_sources() -> Iterator[None]:
    """Forget the sources of what the body generates: some fifty programs for one capture, of which one is used."""
    before = set(_SOURCES)
    try:
        yield
    finally:
        for name in [name for name in _SOURCES if name.startswith(_GENERATED) and name not in before]:
            del _SOURCES[name]
            linecache.cache.pop(name, None)

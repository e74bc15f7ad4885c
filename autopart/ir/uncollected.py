"""Capture and passes run without the cyclic garbage collector: they make very many objects and hardly a cycle, and
every full collection looks again at all that capture left in memory, a quarter of the time of planning a large model.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """The collector rests inside, if it was at work before."""
    working = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if working:
            gc.enable()

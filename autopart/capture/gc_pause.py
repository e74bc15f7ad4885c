"""The cyclic garbage collector, paused while a model is captured and planned.

Both make very many objects and hardly a cycle, and every full collection looks again at all that capture left in
memory: a quarter of the time of planning a large model.  The passes do not do this themselves, as they are pure
functions and change nothing about the process; who calls them (`planning`, benchmarks) pauses the collector around
them, and capture is the lowest room that needs it.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the collector, which serves all threads, until the last of them has left; then it is as it was found."""
    global _pauses, _was_enabled
    with _lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0 and _was_enabled:
                gc.enable()

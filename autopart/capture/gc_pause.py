"""The cyclic garbage collector, paused while a model is captured and planned.

Both make many objects and few cycles, and every full collection scans everything that the capture left in memory: a
quarter of the time of planning a large model.  The passes are pure functions, so their callers pause the collector.
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
    """Pause the collector until the last thread that paused it leaves; then restore its state."""
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

"""Let a process on CPUs keep the memory that it has freed, since each micro-batch needs as much again.

By default the C library gives large tensors back to the system as soon as they are freed, and the next micro-batch gets
its memory page by page, each page set to zero: a part of each step (`benchmarks/training/freed_memory.py`).  It is told
to keep what lies at the end of its heap, and to take tensors of up to 32 MiB from there.  Larger ones always come from
the system; torch asks for huge pages for them (`HUGE_PAGES`), of which 1/512 as many are needed.

Nothing else changes: no result depends on it.  A process keeps the most memory that it has needed, until `give_back`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import lru_cache
from typing import Any

HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Environment of a process that lets torch ask for huge pages; torch reads it when it first allocates a tensor."""
_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")
"""Variables with which a user has set the same for a process; they count."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_MOST_BYTES, _LARGE_BYTES = (1 << 31) - 1, 32 << 20  # the largest that it takes


@lru_cache(maxsize=1)
def keep_freed_memory() -> bool:
    """Keep freed memory from now on; return whether the C library can, and the user has not set it otherwise."""
    library = _library()
    if not hasattr(library, "mallopt") or any(name in os.environ for name in _OWN):
        return False
    settings = ((_TRIM_THRESHOLD, _MOST_BYTES), (_MMAP_THRESHOLD, _LARGE_BYTES))
    return all([library.mallopt(*setting) == 1 for setting in settings])


def give_back() -> None:
    """Give freed memory back to the system; what the process needs later comes from there again."""
    library = _library()
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def _library() -> Any:
    return ctypes.CDLL(None) if sys.platform == "linux" else None

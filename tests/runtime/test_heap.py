"""Freed memory stays in a process that runs a pipeline on CPUs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

BLOCK = 8 << 20
PROGRAM = f"""
import resource
from autopart.runtime.heap import give_back, keep_freed_memory
def pages(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def resident(): return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
def use(): return [b"x" * {BLOCK} for _ in range(8)]
def counted():
    use()
    before = pages()
    for _ in range(10):
        use()
    return pages() - before
plain, kept = counted(), keep_freed_memory()
after, full = counted(), resident()
give_back()
print(plain, kept, after, full, resident())
"""


def outcome(**env: str) -> tuple[int, bool, int, int, int]:
    """Return pages that ten rounds take before and after freed memory is kept, and resident bytes before and after it
    is given back."""
    own = {name: value for name, value in os.environ.items() if "MALLOC" not in name and name != "GLIBC_TUNABLES"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**own, **env}, capture_output=True, text=True, check=True
    )
    plain, kept, *rest = done.stdout.split()
    return int(plain), kept == "True", *map(int, rest)  # type: ignore[return-value]


@pytest.mark.skipif(sys.platform != "linux", reason="the C library of Linux")
def test_a_round_that_frees_what_it_takes_needs_no_new_pages_in_the_next_one() -> None:
    plain, kept, after, full, given = outcome()
    if not kept:
        pytest.skip("this C library cannot keep freed memory")
    assert after < plain // 20
    assert full - given > 4 * BLOCK


@pytest.mark.skipif(sys.platform != "linux", reason="the C library of Linux")
def test_what_a_user_has_set_for_the_process_counts() -> None:
    plain, kept, after, _, _ = outcome(MALLOC_TRIM_THRESHOLD_="65536")
    assert not kept
    assert after > plain // 2

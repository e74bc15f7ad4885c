"""Runs functions in a forked process with limits on time and memory."""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

SECONDS, BYTES = 2.0, 200 * 2**20
"""Limits on processor time, and on memory beyond what this process already uses."""


def bounded(works: Iterable[Callable[[], str]], *, patience_s: float = 60.0) -> list[tuple[str, float]]:
    """Run functions one after the other in one forked process and return each result and its processor time in seconds.

    works: iterated in that process, outside the memory limit. The result of a function that raises or exceeds the
    memory limit is "failed: ..."; one that hangs ends the list with "hung".
    """
    fork = multiprocessing.get_context("fork")
    results, mine = fork.Pipe(duplex=False)
    child = fork.Process(target=_run, args=(works, mine), daemon=True)
    child.start()
    mine.close()
    found: list[tuple[str, float]] = []
    try:
        while True:
            if not results.poll(patience_s):
                found.append(("hung", patience_s))
                break
            found.append(results.recv())
    except EOFError:
        pass
    finally:
        child.kill()
        child.join()
    return found


def _run(works: Iterable[Callable[[], str]], results: Any) -> None:
    for work in works:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, resource.RLIM_INFINITY))
        start = time.process_time()
        try:
            said = work()
        except BaseException as error:  # no error may end the other functions
            said = f"failed: {type(error).__name__}: {str(error)[:200]}"
        finally:  # the iterator runs without a limit
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        results.send((said, time.process_time() - start))

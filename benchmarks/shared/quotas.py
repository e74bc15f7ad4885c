"""Ranks on a machine with fewer cores than ranks, each with its own part of a core: what a plan expects of devices.

A rank that waits leaves its core to others, so where ranks share cores, the work of one fills the bubbles of another,
and every plan takes as long as all of its work.  A control group with a quota keeps a rank to its part, whatever others
do.
Needs root and control groups of processors (version 1 or 2).
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

QUOTA_US = 1000
"""For which a rank computes in each period: the least that Linux allows, since ranks that compute together wait for
each other."""
SPARE = 0.1
"""The part of the machine that is left to the system."""
_VERSION_1, _VERSION_2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


def share_of(ranks: int) -> float:
    """Return the part of a core that each rank gets, 1 if there are enough cores."""
    cores = os.cpu_count() or 1
    return 1.0 if cores >= ranks else (1 - SPARE) * cores / ranks


@contextmanager
def parts_of_cores(parts: Sequence[float]) -> Iterator[list[Path]]:
    """Create a control group for each rank, with its part of a core, and remove them at the end; none where each has a
    whole one.  Raises OSError without permission."""
    made: list[Path] = []
    try:
        for rank, part in enumerate(parts if min(parts) < 1 else ()):
            made.append(Path(tempfile.mkdtemp(prefix=f"autopart-{rank}-", dir=_root())))
            if part < 1:  # a quota of a whole core yields two thirds of it
                _limit(made[-1], round(QUOTA_US / part))
        yield made
    finally:
        for folder in made:
            folder.rmdir()


def _root() -> Path:
    return _VERSION_1 if (_VERSION_1 / "cpu.cfs_quota_us").exists() else _VERSION_2


def _limit(folder: Path, period_us: int) -> None:
    if (folder / "cpu.cfs_quota_us").exists():
        (folder / "cpu.cfs_period_us").write_text(str(period_us))
        (folder / "cpu.cfs_quota_us").write_text(str(QUOTA_US))
    else:
        (folder / "cpu.max").write_text(f"{QUOTA_US} {period_us}")


def cores_of(parts: Sequence[float]) -> list[set[int]]:
    """Return the cores that each rank runs on: the first that has its part left, the largest part first; any where none
    has.  The system does not spread ranks that stop and go so that each gets its part."""
    cores = sorted(os.sched_getaffinity(0))
    left, found = dict.fromkeys(cores, 1.0), [set(cores)] * len(parts)
    for rank in sorted(range(len(parts)), key=lambda rank: -parts[rank]):
        core = next((core for core in cores if left[core] + 1e-9 >= parts[rank]), None)
        if core is not None:
            left[core] -= parts[rank]
            found[rank] = {core}
    return found


def attained(folder: Path, cores: set[int], seconds: float) -> float:
    """Return the part of a core that a process gets in a control group on these cores; others run meanwhile."""
    os.sched_setaffinity(0, cores)
    enter(folder)
    began, cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds:
        pass
    found = (time.process_time() - cpu) / (time.perf_counter() - began)
    leave()
    return found


def enter(folder: Path) -> None:
    """Put this process, and all of its threads, into a control group."""
    (folder / "cgroup.procs").write_text(str(os.getpid()))


def leave() -> None:
    """Take this process, and all of its threads, out of its control group."""
    enter(_root())


def why_not() -> str:
    """Return why ranks cannot have parts of cores here, or an empty string."""
    try:
        with parts_of_cores([0.5]):
            return ""
    except OSError as error:
        return f"no control groups of processors: {error}"

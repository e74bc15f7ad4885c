"""How many unmodified architectures of transformers train in stages with exact gradients.

Each is built small with random weights and its own defaults (see zoo_models.py for the selection), captured, planned
for three stages and four micro-batches, cut, and run stage by stage in this process; loss, gradients and buffers are
compared with one process on the whole batch (zoo_step.py). A model that cannot be exact must be refused with a reason:
for example a loss that compares all rows with all rows. With --processes two real processes run them. Every
architecture runs in a separate process, so that a crash or a hang affects one row only.

    python -m benchmarks.zoo.zoo                  writes results/zoo.json
    python -m benchmarks.zoo.zoo --only bloom     one or several architectures
    python -m benchmarks.zoo.zoo --processes      a few in real processes; writes results/zoo_processes.json
    python -m benchmarks.zoo.zoo --processes --all
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import transformers

from benchmarks.shared.common import write
from benchmarks.zoo.models import ARCHITECTURES, find
from benchmarks.zoo.step import BROKEN, CRASHED, EXACT, REFUSED, WRONG, Row, step

VERDICTS = (EXACT, REFUSED, WRONG, CRASHED, BROKEN)
FEW = ("bloom", "mamba", "deberta-v2", "marian", "swin", "patchtst", "wav2vec2", "granitemoe")
"""Default architectures of --processes: one of each kind."""


def rows(names: Sequence[str], jobs: int, limit: float, processes: bool) -> Iterator[Row]:
    """Yield the row of each architecture when it ends; `jobs` run at a time, each for at most `limit` seconds."""
    context = multiprocessing.get_context("fork")
    waiting, running = list(names), dict[Connection, tuple[str, Any, float]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            parent_end, child_end = context.Pipe(duplex=False)
            child = context.Process(target=_child, args=(child_end, name, processes))
            child.start()
            child_end.close()
            running[parent_end] = name, child, time.monotonic() + limit
        ready = wait(list(running), timeout=0.5)
        for end, (name, child, deadline) in list(running.items()):
            late = time.monotonic() > deadline
            if end not in ready and not late:
                continue
            yield _row(end, name, child, limit if late and end not in ready else 0.0)
            del running[end]


def _child(end: Connection, name: str, processes: bool) -> None:
    warnings.simplefilter("ignore")
    end.send(step(name, processes=processes))


def _row(end: Connection, name: str, child: Any, late: float) -> Row:
    """Return a child's row, or a row that says how the child ended."""
    try:
        found = None if late else end.recv()
    except EOFError:
        found = None
    if late:
        child.kill()
    child.join()
    if found is not None:
        return found
    cause = f"not finished after {late:.0f} s" if late else f"the process ended with {child.exitcode}"
    arch = find(name)
    return Row(name, arch.kind, arch.model, CRASHED, cause=cause)


def line(row: Row) -> str:
    """Return one row of the table."""
    error = f"{row.error:.1e}" if row.verdict in (EXACT, WRONG) else ""
    cause = " ".join(part for part in (row.cause, f"({row.why})" if row.why else "") if part)
    return f"{row.name:30s} {row.kind:28s} {row.verdict:8s} {error:8s} {row.seconds:6.1f} s  {cause}".rstrip()


def summary(found: Sequence[Row]) -> dict[str, Any]:
    """Return the number of each verdict, the exact share, and the causes of other verdicts."""
    counts = Counter(row.verdict for row in found)
    ran = len(found) - counts[BROKEN]
    causes = Counter(row.cause for row in found if row.verdict not in (EXACT, BROKEN))
    return {
        "architectures": len(found),
        **{verdict: counts[verdict] for verdict in VERDICTS},
        "exact_percent": round(100 * counts[EXACT] / ran, 1) if ran else 0.0,
        "largest_error": max((row.error for row in found if row.verdict == EXACT), default=0.0),
        "causes": dict(causes.most_common()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[a.name for a in ARCHITECTURES], metavar="NAME")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=float, default=180.0, help="time limit of an architecture in seconds")
    parser.add_argument("--processes", action="store_true", help="run each in two real processes")
    parser.add_argument("--all", action="store_true", help="run all architectures, also with --processes")
    parser.add_argument("--full", action="store_true", help="print place and advice of every refusal")
    given = parser.parse_args()
    names = given.only or (FEW if given.processes and not given.all else [a.name for a in ARCHITECTURES])
    began, found = time.perf_counter(), []
    for row in rows(names, 1 if given.processes else given.jobs, given.limit, given.processes):
        found.append(row)
        print(line(row), flush=True)
        if given.full and row.verdict != EXACT:
            print(f"    where {row.where}\n    fix {row.fix}")
    order = [a.name for a in ARCHITECTURES]
    found.sort(key=lambda row: order.index(row.name))
    totals = summary(found)
    print(*(f"{key}: {value}" for key, value in totals.items() if key != "causes"), sep="\n")
    for cause, count in totals["causes"].items():
        print(f"{count:4d}  {cause}")
    if not given.only:
        content = {
            "transformers": transformers.__version__, "seconds": round(time.perf_counter() - began, 1),
            "processes": given.processes, "summary": totals, "rows": [asdict(row) for row in found],
        }  # fmt: skip
        print("written to", write("zoo_processes" if given.processes else "zoo", content).name)


if __name__ == "__main__":
    main()

"""How many architectures of transformers train in stages as they are, and is every gradient then exact?

Each is built small with random weights and its own default choices (zoo_models.py says how they were chosen), captured,
planned for three stages and four micro-batches, cut, and played stage after stage in this process; loss, gradients and
buffers are compared with the plain model on the whole batch (zoo_step.py).  What cannot be exact is to be refused, with
a cause: a loss that compares all rows with all rows is, and rightly.  With --processes two real processes run them.
Every architecture has a process of its own, so that a crash or a hang is one row of the table.

    python benchmarks/zoo.py                  writes results/zoo.json
    python benchmarks/zoo.py --only bloom     one of them, or several
    python benchmarks/zoo.py --processes      a few by real processes; writes results/zoo_processes.json
    python benchmarks/zoo.py --processes --all
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
from common import write
from zoo_models import ARCHITECTURES, find
from zoo_step import BROKEN, CRASHED, EXACT, REFUSED, WRONG, Row, step

VERDICTS = (EXACT, REFUSED, WRONG, CRASHED, BROKEN)
FEW = ("bloom", "mamba", "deberta-v2", "marian", "swin", "patchtst", "wav2vec2", "granitemoe")
"""What --processes runs unless told otherwise: of every kind one."""


def rows(names: Sequence[str], jobs: int, limit: float, processes: bool) -> Iterator[Row]:
    """The row of each architecture as it ends; `jobs` at a time, none for longer than `limit` seconds."""
    context = multiprocessing.get_context("fork")
    waiting, running = list(names), dict[Connection, tuple[str, Any, float]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            ours, theirs = context.Pipe(duplex=False)
            child = context.Process(target=_child, args=(theirs, name, processes))
            child.start()
            theirs.close()
            running[ours] = name, child, time.monotonic() + limit
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
    """What a child says, or what became of it."""
    try:
        found = None if late else end.recv()
    except EOFError:
        found = None
    if late:
        child.kill()
    child.join()
    if found is not None:
        return found
    cause = f"no end after {late:.0f} s" if late else f"the process ended with {child.exitcode}"
    arch = find(name)
    return Row(name, arch.kind, arch.model, CRASHED, cause=cause)


def line(row: Row) -> str:
    """One row of the table."""
    said = f"{row.error:.1e}" if row.verdict in (EXACT, WRONG) else ""
    cause = " ".join(part for part in (row.cause, f"({row.why})" if row.why else "") if part)
    return f"{row.name:30s} {row.kind:28s} {row.verdict:8s} {said:8s} {row.seconds:6.1f} s  {cause}".rstrip()


def summary(found: Sequence[Row]) -> dict[str, Any]:
    """How many of each verdict, what share is exact, and the causes of all that is not."""
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
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for each architecture")
    parser.add_argument("--processes", action="store_true", help="two real processes for each")
    parser.add_argument("--all", action="store_true", help="all of them, by real processes too")
    parser.add_argument("--full", action="store_true", help="with place and advice of every refusal")
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
    told = summary(found)
    print(*(f"{key}: {value}" for key, value in told.items() if key != "causes"), sep="\n")
    for cause, count in told["causes"].items():
        print(f"{count:4d}  {cause}")
    if not given.only:
        content = {
            "transformers": transformers.__version__, "seconds": round(time.perf_counter() - began, 1),
            "processes": given.processes, "summary": told, "rows": [asdict(row) for row in found],
        }  # fmt: skip
        print("written to", write("zoo_processes" if given.processes else "zoo", content).name)


if __name__ == "__main__":
    main()

"""Does the order of a schedule explain what its step takes?  Every schedule on 4 ranks, measured and simulated.

Decoder, loss and step of schedules.py (8 blocks, 8 micro-batches, AdamW) on 4 Gloo ranks with one thread each, two
blocks a stage, or one with two stages a rank. Rank r runs on core r mod the number of cores alone, so with 4 cores each
rank has its own. With fewer, ranks share cores, and no step can be as the plan expects it: the work of the ranks of a
core adds up, and fills the bubbles of each other. So the simulation of such a step shares cores too (shared_cores.py).
It is given the order of the program and, of each measured step, the processor time of every action on every rank, of
what a rank does before and behind them, and of the threads that carry messages. Processor time does not count waiting:
when things happen, and for how long ranks wait, is the simulation's to say.

"Alone": the same simulation with a core for each rank: what the plan's order would take there.

    python -m benchmarks.steps.four_ranks          about 2 minutes on 2 idle cores; writes results/four_ranks.json
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist

import autopart
from autopart.ir.actions import RECEIVE, SEND, Action
from autopart.runtime.trace import StepTrace
from benchmarks.shared.alternation import alternate
from benchmarks.shared.architectures import seeded
from benchmarks.shared.bench_models import training_step
from benchmarks.shared.common import Spread, ratio, spread, write
from benchmarks.shared.shared_cores import Pool, Task, shared_ns
from benchmarks.steps.schedules import Decoder
from benchmarks.steps.step_time import BATCH, MICROS, SEQ, VOCAB, next_token_loss

RANKS = 4
ONE, TWO = tuple(f"blocks.{n}" for n in (2, 4, 6)), tuple(f"blocks.{n}" for n in range(1, 8))
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"cuts": ONE} for name in ("gpipe", "1f1b", "1f1b-deep", "zb-h1", "zb-h2")},
    **{name: {"cuts": TWO, "stages_per_rank": 2} for name in ("interleaved", "zb-v", "searched")},
}
MOST = 0.08
"""What is asked: a simulated step differs from the measured one by at most this share."""


@dataclass(frozen=True)
class Spent:
    """Nanoseconds of processor time of one rank in one step: of each action, of what comes behind the last one, and of
    all threads that carry messages."""

    actions: tuple[tuple[Action, int], ...]
    behind: int
    carrying: int


def measure(rounds: int, warmup: int) -> dict[str, Any]:
    """Run every schedule once per round on one rank; return seconds, and both simulated steps of each."""
    pin(int(os.environ["RANK"]))
    torch.set_num_threads(1)
    ids = torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))
    common: dict[str, Any] = {"sample": (ids, ids), "loss_fn": next_token_loss, "micro_batches": MICROS}
    pipes = {
        name: autopart.compile(
            seeded(Decoder, seed=0), f"cpu:{RANKS}", schedule=name, costs="analytic", **common, **options
        )
        for name, options in VARIANTS.items()
    }
    steps = {
        name: partial(spent, training_step(partial(pipe.step, ids, ids), pipe.parameters()), pipe)
        for name, pipe in pipes.items()
    }
    with mock.patch.object(StepTrace, "now", lambda _: time.thread_time_ns()):
        measured = alternate(steps, rounds, warmup)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, measured.results)
    found = {name: list(zip(*(rank[name] for rank in ranks), strict=True)) for name in steps}
    homes = {name: [ranks[0] for ranks in pipe.program.stage_ranks] for name, pipe in pipes.items()}
    return {
        "seconds": measured.seconds,
        "shared": {name: [simulated(own, homes[name], pools()) for own in rows] for name, rows in found.items()},
        "alone": {name: [simulated(own, homes[name], apart()) for own in rows] for name, rows in found.items()},
        "work": {name: [busiest(own) for own in rows] for name, rows in found.items()},
    }


def cores() -> list[int]:
    """Return the numbers of the cores of this machine."""
    return list(range(os.cpu_count() or 1))


def pin(rank: int) -> None:
    """Let all threads of this process run on the core of its rank alone."""
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), {rank % len(cores())})


def pools() -> list[Pool]:
    """Return the ranks of each core."""
    return [Pool(tuple(range(core, RANKS, len(cores())))) for core in cores()[:RANKS]]


def apart() -> list[Pool]:
    return [Pool((rank,)) for rank in range(RANKS)]


def spent(step: Callable[[], Any], pipe: autopart.Pipe) -> Spent:
    """Run a step whose spans are in processor time of this thread, and return what it took."""
    all_before, began = time.process_time_ns(), time.thread_time_ns()
    with pipe.traced() as spans:
        step()
    end, everything = time.thread_time_ns(), time.process_time_ns() - all_before
    ends = [began, *(span.end_ns for span in spans)]
    actions = tuple((span.action, own - before) for span, before, own in zip(spans, ends, ends[1:], strict=False))
    return Spent(actions, end - ends[-1], max(0, everything - (end - began)))


def simulated(ranks: Sequence[Spent], homes: Sequence[int], shared: Sequence[Pool]) -> float:
    """Return the simulated seconds of a step.  homes: the rank of each stage."""
    tasks = [tasks_of(rank, own, homes) for rank, own in enumerate(ranks)]
    ends = [
        sum(to != rank for rank, own in enumerate(tasks) for task in own for _, to in task.posts if end in (rank, to))
        for end in range(len(ranks))
    ]
    return shared_ns(tasks, [own.carrying / n for own, n in zip(ranks, ends, strict=True)], shared) * 1e-9


def tasks_of(rank: int, own: Spent, homes: Sequence[int]) -> list[Task]:
    """Return the tasks of a rank: its actions, then an exchange with all others, and what comes behind it."""
    tasks = []
    for action, ns in own.actions:
        waits = (action.other_end,) if action.is_a.role == RECEIVE else ()
        posts = ((action, homes[action.peer]),) if action.is_a.role == SEND and action.peer is not None else ()
        tasks.append(Task(ns, waits, posts))
    others = [other for other in range(RANKS) if other != rank]
    tasks.append(Task(0, posts=tuple((("end", rank, other), other) for other in others)))
    tasks.append(Task(own.behind, tuple(("end", other, rank) for other in others)))
    return tasks


def busiest(ranks: Sequence[Spent]) -> float:
    """Return the seconds of work of the core that has most."""
    each = [own.behind + own.carrying + sum(ns for _, ns in own.actions) for own in ranks]
    return max(sum(each[rank] for rank in pool.ranks) for pool in pools()) * 1e-9


def report(found: Mapping[str, Mapping[str, list[float]]], *, keep: bool) -> None:
    seconds, rows = found["seconds"], {}
    print(f"{RANKS} ranks on {len(cores())} cores")
    for name, values in seconds.items():
        own: dict[str, Spread] = {
            "measured": spread(values),
            "simulated / measured": ratio(found["shared"][name], values),
            "busy share of the fullest core": ratio(found["work"][name], values),
            "simulated, a core for each rank": spread(found["alone"][name]),
        }
        rows[name] = own
        share, busy = own["simulated / measured"], own["busy share of the fullest core"]
        print(
            f"  {name:12s} {own['measured']}  simulated {share.median - 1:+.1%} [{share.low - 1:+.1%}, "
            f"{share.high - 1:+.1%}]  fullest core busy {busy.median:.1%}  "
            f"alone {own['simulated, a core for each rank'].median:.4f} s"
        )
    off = {name: own["simulated / measured"].median - 1 for name, own in rows.items()}
    worst = max(off, key=lambda name: abs(off[name]))
    print(f"  largest difference {off[worst]:+.1%} ({worst}), mean {statistics.mean(map(abs, off.values())):.1%}")
    claims = {f"{name}: simulated within {MOST:.0%} of the measured step": abs(o) <= MOST for name, o in off.items()}
    if keep:
        print("written to", write("four_ranks", {"ranks": RANKS, "schedules": rows, "claims": claims}).name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--dry", action="store_true", help="print alone, write no result")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    report(autopart.launch(measure, f"cpu:{RANKS}", given.rounds, given.warmup)[0], keep=not given.dry)


if __name__ == "__main__":
    main()

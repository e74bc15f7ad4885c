"""Plans for unlike devices compared with plans made by hand, and with what no plan can beat.

By hand: the devices in every order of their kinds, one kind inside another, or dealt out in turn; stages of one device,
of all devices of a kind, or all devices as replicas; cuts for which the slowest stage is fastest on the devices that it
has; one, two or four stages a rank; every schedule.  Then random ones: devices in any order, any numbers of replicas,
cuts that are off by up to a quarter of a stage.  All are evaluated like the planner's candidates, memory included, and
compared by its criterion, under which more stages and other orders have to be worth it, and with the fastest one found.
Times are analytic: ratios are meaningful, milliseconds are not.

    python -m benchmarks.planning.unlike                     all; writes results/unlike.json after each case
    python -m benchmarks.planning.unlike --only 4090         only matching cases; other recorded results are kept
    python -m benchmarks.planning.unlike --show              also prints the plans
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, permutations
from random import Random
from typing import Any

import numpy as np
import torch

from autopart.batch.batch import flatten
from autopart.capture import CaptureCache
from autopart.files.presets import DEVICES, MEMORY_REACHED, REACHED
from autopart.ir.cluster import DEVICE_KINDS, Cluster, Device, Level, Link
from autopart.ir.graph import Size
from autopart.options import read_options
from autopart.passes import pipeline
from autopart.passes.search.evaluation import Candidate, Evaluation, evaluate
from autopart.passes.search.finalize import Finalized
from autopart.passes.search.layout import Layout
from autopart.passes.search.space import PlanRequest, SearchSpace
from autopart.planning import make
from benchmarks.shared import shapes
from benchmarks.shared.common import recorded, write

RANDOM = 40
"""Random plans of a case."""
FASTER, GAP = 0.005, 0.15
"""The part by which no plan by hand may be better, and the largest gap."""


def _card(name: str, memory: int, bandwidth: int, half: int) -> Device:
    """Return a GPU from its data sheet: GB, GB/s, TFLOP/s of tensor cores with sums in fp32."""
    rates = (("bfloat16", half * 10**12), ("float16", half * 10**12))
    device = Device("cuda", memory * 10**9, half * 10**12 // 4, bandwidth * 10**9, name, rates, REACHED, MEMORY_REACHED)
    return replace(device, reserve_bytes=DEVICE_KINDS["cuda"].reserve(device.memory_bytes))


CARDS = DEVICES | {
    card.name: card
    for card in (
        _card("RTX 4090", 24, 1008, 165),
        _card("RTX 3090", 24, 936, 71),
        _card("RTX 3060", 12, 360, 25),
    )
}
PCIE, ETHERNET, FABRIC = Link(10_000, 12 * 10**9), Link(40_000, 12 * 10**8), Link(20_000, 25 * 10**9)


def mixed(devices: str, *hosts: int, link: Link = PCIE, network: Link = ETHERNET) -> Cluster:
    """Return a cluster of "2 RTX 4090, 6 RTX 3060", on one host, or with as many devices on each."""
    parts = [part.strip().split(" ", 1) for part in devices.split(",")]
    found = tuple(CARDS[name] for count, name in parts for _ in range(int(count)))
    if not hosts:
        return Cluster(found, (Level(len(found), link),))
    sizes = hosts if len(set(hosts)) > 1 else ()
    return Cluster(found, (Level(max(hosts), link, sizes), Level(len(found), network)))


CLUSTERS: dict[str, Cluster] = {
    "2 x 4090 + 6 x 3060": mixed("2 RTX 4090, 6 RTX 3060"),
    "2 x 4090 + 6 x 3060, hosts of 2": mixed("2 RTX 4090, 6 RTX 3060", 2, 2, 2, 2),
    "A100 + H100": mixed("1 A100, 1 H100", link=FABRIC),
    "4 x 3090 + 4090": mixed("4 RTX 3090, 1 RTX 4090"),
    "4 x 3090 + 4090, hosts of 4 and 1": mixed("4 RTX 3090, 1 RTX 4090", 4, 1),
    "4090 + 4 x 3090, hosts of 1 and 4": mixed("1 RTX 4090, 4 RTX 3090", 1, 4),
    "1 x 4090 + 3 x 3060": mixed("1 RTX 4090, 3 RTX 3060"),
    "2 x 4090 + 2 x 3090 + 4 x 3060": mixed("2 RTX 4090, 2 RTX 3090, 4 RTX 3060"),
    "4090 + 2 x 3090 + 3060": mixed("1 RTX 4090, 2 RTX 3090, 1 RTX 3060"),
}

MODELS: dict[str, Callable[[], tuple[torch.nn.Module, Any, dict[str, Any]]]] = {
    "gpt2-medium": lambda: (shapes.gpt2(24, 1024, 16).bfloat16(), shapes.causal_batch(32, 1024), {}),
    "llama-1b": lambda: (shapes.llama(16, 2048, 8192, 32, 8).bfloat16(), shapes.causal_batch(16, 2048), {}),
    "resnet-101": lambda: (
        shapes.ResNet(101).train().bfloat16(),
        (shapes.image_batch(256)[0].bfloat16(), shapes.image_batch(256)[1]),
        {"loss_fn": torch.nn.functional.cross_entropy, "optimizer": "momentum"},
    ),
}


# ---- plans by hand ---------------------------------------------------------------------------------------------------


def orders_by_kind(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """Yield the devices kind after kind in every order, with each kind inside another, and dealt out in turn."""
    ranks = {kind: [r for r, d in enumerate(cluster.devices) if d == kind] for kind in dict.fromkeys(cluster.devices)}
    for kinds in permutations(ranks):
        rows = [ranks[kind] for kind in kinds]
        yield tuple(rank for row in rows for rank in row)
        outer, inner = rows[0], [rank for row in rows[1:] for rank in row]
        half = len(outer) // 2
        yield (*outer[:half], *inner, *outer[half:])
        places = [((i + 0.5) / len(row), at, rank) for at, row in enumerate(rows) for i, rank in enumerate(row)]
        yield tuple(rank for _, _, rank in sorted(places))


def shortest(space: SearchSpace, rows: int, devices: Sequence[Sequence[Device]]) -> tuple[int, ...] | None:
    """Return the bounds for which the slowest stage is fastest.  devices: of each stage, which share its rows."""
    n, types = space.chain.n, space.costs.device_types
    best, choices = np.full(n + 1, np.inf), []
    best[n] = 0
    for stage in reversed(devices):
        rate = sum(
            1
            / np.maximum(
                1, sum(space.chain.range_costs(Size(rows), types.index(d)).ranges(f) for f in ("fwd_ns", "bwd_ns"))
            )
            for d in stage
        )
        longest = np.maximum(np.where(space.legal, 1 / rate, np.inf), best[None, :])
        choices.append(longest.argmin(axis=1))
        best = longest.min(axis=1)
    if not np.isfinite(best[0]):
        return None
    bounds = [0]
    for choice in reversed(choices):
        bounds.append(int(choice[bounds[-1]]))
    return tuple(bounds)


def plans(space: SearchSpace, layout: Layout, widths: tuple[int, ...], rows: tuple[int, ...]) -> Iterator[Candidate]:
    """Yield the plans with these replicas in this order, cut by speed, under every schedule."""
    cluster, starts = space.costs.cluster, [0, *accumulate(widths)]
    devices = [
        [cluster.devices[rank] for rank in layout.ranks(start, width)]
        for start, width in zip(starts, widths, strict=False)
    ]
    ways = [(name, 1, "one") for name in ("1f1b", "1f1b-deep", "gpipe", "zb-h1", "zb-h2")]
    ways += [("interleaved", 2, "loop"), ("interleaved", 4, "loop"), ("zb-v", 2, "v")]
    for schedule, per_rank, placement in ways if len(widths) > 1 else ways[:1]:
        laps = [devices[::-1] if placement == "v" and lap % 2 else devices for lap in range(per_rank)]
        bounds = shortest(space, max(rows), [each for lap in laps for each in lap])
        if bounds is not None and (per_rank == 1 or schedule == "zb-v" or len(rows) % len(widths) == 0):
            yield Candidate(bounds, widths, 0, 0, layout, rows, schedule, (), per_rank, placement)


def by_experts(space: SearchSpace) -> Iterator[Candidate]:
    """Yield the plans that someone who knows the devices would try."""
    cluster, request = space.costs.cluster, space.request
    world = cluster.world
    for order in dict.fromkeys(orders_by_kind(cluster)):
        kinds = [cluster.devices[rank] for rank in order]
        runs = [sum(1 for _ in same) for same in _runs(kinds)]
        shapes = [
            (1,) * world,
            tuple(runs),
            (world,),
            (1,) * (world - 1),
            (1,) * max(kinds.count(k) for k in set(kinds)),
        ]
        for copies in [c for c in range(1, world + 1) if world % c == 0]:
            for widths in dict.fromkeys(shapes if copies == 1 else [(1,) * (world // copies)]):
                for rows in request.micro_rows:
                    if max(widths) * copies <= request.most_replicas(rows):
                        for inner in {1, copies}:
                            yield from plans(space, Layout(copies, world // copies, inner, order), widths, rows)


def _runs(kinds: Sequence[Device]) -> Iterator[list[Device]]:
    run: list[Device] = []
    for kind in kinds:
        if run and run[-1] != kind:
            yield run
            run = []
        run.append(kind)
    yield run


def at_random(space: SearchSpace, draw: Random) -> Candidate:
    """Return a random plan."""
    cluster, request = space.costs.cluster, space.request
    while True:
        order = list(range(cluster.world))
        draw.shuffle(order)
        used = draw.randint(max(1, cluster.world - 2), cluster.world)
        cuts = sorted(draw.sample(range(1, used), draw.randint(0, used - 1)))
        widths = tuple(b - a for a, b in pairwise((0, *cuts, used)))
        rows = draw.choice(request.micro_rows)
        if max(widths) > request.most_replicas(rows):
            continue
        found = draw.choice(list(plans(space, Layout(1, cluster.world, 1, tuple(order)), widths, rows)) or [None])
        if found is None:
            continue
        bounds = list(found.bounds)
        for place in range(1, len(bounds) - 1):
            room = max(0, bounds[place + 1] - bounds[place - 1])
            bounds[place] += draw.randint(-room // 8, room // 8) if draw.random() < 0.5 else 0
        return replace(found, bounds=tuple(bounds)) if space.allows(tuple(bounds)) else found


# ---- a case ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """What the planner is asked."""

    source: pipeline.PlannerInput
    request: PlanRequest
    cluster: Cluster


class _Recorded(Exception):
    """Raised once the request is known."""


def asked(captures: CaptureCache, batch: Any, cluster: Cluster, options: dict[str, Any]) -> Asked:
    """Return what `make_plan` would ask the planner."""
    known = []

    def record(source: pipeline.PlannerInput, machines: Cluster, request: PlanRequest, watch: Any = None) -> Any:
        known.append(Asked(source, request, machines))
        raise _Recorded

    build, make.build = make.build, record
    try:
        given = read_options(cache=False, **{"optimizer": "adamw", **options})
        make.make_plan(captures, batch, cluster, given, to_run=False)
    except _Recorded:
        pass
    finally:
        make.build = build
    return known[0]


def planned(task: Asked) -> tuple[Finalized, Any, tuple[SearchSpace, SearchSpace], int]:
    """Return the plan, its outlook, the spaces, and the shortest step that was found over blocks."""
    request = task.request.normalized()
    fine = pipeline.atoms(task.source.graph)
    estimator = pipeline._estimator(task.source, task.cluster, request)
    spaces = pipeline._spaces(task.source, fine, estimator, request)
    found = pipeline.search(spaces)
    final = pipeline._chosen(task.source, fine, task.source.graph, task.cluster, request, found, spaces)
    assert isinstance(final, Finalized)
    outlook = pipeline._with_bounds(final, spaces, None, orders=found.other_orders)
    return final, outlook, spaces, found.best_ns


def told(found: Evaluation) -> str:
    """Return a plan by hand in one line."""
    plan = found.candidate
    names = found.space.costs.cluster.devices
    ranks = " | ".join(
        "+".join(f"{count} {kind[-4:]}" for kind, count in Counter(names[r].name for r in own).items())
        for own in plan.ranks[: len(plan.widths)]
    )
    return f"{plan.schedule}{f' x{plan.per_rank}' if plan.per_rank > 1 else ''}, {len(plan.micro_rows)} micros: {ranks}"


def result(task: Asked, seed: str) -> dict[str, Any]:
    """Return our plan and the best ones by hand."""
    began = time.process_time()
    final, outlook, (_, fine), best_ns = planned(task)
    seconds = time.process_time() - began
    draw, ours = Random(seed), final.evaluation
    made = {"expert": list(by_experts(fine)), "random": [at_random(fine, draw) for _ in range(RANDOM)]}
    found: dict[str, Any] = {}
    for name, candidates in made.items():
        fitting = [e for e in (evaluate(fine, each) for each in dict.fromkeys(candidates)) if e.fits]
        if fitting:
            best = min(fitting, key=lambda e: e.preference)
            fast = min(fitting, key=lambda e: e.step_ns)
            better = 1 - best.preference / ours.preference
            found[name] = {
                "plans": len(fitting),
                "better": better,
                "shorter_than_fastest": 1 - fast.step_ns / best_ns,
                "best": told(best),
                "fastest": told(fast),
                "step_ms": best.step_ns / 1e6,
            }
    return {
        "seconds": seconds,
        "step_ms": outlook.step_ns / 1e6,
        "fastest_ms": best_ns / 1e6,
        "bound_ms": outlook.optimality.lower_bound / 1e6,
        "gap": outlook.optimality.gap,
        "plan": told(ours),
        "by_hand": found,
    }


def line(name: str, found: dict[str, Any]) -> str:
    """Return one result as a line."""
    hands = "  ".join(
        f"{way} {hand['better']:+.1%} ({hand['shorter_than_fastest']:+.1%} of {hand['plans']})"
        for way, hand in found["by_hand"].items()
    )
    return f"{name:50s} {found['seconds']:6.1f} s  step {found['step_ms']:8.1f}  gap {found['gap']:4.0%}  {hands}"


def claims_of(done: dict[str, Any]) -> dict[str, bool]:
    """Return what is claimed, and whether it holds."""
    worst = max(hand["better"] for found in done.values() for hand in found["by_hand"].values())
    gap = max(found["gap"] for found in done.values())
    return {
        f"no plan by hand is better by more than {FASTER:.1%}: {worst:.1%}": worst <= FASTER,
        f"no gap is above {GAP:.0%}: {gap:.0%}": gap <= GAP,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression of names")
    parser.add_argument("--show", action="store_true", help="print the plans too")
    given = parser.parse_args()
    torch.set_num_threads(1)
    done = recorded("unlike", "cases")
    for model, made in MODELS.items():
        names = [name for name in CLUSTERS if re.search(given.only, f"{model} on {name}")]
        if not names:
            continue
        with torch.device("meta"):
            module, batch, options = made()
        loss_fn = options.get("loss_fn")
        captures, given_batch = CaptureCache(module, loss_fn), flatten(batch, with_target=loss_fn is not None)
        for name in names:
            case = f"{model} on {name}"
            done[case] = found = result(asked(captures, given_batch, CLUSTERS[name], options), case)
            write("unlike", {"claims": claims_of(done), "cases": done})
            print(line(case, found), flush=True)
            if given.show:
                print("    ours:", found["plan"])
                for hand in found["by_hand"].values():
                    print("    best:", hand["best"], "  fastest:", hand["fastest"])
    for claim, holds in claims_of(done).items() if done else ():
        print("holds " if holds else "FAILS ", claim)


if __name__ == "__main__":
    main()

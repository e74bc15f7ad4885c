"""The search of an order: named ones and list schedules, the best of which local moves make shorter.

Objective: the simulated step (`simulation.simulate.ordered_ns`), with sums and the optimizer.  Constraints: no worker
holds more activations than it has room for; stages stay where they are placed.  Fast replays without contention of
messages (`replay`) choose what is simulated, and the simulator has the last word, so an order is never worse there than
a named one that fits.  Effort is counted in computes, so the same request has the same order everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from autopart.ir.errors import ProgramError
from autopart.ir.program import Edge
from autopart.passes.ordering.bound import bound_ns
from autopart.passes.ordering.lists import RULES, listed
from autopart.passes.ordering.moves import improved, kicked
from autopart.passes.ordering.pipeline import Pipeline
from autopart.passes.ordering.replay import Orders, fits, peak_bytes, replay
from autopart.passes.program.named import BUILT_IN, SEARCHED
from autopart.passes.program.orders import Shape, Turn, texts_of
from autopart.passes.program.routing import Tied
from autopart.passes.program.schedules import find, pattern_of, without_backward, worker_orders
from autopart.passes.simulation.simulate import Work, ordered_ns

LIST_EFFORT, MOVE_EFFORT = 120_000, 200_000
"""Computes that are listed, and replayed to try moves; at least two rules are listed, however long the pipeline."""
_ROUNDS, _ROUND_COST = 100, 6
"""Times that the best order is kicked, and how many replays of all computes that takes besides the moves."""
_SIMULATED = 2
"""Searched orders that the simulator judges, the shortest ones of the replays."""


@dataclass(frozen=True, slots=True)
class Found:
    """The best order that was found.

    order: as `Decision.order` has it.  step_ns: simulated.  name: of the named schedule that it is; "" for a searched
    one.  bound_ns: no order can beat it, sums and optimizer left out.  peak_bytes: held by each worker.  named: the
    simulated step of each named schedule that has an order for this shape and fits.
    """

    order: tuple[str, ...]
    step_ns: int
    name: str
    bound_ns: int
    peak_bytes: tuple[int, ...]
    named: tuple[tuple[str, int], ...]


def search_order(
    shape: Shape,
    links: Sequence[Edge],
    tied: Tied,
    stage_ranks: Sequence[tuple[int, ...]],
    work: Work,
    *,
    room_bytes: Sequence[int] = (),
    effort: int = MOVE_EFFORT,
) -> Found:
    """Return the shortest order that is found and fits.

    links, tied: edges and tied parameters of the plan.  room_bytes: bytes of activations that each worker may hold, in
    the order of their first stages; (): as many as there are.  effort: computes that may be replayed to try moves.
    Raises ProgramError for slices, for replicas in turn, and if no order was found that fits.
    O(rules * computes * log computes + effort).
    """
    pipeline = Pipeline.of(shape, links, work, room_bytes)

    def simulated(orders: Sequence[Sequence[Turn]]) -> int:
        return ordered_ns(pattern_of(shape, orders), links, tied, stage_ranks, work)

    named = [(name, orders) for name, orders in _named(shape) if fits(pipeline, orders)]
    timed = [(simulated(orders), name, orders) for name, orders in named]
    seeds = _shortest(pipeline, [*_listed(pipeline, shape.forward_only), *[orders for _, orders in named]])
    if not seeds:
        raise _nothing_fits(pipeline)
    known = [orders for _, orders in named]
    better = [orders for orders in _improved(pipeline, seeds, effort) if orders not in known]
    searched = [_whole(pipeline, orders) for orders in better]
    candidates = [*timed, *[(simulated(orders), "", orders) for orders in searched[:_SIMULATED]]]
    step, name, orders = min(candidates, key=lambda candidate: candidate[0])
    peaks = tuple(peak_bytes(pipeline, orders))
    return Found(texts_of(orders), step, name, bound_ns(pipeline), peaks, tuple([(n, ns) for ns, n, _ in timed]))


def _named(shape: Shape) -> Iterator[tuple[str, Orders]]:
    """Yield the named schedules that have an order for this shape."""
    for schedule in BUILT_IN:
        if schedule.synchronous and schedule.name != SEARCHED:
            try:
                yield schedule.name, list(map(list, worker_orders(find(schedule.name), shape)))
            except ProgramError:
                continue


def _listed(pipeline: Pipeline, forward_only: Collection[int]) -> Iterator[Orders]:
    """Yield the orders of as many rules as the effort allows; a backward that takes no time delays nothing there."""
    count = max(2, LIST_EFFORT // max(1, pipeline.computes))
    for rule in RULES[:count]:
        orders = listed(pipeline, rule)
        if orders is not None:
            yield [list(without_backward(tuple(order), forward_only)) for order in orders]


def _whole(pipeline: Pipeline, orders: Orders) -> Orders:
    """Return the orders with B for I and W in a row where nobody waits for I: it takes as long, and holds less."""
    changed: Orders = []
    for order in orders:
        own: list[Turn] = []
        for kind, stage, unit in order:
            if kind == "W" and own[-1] == ("I", stage, unit) and not pipeline.returns[stage]:
                own[-1] = ("B", stage, unit)
            else:
                own.append((kind, stage, unit))
        changed.append(own)
    return changed


def _improved(pipeline: Pipeline, seeds: list[Orders], effort: int) -> list[Orders]:
    """Return orders by the length of their step: what moves make of the seeds, and then of the best one, kicked."""
    better: list[Orders] = []
    for orders in seeds:
        changed, effort = improved(pipeline, orders, effort)
        better.append(changed)
    better = _shortest(pipeline, better)
    draw, floor = Random(0), bound_ns(pipeline)
    best, step = better[0], _step_ns(pipeline, better[0])
    for _ in range(_ROUNDS):
        cost = _ROUND_COST * pipeline.computes
        if step <= floor or effort < cost:
            break
        changed, effort = improved(pipeline, kicked(pipeline, best, draw), effort - cost)
        if _step_ns(pipeline, changed) <= step:
            best, step = changed, _step_ns(pipeline, changed)
    return [best, *better] if best not in better else better


def _step_ns(pipeline: Pipeline, orders: Orders) -> int:
    played = replay(pipeline, orders)
    assert played is not None  # it was played before
    return played.step_ns


def _shortest(pipeline: Pipeline, found: list[Orders]) -> list[Orders]:
    """Return different orders by the length of their replayed step; of equal steps the earlier ones first."""
    found = [orders for place, orders in enumerate(found) if orders not in found[:place]]
    steps = [replay(pipeline, orders) for orders in found]
    places = sorted([(played.step_ns, place) for place, played in enumerate(steps) if played is not None])
    return [found[place] for _, place in places]


def _nothing_fits(pipeline: Pipeline) -> ProgramError:
    needed = [sum([pipeline.held_bytes[s] for s in own]) for own in pipeline.own]
    worker, room = max(enumerate(pipeline.room_bytes), key=lambda pair: needed[pair[0]] - pair[1])
    return ProgramError(
        "no order of computes fits in memory",
        where=f"worker {worker}, stages {', '.join(map(str, pipeline.own[worker]))}",
        why=f"one micro-batch holds {needed[worker]} bytes of activations there, and there is room for {room}",
        fix="use smaller micro-batches, recomputation, or fewer stages on a rank",
    )

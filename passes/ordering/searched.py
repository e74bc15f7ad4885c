"""The search of an order: named ones and list schedules, the best of which local moves make shorter.

Objective: the simulated step (`simulation.simulate.ordered_ns`), with sums and the optimizer.  Constraints: no worker
holds more activations than it has room for; stages stay where they are placed.  Fast replays without contention of
messages (`replay`) choose what is simulated, and the simulator has the last word, so an order is never worse there than
a named one that fits.  Effort is counted in computes, so the same request has the same order everywhere.

A step is as long as its critical path: computes each of which begins when the one before it ends on the same worker, or
arrives from another.  Computes in a row on one worker are a block.  Changing the order inside a block helps only if it
changes the block's first or last compute (Nowicki and Smutnicki, A fast taboo search algorithm for the job shop
problem, Management Science 1996); backwards of weights may leave a block to fill a gap before it, or wait behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from autopart.ir.errors import ProgramError
from autopart.ir.program import Edge
from autopart.passes.ordering.lists import RULES, listed
from autopart.passes.ordering.pipeline import (
    Orders,
    Pipeline,
    Replay,
    bound_ns,
    durations,
    fits,
    peak_bytes,
    replay,
    sources,
)
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
Move = tuple[int, int, int]
"""Worker, place of a compute in its order, and its new place there."""
Block = tuple[int, int, int]
"""Worker, and the places of the first and the last compute."""
_LEAST_TRIES, _KICKS = 8, 4


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
    rules = RULES[: max(2, LIST_EFFORT // max(1, pipeline.computes))]
    made = [orders for orders in (listed(pipeline, rule) for rule in rules) if orders is not None]
    # A backward that takes no time delays nothing in them.
    known = [[list(without_backward(tuple(order), shape.forward_only)) for order in orders] for orders in made]
    seeds = _shortest(pipeline, [*known, *[orders for _, orders in named]])
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


# ---- local moves -----------------------------------------------------------------------------------------------------


def improved(pipeline: Pipeline, orders: Orders, effort: int) -> tuple[Orders, int]:
    """Return orders whose step is at most as long, which fit in memory if the given ones do, and the effort left.

    effort: computes that may be replayed; if that is a few times all of them, nothing is tried.  Takes the first move
    that makes the step shorter (or the workers end earlier on average, in an equal step) until none does.  O(effort).
    """
    tries = effort // max(1, pipeline.computes)
    now = replay(pipeline, orders) if tries >= _LEAST_TRIES else None
    while now is not None and tries > 0:
        better = None
        for move in _moves(orders, critical_blocks(pipeline, orders, now)):
            changed = _moved(orders, move)
            if not fits(pipeline, changed):
                continue
            tries -= 1
            found = replay(pipeline, changed)
            if found is not None and _value(found) < _value(now):
                better, orders = found, changed
                break
            if tries <= 0:
                break
        now = better
    return orders, tries * pipeline.computes


def kicked(pipeline: Pipeline, orders: Orders, draw: Random) -> Orders:
    """Return orders with a few random pairs of neighbours exchanged, where that fits and can end.

    A search that goes on from there may leave a place that no single move makes better.  O(computes).
    """
    for _ in range(_KICKS):
        worker = draw.randrange(len(orders))
        place = draw.randrange(len(orders[worker])) if orders[worker] else 0
        for move in _legal(orders[worker], worker, place, place - 1) if place else ():
            changed = _moved(orders, move)
            if fits(pipeline, changed) and replay(pipeline, changed) is not None:
                orders = changed
    return orders


def _value(played: Replay) -> tuple[int, int]:
    return played.step_ns, sum([ends[-1] for ends in played.ends_ns if ends])


def critical_blocks(pipeline: Pipeline, orders: Orders, played: Replay) -> list[Block]:
    """Return the blocks of a critical path, the last one first.  O(computes)."""
    taken = durations(pipeline)
    needs = {"F": sources(pipeline.sends), "I": sources(pipeline.returns)}
    at = {_way(turn): (worker, place) for worker, order in enumerate(orders) for place, turn in enumerate(order)}
    ends = played.ends_ns
    worker = max(range(len(ends)), key=lambda w: ends[w][-1] if ends[w] else 0)
    place = last = len(ends[worker]) - 1
    blocks: list[Block] = []
    while place >= 0:
        kind, stage, unit = _way(orders[worker][place])
        begin = ends[worker][place] - taken[orders[worker][place][0]][stage]
        if place and ends[worker][place - 1] == begin:
            place -= 1
            continue
        blocks.append((worker, place, last))
        before = [(at[kind, source, unit], after) for source, after in needs[kind][stage]] if kind != "W" else []
        cause = next((there for there, after in before if ends[there[0]][there[1]] + after == begin), None)
        if cause is None:
            break
        worker, place = cause
        last = place
    return blocks


def _way(turn: Turn) -> Turn:
    """Return the compute whose messages follow this one: I for B."""
    return ("I", *turn[1:]) if turn[0] == "B" else turn


def _moves(orders: Orders, blocks: list[Block]) -> Iterator[Move]:
    """Yield the moves that may shorten a critical path, those at its end first."""
    for worker, first, last in blocks:
        order = orders[worker]
        for place in range(last, first - 1, -1):
            if order[place][0] == "W":
                if place < last:
                    yield from _legal(order, worker, place, last)
                yield from _legal(order, worker, place, first)
        for place in {first, (first + last) // 2, last - 1}:
            if first <= place < last:
                yield from _legal(order, worker, last, place)
        for place in {first + 1, last}:
            if first < place:
                yield from _legal(order, worker, first, place)


def _legal(order: list[Turn], worker: int, place: int, to: int) -> Iterator[Move]:
    """Yield a move if it leaves the computes of each slot, and the micro-batches of each stage, in order."""
    _, stage, unit = order[place]
    passed = order[min(place, to) : max(place, to) + 1]
    others = [other for other in passed if other[1] == stage and other != order[place]]
    if place != to and not any(other[2] == unit or _way(other)[0] == _way(order[place])[0] for other in others):
        yield worker, place, to


def _moved(orders: Orders, move: Move) -> Orders:
    worker, place, to = move
    order = list(orders[worker])
    order.insert(to, order.pop(place))
    return [order if other == worker else own for other, own in enumerate(orders)]

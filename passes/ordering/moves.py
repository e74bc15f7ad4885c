"""Local moves: computes of the critical path change places with others of their worker while the step gets shorter.

A step is as long as its critical path: computes each of which begins when the one before it ends on the same worker, or
arrives from another.  Computes in a row on one worker are a block.  Changing the order inside a block helps only if it
changes the block's first or last compute (Nowicki and Smutnicki, A fast taboo search algorithm for the job shop
problem, Management Science 1996); backwards of weights may leave a block to fill a gap before it, or wait behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from autopart.passes.ordering.pipeline import Pipeline
from autopart.passes.ordering.replay import Orders, Replay, durations, fits, replay, sources
from autopart.passes.program.orders import Turn

Move = tuple[int, int, int]
"""Worker, place of a compute in its order, and its new place there."""
Block = tuple[int, int, int]
"""Worker, and the places of the first and the last compute."""
_LEAST_TRIES, _KICKS = 8, 4


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
        before = [(kind, source, unit, after) for source, after in needs[kind][stage]] if kind != "W" else []
        cause = next((at[k, s, u] for k, s, u, after in before if _end(ends, at[k, s, u]) + after == begin), None)
        if cause is None:
            break
        worker, place = cause
        last = place
    return blocks


def _way(turn: Turn) -> Turn:
    """Return the compute whose messages follow this one: I for B."""
    return ("I", *turn[1:]) if turn[0] == "B" else turn


def _end(ends: list[list[int]], at: tuple[int, int]) -> int:
    return ends[at[0]][at[1]]


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

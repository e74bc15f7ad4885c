"""What no order can beat, for given times, transfers, memory and placement.

A worker does its work, and it idles where it cannot have any.  Before the first backward of inputs can reach it, it has
forwards alone, no more than its memory holds.  Behind its last one, whose gradients still have to reach the first
stages, it has backwards of weights alone, no more than its memory holds.  And each stage does its forwards one after
the other, the last of which still has to go forward and back.  The longest of these is the bound.

It takes micro-batches as a fluid in memory (fractional knapsacks), lets W leave its I whenever that helps, and looks at
one worker at a time, so it may be short of the best order.  O(edges + stages log stages).
"""

from __future__ import annotations

from collections.abc import Iterable

from autopart.passes.ordering.pipeline import Pipeline, sources


def bound_ns(pipeline: Pipeline) -> int:
    """Return nanoseconds that no order of this pipeline can beat."""
    micros, fwd, back, weights = pipeline.micros, pipeline.fwd_ns, pipeline.input_ns, pipeline.weight_ns
    head, turned = _earliest(pipeline)
    tail, after = _latest(pipeline)
    best = 0
    for own, room in zip(pipeline.own, pipeline.room_bytes, strict=True):
        work = micros * sum([fwd[s] + back[s] + weights[s] for s in own])
        ahead = _most([(fwd[s], pipeline.held_bytes[s]) for s in own], room, micros)
        kept = _most([(weights[s], pipeline.kept_bytes[s]) for s in own if weights[s]], room, micros)
        before = max(min([head[s] for s in own]), min([turned[s] for s in own]) - ahead)
        best = max(best, work + before + max(0, min([tail[s] for s in own]) - kept))
    for s in range(pipeline.stages):
        best = max(best, head[s] + micros * fwd[s] + after[s], turned[s] + micros * back[s] + tail[s])
    return best


def _earliest(pipeline: Pipeline) -> tuple[list[int], list[int]]:
    """Return when F, and when I, of each stage can begin at first.  Stages receive from earlier ones."""
    received, returned = sources(pipeline.sends), sources(pipeline.returns)
    head, turned = [0] * pipeline.stages, [0] * pipeline.stages
    for s in range(pipeline.stages):
        head[s] = max([head[r] + pipeline.fwd_ns[r] + after for r, after in received[s]], default=0)
    for s in reversed(range(pipeline.stages)):
        gradients = [turned[r] + pipeline.input_ns[r] + after for r, after in returned[s]]
        turned[s] = max([head[s] + pipeline.fwd_ns[s], *gradients])
    return head, turned


def _latest(pipeline: Pipeline) -> tuple[list[int], list[int]]:
    """Return how long a step goes on at least after an I, and after an F, of each stage has ended."""
    tail, after = [0] * pipeline.stages, [0] * pipeline.stages
    for s in range(pipeline.stages):
        back = [way + pipeline.input_ns[r] + tail[r] for r, way in pipeline.returns[s]]
        tail[s] = max([pipeline.weight_ns[s], *back])
    for s in reversed(range(pipeline.stages)):
        onward = [way + pipeline.fwd_ns[r] + after[r] for r, way in pipeline.sends[s]]
        after[s] = max([pipeline.input_ns[s] + tail[s], *onward])
    return tail, after


def _most(items: Iterable[tuple[int, int]], room: int, micros: int) -> int:
    """Return at least the most time that computes can take whose results fit: (nanoseconds, bytes) of each stage's."""
    items = list(items)
    alike, total = len({size for _, size in items}) == 1, 0
    for taken, size in sorted(items, key=lambda item: (-item[0] / item[1] if item[1] else float("-inf"), item)):
        count = min(micros, room // size) if size else micros
        total += count * taken
        room -= count * size
        if count < micros and not alike:  # a part of one more
            return total + -(-taken * room // size)
    return total

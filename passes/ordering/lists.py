"""List scheduling: workers that always do the best thing that they can do now, in simulated time.

A worker that is free runs a forward or a backward of inputs that is ready, by preference; if there is none, a backward
of weights, for which nobody waits.  Which preference is best differs from pipeline to pipeline, so several are tried
(`RULES`).  Two of its numbers matter: backwards of weights run early where memory is short (a step of 1.2 % less at 8
workers with 4 stages each), and an order planned without transfers is often the better one when it is played with them.

Micro-batches go through each stage in order, since they are alike.  A forward starts only if room stays for one
micro-batch on each later stage of its worker, and a worker's stages take micro-batches in the order of the stages.  So
the oldest unfinished micro-batch can always go on: what younger ones hold was let in with its room left free.  Where W
keeps more than F held, room for one W more stays free of forwards; an I whose W has no room waits for other W to run.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

from autopart.passes.ordering.pipeline import Orders, Pipeline, changes, durations, sources

NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Rule:
    """What a worker prefers.

    back_from: the share of its room from which on it prefers backwards of inputs to forwards.  deep: whether it prefers
    backwards of later stages; forwards always of later ones.  gap: the least gap that W fills, in parts of W.
    weights_from: the share of its room from which on it prefers backwards of weights to all.  transfers: by what
    transfers are multiplied in planning.  pace: after how much of the time of a micro-batch on the busiest worker the
    next one may begin, from the third one on; 0: at once.
    """

    back_from: float
    deep: bool
    gap: float
    weights_from: float
    transfers: int
    pace: float = 0


RULES = (
    Rule(1.1, False, 0.6, 0.8, 0),
    Rule(0.9, True, 0, 0.8, 0),
    Rule(0, False, 0.6, 2, 1),
    Rule(0, True, 0, 0.9, 0),
    Rule(1.1, True, 0, 0.8, 0),
    Rule(0, True, 0, 2, 1),
    Rule(0, True, 0.6, 2, 0),
    Rule(1.1, False, 0.6, 0.9, 0),
    Rule(0.5, True, 0.6, 0.9, 1),
    Rule(0.5, False, 0.6, 2, 1),
    Rule(0, False, 0, 0.9, 0),
    Rule(0, False, 0, 2, 1),
    Rule(0.9, False, 0, 0.8, 2),
    Rule(1.1, False, 1, 0.9, 2),
    Rule(0, False, 0.6, 2, 1, pace=1),
    Rule(0, True, 0.6, 2, 0, pace=1),
    Rule(0, True, 0, 2, 1, pace=1),
)
"""Of 432 rules, those that together came within 0.1 % of the best of all on forty pipelines of 4 to 48 workers; the
first ones are good for long pipelines, where few are tried; the last three for little memory (half of 1F1B's)."""


def listed(pipeline: Pipeline, rule: Rule) -> Orders | None:
    """Return the order that a rule makes; None if memory lets no order of this kind end.

    O(computes * (stages of a worker + log computes)).
    """
    return _List(pipeline, rule).run()


class _List:
    """The state of all workers.

    At each stage: `at` has the next unit of each kind, `ready` when the input of each unit is there, and `owed` how
    many messages it still waits for.  room: bytes that each worker has left.  more: what W keeps beyond what F held.
    """

    def __init__(self, pipeline: Pipeline, rule: Rule) -> None:
        self._pipeline, self._rule = pipeline, rule
        stages, self._micros = pipeline.stages, pipeline.micros
        self._more = [max(0, kept - held) for held, kept in zip(pipeline.held_bytes, pipeline.kept_bytes, strict=True)]
        self._own = pipeline.own
        self._backwards = [own[::-1] if rule.deep else own for own in self._own]
        self._before, self._least_room = [-1] * stages, [0] * stages
        for own in self._own:
            room = max([self._more[s] for s in own], default=0)
            for place in reversed(range(len(own))):
                room += pipeline.held_bytes[own[place]]
                self._least_room[own[place]] = room
                self._before[own[place]] = own[place - 1] if place else -1
        received, returned = sources(pipeline.sends), sources(pipeline.returns)
        self._to = {"F": pipeline.sends, "I": pipeline.returns}
        taken = self._taken = durations(pipeline)
        self._change = changes(pipeline)
        self._at = {kind: [0] * stages for kind in "FIW"}
        self._ready = {kind: [[0] * self._micros for _ in range(stages)] for kind in "FI"}
        for stage, of in enumerate(received):
            if rule.pace and not of:
                beat = int(rule.pace * max([sum([taken["F"][s] + taken["B"][s] for s in own]) for own in self._own]))
                self._ready["F"][stage] = [max(0, unit - 1) * beat for unit in range(self._micros)]
        self._owed = {
            "F": [[len(of)] * self._micros for of in received],
            "I": [[len(of) + 1] * self._micros for of in returned],  # and its own forward
        }
        self._room = list(pipeline.room_bytes)
        self._back_below = [int((1 - rule.back_from) * room) for room in pipeline.room_bytes]
        self._weights_below = [int((1 - rule.weights_from) * room) for room in pipeline.room_bytes]
        self._events: list[tuple[int, int]] = [(0, worker) for worker in range(len(self._own))]
        self._orders: Orders = [[] for _ in self._own]

    def run(self) -> Orders | None:
        """Let every worker act whenever it becomes free, or something arrives for it."""
        free = [0] * len(self._own)
        while self._events:
            now, worker = heappop(self._events)
            if free[worker] <= now:
                free[worker] = self._act(worker, now)
        done = sum(map(len, self._orders))
        return self._orders if done == self._pipeline.computes else None

    def _act(self, worker: int, now: int) -> int:
        """Let a worker begin a compute; return when it is free again."""
        room = self._room[worker]
        over, done, weight_ns = self._at["I"], self._at["W"], self._pipeline.weight_ns
        waits = next((s for s in self._own[worker] if done[s] < over[s] and weight_ns[s]), -1)
        if waits >= 0 and room <= self._weights_below[worker]:
            return self._begin("W", worker, waits, now)
        back, next_back = self._next_backward(worker, now, room)
        ahead, next_ahead = self._next_forward(worker, now, room)
        if back >= 0 and (ahead < 0 or room <= self._back_below[worker]):
            return self._begin("I" if weight_ns[back] else "B", worker, back, now)
        if ahead >= 0:
            return self._begin("F", worker, ahead, now)
        arrival = min(next_back, next_ahead)
        if waits >= 0 and arrival - now >= self._rule.gap * weight_ns[waits]:
            return self._begin("W", worker, waits, now)
        if arrival < NEVER:
            heappush(self._events, (arrival, worker))
        return now

    def _next_backward(self, worker: int, now: int, room: int) -> tuple[int, int]:
        """Return the stage whose I is ready, -1 if none is; and when the first one will be, as far as is known.

        There has to be room for what W keeps, where that is more than I frees; else W has to run first.
        """
        at, ready, owed, first = self._at["I"], self._ready["I"], self._owed["I"], NEVER
        for stage in self._backwards[worker]:
            unit = at[stage]
            if unit < self._micros and not owed[stage][unit] and self._more[stage] <= room:
                if ready[stage][unit] <= now:
                    return stage, now
                first = min(first, ready[stage][unit])
        return -1, first

    def _next_forward(self, worker: int, now: int, room: int) -> tuple[int, int]:
        """Return the same for F: it needs room, and the stage of the worker before it has to be ahead."""
        at, ready, owed, first = self._at["F"], self._ready["F"], self._owed["F"], NEVER
        for stage in reversed(self._own[worker]):
            unit, before = at[stage], self._before[stage]
            if unit == self._micros or owed[stage][unit] or self._least_room[stage] > room:
                continue
            if before >= 0 and at[before] <= unit:
                continue
            if ready[stage][unit] <= now:
                return stage, now
            first = min(first, ready[stage][unit])
        return -1, first

    def _begin(self, kind: str, worker: int, stage: int, now: int) -> int:
        """Begin a compute; return when it ends."""
        way = "I" if kind == "B" else kind
        unit, end = self._at[way][stage], now + self._taken[kind][stage]
        self._orders[worker].append((kind, stage, unit))
        self._at[way][stage] += 1
        self._room[worker] -= self._change[kind][stage]
        heappush(self._events, (end, worker))
        if kind == "F":
            self._arrive("I", stage, unit, end, worker)
        for peer, after in self._to[way][stage] if way != "W" else ():
            self._arrive(way, peer, unit, end + after * self._rule.transfers, worker)
        return end

    def _arrive(self, kind: str, stage: int, unit: int, when: int, worker: int) -> None:
        """Note that an input is there from a time on, and wake its worker when it is the last one."""
        ready, owed = self._ready[kind][stage], self._owed[kind][stage]
        ready[unit] = max(ready[unit], when)
        owed[unit] -= 1
        home = self._pipeline.homes[stage]
        if not owed[unit] and home != worker:
            heappush(self._events, (ready[unit], home))

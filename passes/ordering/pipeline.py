"""What an order of computes depends on (times and memory of stages, transfers, placement), the step of given orders,
and what no order can beat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopart.ir.actions import BACKWARD, FORWARD
from autopart.ir.errors import ProgramError
from autopart.ir.program import Edge
from autopart.passes.program.linearize import receivers
from autopart.passes.program.orders import Shape, Turn
from autopart.passes.simulation.simulate import Work

Way = tuple[tuple[int, int], ...]
"""For a message of a stage, each receiver and the nanoseconds until it is there."""
Orders = list[list[Turn]]
"""The computes of each worker, in order."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline whose computes are to be ordered.  Tuples have an entry for each stage, but room_bytes.

    homes: the worker of each stage.  fwd_ns, input_ns, weight_ns: of F, I and W; a stage without time for W runs its
    backward as a whole, B.  held_bytes: activations of a micro-batch from F on; kept_bytes: from I to W, not by B.
    sends, returns: receivers of activations, and of gradients.  room_bytes: for each worker, the most that it may hold.

    Assumed, and wrong where: a message takes the same time whatever else is sent; every micro-batch is alike.
    """

    micros: int
    homes: tuple[int, ...]
    fwd_ns: tuple[int, ...]
    input_ns: tuple[int, ...]
    weight_ns: tuple[int, ...]
    held_bytes: tuple[int, ...]
    kept_bytes: tuple[int, ...]
    sends: tuple[Way, ...]
    returns: tuple[Way, ...]
    room_bytes: tuple[int, ...]

    @staticmethod
    def of(shape: Shape, links: Sequence[Edge], work: Work, room_bytes: Sequence[int] = ()) -> Pipeline:
        """Return the pipeline of a plan.  links: its edges.  room_bytes: as above; (): without limit.

        Raises ProgramError for slices and for replicas that take micro-batches in turn.  O(stages + edges).
        """
        if shape.slices > 1 or shape.alternates:
            raise ProgramError(
                "an order is searched for whole micro-batches alone",
                why="slices run back last in, first out" if shape.slices > 1 else "replicas take micro-batches in turn",
                fix="use another schedule, token_slices=None and replica_policy='split'",
            )
        stages = range(shape.stages)
        waiting_ns = work.weight_ns or (0,) * shape.stages
        weight_ns = tuple([0 if s in shape.whole else ns for s, ns in enumerate(waiting_ns)])
        hidden_ns = work.hidden_ns or (0,) * shape.stages  # of a backward that is whole: it is hidden
        bare_ns = [ns if weight else 0 for ns, weight in zip(hidden_ns, weight_ns, strict=True)]
        to = receivers(links)

        def way(which: str, stage: int) -> Way:
            found = []
            for peer in to.get((which, stage), ()):
                size, loads = work.messages.get((stage, peer, which), (0, ()))
                found.append((peer, max([load.alone_ns(size) for load in loads], default=0)))
            return tuple(found)

        homes = shape.homes or tuple(stages)
        most = [shape.micros * sum([work.held_bytes[s] for s in own]) for own in shape.workers]
        return Pipeline(
            shape.micros,
            homes,
            work.fwd_ns,
            tuple([whole - own + bare for whole, own, bare in zip(work.bwd_ns, weight_ns, bare_ns, strict=True)]),
            weight_ns,
            work.held_bytes,
            tuple([work.weight_bytes[s] if work.weight_bytes and weight_ns[s] else 0 for s in stages]),
            tuple([way(FORWARD, s) for s in stages]),
            tuple([way(BACKWARD, s) for s in stages]),
            tuple(room_bytes) or tuple(most),
        )

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.homes)

    @property
    def own(self) -> list[list[int]]:
        """The stages of each worker, ascending."""
        found: list[list[int]] = [[] for _ in self.room_bytes]
        for stage, home in enumerate(self.homes):
            found[home].append(stage)
        return found

    @property
    def computes(self) -> int:
        """Number of computes of a step."""
        return self.micros * sum([3 if weight else 2 for weight in self.weight_ns])


# ---- orders, played in time ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Replay:
    """The step of given orders: ends_ns, when each compute ends, as the orders have them."""

    ends_ns: list[list[int]]

    @property
    def step_ns(self) -> int:
        """Nanoseconds until the last compute ends."""
        return max([ends[-1] for ends in self.ends_ns if ends], default=0)


def replay(pipeline: Pipeline, orders: Sequence[Sequence[Turn]]) -> Replay | None:
    """Play orders, each compute as early as it can be; None if they can never end.  O(computes)."""
    stages, micros = range(pipeline.stages), pipeline.micros
    over = {kind: [[-1] * micros for _ in stages] for kind in "FI"}  # when each is over, before it is sent
    needs = {"F": sources(pipeline.sends), "I": sources(pipeline.returns)}
    taken = durations(pipeline)
    waiting: dict[tuple[str, int, int], list[int]] = {}
    ends: list[list[int]] = [[] for _ in orders]
    going = list(range(len(orders)))
    while going:
        worker = going.pop()
        order, own = orders[worker], ends[worker]
        clock = own[-1] if own else 0
        for kind, stage, unit in order[len(own) :]:
            way = "I" if kind == "B" else kind
            missing = None
            for source, after in needs[way][stage] if way != "W" else ():
                sent = over[way][source][unit]
                if sent < 0:
                    missing = (way, source, unit)
                    break
                if sent + after > clock:
                    clock = sent + after
            if missing is not None:
                waiting.setdefault(missing, []).append(worker)
                break
            clock += taken[kind][stage]
            own.append(clock)
            if way != "W":
                over[way][stage][unit] = clock
                going += waiting.pop((way, stage, unit), ())
    return Replay(ends) if all(len(own) == len(order) for own, order in zip(ends, orders, strict=True)) else None


def sources(ways: Sequence[Way]) -> list[list[tuple[int, int]]]:
    """Return for each stage the stages that it receives from, and the nanoseconds that takes."""
    found: list[list[tuple[int, int]]] = [[] for _ in ways]
    for source, way in enumerate(ways):
        for stage, after in way:
            found[stage].append((source, after))
    return found


def durations(pipeline: Pipeline) -> dict[str, list[int]]:
    """Return by kind of compute its nanoseconds on each stage."""
    parts = zip(pipeline.input_ns, pipeline.weight_ns, strict=True)
    return {
        "F": list(pipeline.fwd_ns),
        "B": [own + weight for own, weight in parts],
        "I": list(pipeline.input_ns),
        "W": list(pipeline.weight_ns),
    }


def changes(pipeline: Pipeline) -> dict[str, list[int]]:
    """Return by kind of compute the bytes by which it changes what its worker holds."""
    pairs = list(zip(pipeline.held_bytes, pipeline.kept_bytes, strict=True))
    return {
        "F": [held for held, _ in pairs],
        "B": [-held for held, _ in pairs],
        "I": [kept - held for held, kept in pairs],
        "W": [-kept for _, kept in pairs],
    }


def peak_bytes(pipeline: Pipeline, orders: Sequence[Sequence[Turn]]) -> list[int]:
    """Return the most bytes that each worker holds.  O(computes)."""
    change, peaks = changes(pipeline), []
    for order in orders:
        held = most = 0
        for kind, stage, _ in order:
            held += change[kind][stage]
            if held > most:
                most = held
        peaks.append(most)
    return peaks


def fits(pipeline: Pipeline, orders: Sequence[Sequence[Turn]]) -> bool:
    """Return whether no worker holds more than it may.  O(computes)."""
    peaks = peak_bytes(pipeline, orders)
    return all(peak <= room for peak, room in zip(peaks, pipeline.room_bytes, strict=True))


# ---- what no order can beat ------------------------------------------------------------------------------------------


def bound_ns(pipeline: Pipeline) -> int:
    """Return nanoseconds that no order of this pipeline can beat.

    A worker does its work, and it idles where it cannot have any.  Before the first backward of inputs can reach it, it
    has forwards alone, no more than its memory holds.  Behind its last one, whose gradients still have to reach the
    first stages, it has backwards of weights alone, no more than its memory holds.  And each stage does its forwards
    one after the other, the last of which still has to go forward and back.  The longest of these is the bound.

    It takes micro-batches as a fluid in memory (fractional knapsacks), lets W leave its I whenever that helps, and
    looks at one worker at a time, so it may be short of the best order.  O(edges + stages log stages).
    """
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

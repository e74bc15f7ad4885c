"""The step of given orders, played in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopart.passes.ordering.pipeline import Pipeline, Way
from autopart.passes.program.orders import Turn

Orders = list[list[Turn]]
"""The computes of each worker, in order."""


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

"""What an order of computes depends on: times and memory of stages, transfers between them, and where they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopart.ir.actions import BACKWARD, FORWARD
from autopart.ir.errors import ProgramError
from autopart.ir.program import Edge
from autopart.passes.program.linearize import receivers
from autopart.passes.program.orders import Shape
from autopart.passes.simulation.simulate import Work

Way = tuple[tuple[int, int], ...]
"""For a message of a stage, each receiver and the nanoseconds until it is there."""


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
        weight_ns = work.weight_ns or (0,) * shape.stages
        to = receivers(links)

        def way(which: str, stage: int) -> Way:
            peers = to.get((which, stage), ())
            return tuple([(peer, _transfer_ns(work, (stage, peer, which))) for peer in peers])

        homes = shape.homes or tuple(stages)
        most = [shape.micros * sum([work.held_bytes[s] for s in own]) for own in shape.workers]
        return Pipeline(
            shape.micros,
            homes,
            work.fwd_ns,
            tuple([whole - own for whole, own in zip(work.bwd_ns, weight_ns, strict=True)]),
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


def _transfer_ns(work: Work, message: tuple[int, int, str]) -> int:
    """Return how long a message takes when nothing else is sent."""
    if message not in work.messages:
        return 0
    size, loads = work.messages[message]
    return max([load.alone_ns(size) for load in loads], default=0)

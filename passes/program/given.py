"""Orders of computes that come from outside, as from a file, and programs that hold nothing but an order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopart.ir.actions import Action, Slot
from autopart.ir.errors import ProgramError
from autopart.ir.plan import Decision
from autopart.ir.program import Edge, Program
from autopart.passes.program.linearize import linear_order
from autopart.passes.program.orders import LOOP, ONE, Schedule, Shape, Turn, V, homes_of, placed
from autopart.passes.program.schedules import find, worker_orders


def given_schedule(name: str, orders: Sequence[Sequence[Action]]) -> Schedule:
    """Return a schedule of one size: these computes of each worker.

    Before: every stage from 0 on stands in one order, and runs every micro-batch from 0 on.  Raises ProgramError for
    orders that can never end; the schedule itself does so for other numbers of stages or micro-batches.
    O(computes * log workers).
    """
    home = {action.stage: worker for worker, order in enumerate(orders) for action in order}
    size = len(home), 1 + max(action.micro for order in orders for action in order)
    turns = [[(action.kind, action.stage, action.micro) for action in order] for order in orders]
    _chained(name, turns, Program(size[1], len(orders), tuple((home[stage],) for stage in range(size[0])), ()))

    def order(stages: int, micros: int) -> Sequence[Sequence[Action]]:
        if stages == 1 < size[0]:  # the planner compares with one stage, which leaves nothing to order
            return [[Action(kind, Slot(0, micro)) for micro in range(micros) for kind in "FB"]]
        if (stages, micros) != size:
            raise ProgramError(
                f"schedule {name} is for {size[0]} stages and {size[1]} micro-batches, not {stages} and {micros}",
                fix=f"plan with stages={size[0]}, micro_batches={size[1]}",
            )
        return orders

    homes, workers = homes_of([(home[stage],) for stage in range(size[0])]), len(set(home.values()))
    placement = next((kind for kind in (LOOP, V) if homes and homes == placed(kind, size[0], workers)), ONE)
    splits = any(kind == "I" for worker in turns for kind, _, _ in worker)
    return Schedule(name, order, placement=placement, splits=splits)


def chain_program(decision: Decision) -> Program:
    """Return the computes and messages of a decision as if every stage sent to the next one alone.

    It needs no graph, so it shows the order of a plan file.  Raises UsageError for an unknown schedule.
    O(computes * log workers).
    """
    shape, stages = Shape.of(decision), decision.stages
    ranks, divisions = tuple(stage.ranks for stage in stages), tuple(stage.division for stage in stages)
    bare = Program(
        shape.micros,
        decision.world,
        ranks,
        (),
        slices=shape.slices,
        divisions=divisions,
        forward_only=shape.forward_only,
    )
    return _chained(decision.schedule, list(worker_orders(find(decision.schedule), shape)), bare)


def _chained(schedule: str, orders: Sequence[Sequence[Turn]], bare: Program) -> Program:
    stages = range(len(bare.stage_ranks) - 1)
    linked = replace(
        bare, edges=tuple(Edge(s, s + 1, ("x",), () if s in bare.forward_only else ("x",)) for s in stages)
    )
    return replace(linked, order=tuple(linear_order(schedule, orders, linked)))

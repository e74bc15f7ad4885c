"""Simulation: a program, or the order of one that was never made, to the time that it would take."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from autopart.ir.errors import ProgramError
from autopart.ir.program import ACTIONS, COMPUTE, RECEIVE, SEND, TIED, Action, Edge, Program
from autopart.ir.timeline import Span, Timeline
from autopart.passes.program.linearize import receivers
from autopart.passes.program.routing import Tied
from autopart.passes.program.schedules import Pattern, in_one_order
from autopart.passes.simulation.play import CHARGED, Lane, Play, Step, StepCode, Work


def simulate(program: Program, work: Work) -> Timeline:
    """Play the program in time: starts and ends in nanoseconds, memory in bytes.

    Before: a verified program.  After: computes, sums and the optimizer span their time on the rank, a send spans its
    transfer, a receive the wait of its rank; spans are those of the first rank of each worker.  peak_bytes is of F done
    and B not yet (of a forward program: all).  Raises ProgramError when the stages of a rank have other replicas than
    each other.  O(actions * log ranks), and the sort of the spans.
    """
    spans: list[Span] = []
    code, lanes = _program_lanes(program, work)
    Play(lanes, code, overlap=work.overlap, spans=spans).run()
    peak = [0] * program.world
    for lane in lanes:
        most = _most_held(lane.actions, work)
        for rank in _alike(program, lane):
            peak[rank] = most
    return Timeline(tuple(sorted(spans, key=lambda span: (span.start_ns, span.rank))), tuple(peak))


def step_ns(program: Program, work: Work) -> int:
    """Nanoseconds of the step that `simulate` draws, without drawing it."""
    code, lanes = _program_lanes(program, work)
    return Play(lanes, code, overlap=work.overlap).run()


def ordered_ns(
    order: Pattern, links: Sequence[Edge], shared: Tied, stage_ranks: Sequence[tuple[int, ...]], work: Work
) -> int:
    """`step_ns` of the program that `route` makes of this order, without making it.

    links, shared: edges and tied parameters.  O(actions * log ranks).
    """
    frame = Program(0, 1 + max(map(max, stage_ranks)), tuple(stage_ranks), (), tied=shared)
    code = StepCode(work, frame.groups(TIED), in_order=order.orders is None)
    slices = max(1, len(work.slices))
    steps_of = _Steps(code, links, slices)
    lanes = []
    if order.orders is None:
        known = {(kind, stage): steps_of(kind, stage, 0) for kind, stage in dict.fromkeys(chain(*order.turns))}
        whole = [list(chain.from_iterable([known[turn] for turn in turns])) for turns in order.turns]
    else:
        whole = [list(chain.from_iterable([steps_of(*turn) for turn in turns])) for turns in order.orders]
    ends = [(action.kind, action.stage) for action in frame.once_a_step() if action.kind in CHARGED]
    for place, (turns, steps) in enumerate(zip(order.turns, whole, strict=True)):
        stages = tuple(dict.fromkeys(stage for _, stage in turns))
        replica = order.orders[place][0][2] // slices % work.turns[stages[0]] if work.alternates and order.orders else 0
        steps += [code.local(kind, stage, leads=not replica) for kind, stage in ends if stage in stages]
        lanes.append(Lane(stage_ranks[min(stages)][replica], stages, steps))
    return Play(lanes, code, overlap=work.overlap).run()


class _Steps:
    """The steps of a compute with the messages before and behind it."""

    def __init__(self, code: StepCode, links: Sequence[Edge], slices: int) -> None:
        self._code, self._slices = code, slices
        self._receivers = [receivers(links, piece) for piece in range(slices)]
        self._senders: list[dict[tuple[str, int], list[int]]] = [{} for _ in range(slices)]
        for senders, found in zip(self._senders, self._receivers, strict=True):
            for (way, source), peers in sorted(found.items()):
                for peer in peers:
                    senders.setdefault((way, peer), []).append(source)

    def __call__(self, kind: str, stage: int, unit: int) -> list[Step]:
        """As `Program.part` has them: receives and sends with the peers ascending."""
        code, way, piece = self._code, ACTIONS[kind].way, unit % self._slices
        return [
            *[code.receive((source, stage, way), unit) for source in self._senders[piece].get((way, stage), ())],
            code.local(kind, stage, piece),
            *[
                code.send((stage, peer, way), unit, unit // self._slices, piece)
                for peer in self._receivers[piece].get((way, stage), ())
            ],
        ]


def _program_lanes(program: Program, work: Work) -> tuple[StepCode, list[Lane]]:
    turns = [(a.kind, a.stage, a.micro) for a in program.order if ACTIONS[a.kind].role == COMPUTE]
    simple = program.slices == 1 and not work.alternates
    in_order = simple and in_one_order([turns], len(program.stage_ranks))
    code = StepCode(work, program.groups(TIED), in_order=in_order)
    leads = _leads(program)
    parts = program.parts(tuple(leads))
    known: dict[tuple[str, int, int | None], Step] = {}

    def step(action: Action, lead: int) -> Step:
        if not in_order:
            return _step(code, action, leads=lead == program.stage_ranks[action.stage][0])
        key = action.kind, action.slot.stage, action.peer
        if key not in known:
            known[key] = _step(code, action)
        return known[key]

    return code, [
        Lane(lead, stages, [step(action, lead) for action in part], part)
        for (lead, stages), part in zip(leads.items(), parts, strict=True)
    ]


def _leads(program: Program) -> dict[int, tuple[int, ...]]:
    """The first rank of each worker, and the stages of the worker.  Replicas that take turns are workers."""
    found: dict[frozenset[int], list[int]] = {}
    for stage, ranks in enumerate(program.stage_ranks):
        found.setdefault(frozenset(ranks), []).append(stage)
    if sum(map(len, found)) > len(frozenset[int]().union(*found)):
        raise ProgramError(
            "a rank runs stages that have other replicas than each other",
            where=str(program.stage_ranks),
            fix="put stages that share a rank on the same ranks",
        )
    return {
        rank: tuple(stages)
        for stages in found.values()
        for rank in program.stage_ranks[stages[0]][: program.division(stages[0]).period]
    }


def _alike(program: Program, lane: Lane) -> tuple[int, ...]:
    """The ranks that do what a lane does."""
    stage = lane.stages[0]
    return (lane.rank,) if program.division(stage).in_turn else program.stage_ranks[stage]


def _step(code: StepCode, action: Action, *, leads: bool = True) -> Step:
    kind, peer = ACTIONS[action.kind], action.peer
    slot = action.micro, action.slot.slice
    if peer is not None and kind.role == SEND:
        return code.send((action.stage, peer, kind.way), slot, *slot)
    if peer is not None and kind.role == RECEIVE:
        return code.receive((peer, action.stage, kind.way), slot)
    return code.local(action.kind, action.stage, action.slot.slice, leads=leads)


def _most_held(actions: Sequence[Action], work: Work) -> int:
    """Bytes of the micro-batches, or slices, in flight at most."""
    held = most = 0
    for action in actions:
        kind = ACTIONS[action.kind]
        if kind.role == COMPUTE:
            own = work.held(action.stage, action.slot.slice)
            held += -own if kind.frees else own
            most = max(most, held)
    return most

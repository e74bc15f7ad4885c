"""The simulated step of a program, or of an order of computes whose program is never made."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product

from autopart.ir.actions import ACTIONS, COMPUTE, HOLDING, OPTIMIZER, RECEIVE, SEND, TIED, Action
from autopart.ir.cluster import UNMEASURED, HostCosts
from autopart.ir.errors import ProgramError
from autopart.ir.program import BUCKET_BYTES, FIRST_BUCKET_BYTES, Edge, Program
from autopart.ir.timeline import Span, Timeline
from autopart.passes.program.linearize import receivers, senders
from autopart.passes.program.routing import Tied
from autopart.passes.program.schedules import Pattern, find
from autopart.passes.simulation.play import (
    MEETS,
    NO_WIRE,
    RECEIVES,
    RUNS,
    RUNS_BACK,
    SENDS,
    UPDATES,
    Lane,
    Meeting,
    Play,
    Wire,
    WorkerStep,
)
from autopart.passes.simulation.traffic import PortLoad, merged

Message = tuple[int, int, str]
"""(source stage, destination stage, way)."""

SUM_TIED, SUM_REPLICAS = "T", "R"
CHARGED = (SUM_TIED, SUM_REPLICAS, OPTIMIZER)
"""The actions once a step that take time, which `Work` holds.  New values of parameters are charged behind the
optimizer; the agreement of all ranks is a few numbers, and takes none."""
LONG = 20_000
"""Actions of a program from which on candidates are judged by a shorter one."""


@dataclass(frozen=True, slots=True)
class SliceWork:
    """The work of one slice of a micro-batch's sequences.

    fwd_ns, bwd_ns, held_bytes: of each stage.  sizes: bytes of its messages.  weight_ns, weight_bytes: as in `Work`.
    """

    fwd_ns: tuple[int, ...]
    bwd_ns: tuple[int, ...]
    held_bytes: tuple[int, ...]
    sizes: Mapping[Message, int]
    weight_ns: tuple[int, ...] = ()
    weight_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Work:
    """The times, sizes and loads of a plan.  Tuples have an entry for each stage.

    fwd_ns, bwd_ns: of F and B.  held_bytes: activations per micro-batch in flight.  messages: bytes of each message,
    and its loads, by micro-batch until they repeat; one that is missing takes no time.  tied: for each tied parameter
    in order, the stages that share it, its bytes and the load of its sum.  reduce: bytes and load of the sum of
    gradients over replicas.  optimizer_ns: the optimizer step.  overlap: whether sums over replicas run during the last
    backward, bucket by bucket (`ir.program`), instead of after it.  gather: with ZeRO-1, bytes and load of new values
    of parameters, behind the optimizer step.  bucket_bytes: summed at once (`Decision`).  summing_ns: what sums take
    from the cores that compute, on CPUs; tying_ns: likewise, those of `tied`; empty: nothing.  slices: of each slice in
    order, with slices of tokens; times and sizes of whole micro-batches are not used then.  weight_ns: the part of
    bwd_ns that W takes where the backward has two parts; weight_bytes: what is kept from I to W; hidden_ns: what I
    takes besides the rest of bwd_ns (slices: nothing); empty: nothing.  host: what hosts spend besides.
    """

    fwd_ns: tuple[int, ...]
    bwd_ns: tuple[int, ...]
    held_bytes: tuple[int, ...]
    messages: Mapping[Message, tuple[int, tuple[PortLoad, ...]]]
    tied: tuple[tuple[tuple[int, ...], int, PortLoad], ...] = ()
    reduce: tuple[tuple[int, PortLoad], ...] = ()
    optimizer_ns: tuple[int, ...] = ()
    overlap: bool = False
    gather: tuple[tuple[int, PortLoad], ...] = ()
    slices: tuple[SliceWork, ...] = ()
    bucket_bytes: int = BUCKET_BYTES
    summing_ns: tuple[int, ...] = ()
    tying_ns: tuple[int, ...] = ()
    weight_ns: tuple[int, ...] = ()
    weight_bytes: tuple[int, ...] = ()
    hidden_ns: tuple[int, ...] = ()
    host: HostCosts = UNMEASURED

    def computing_ns(self, stage: int) -> int:
        """Return what the computes of a micro-batch take on a stage."""
        return sum([part.fwd_ns[stage] + part.bwd_ns[stage] for part in self.slices or (self,)])


def simulate(program: Program, work: Work) -> Timeline:
    """Play the program in time: starts and ends in nanoseconds, memory in bytes.

    Before: a verified program.  After: computes, sums and the optimizer span their time on the rank, a send spans its
    transfer, a receive the wait of its rank; spans are those of the first rank of each worker.  peak_bytes is of F done
    and B not yet (of a forward program: all).  Raises ProgramError when the stages of a rank have other replicas than
    each other.  O(actions * log ranks), and the sort of the spans.
    """
    spans: list[Span] = []
    lanes, meetings = _program_lanes(program, work)
    Play(lanes, meetings, overlap=work.overlap, spans=spans, host=work.host).run()
    peak = [0] * program.world
    for lane, (_, ranks) in zip(lanes, _workers(program), strict=True):
        most = _most_held(lane.actions, work)
        for rank in ranks:
            peak[rank] = most
    return Timeline(tuple(sorted(spans, key=lambda span: (span.start_ns, span.rank))), tuple(peak))


def step_ns(program: Program, work: Work) -> int:
    """Return the nanoseconds of the step that `simulate` draws, without drawing it."""
    lanes, meetings = _program_lanes(program, work)
    return Play(lanes, meetings, overlap=work.overlap, host=work.host).run()


def played(stages: int, micros: int, schedule: str) -> tuple[int, ...]:
    """Return the numbers of micro-batches that are simulated to know the step.

    All of them, or of a long program as many as fill the pipeline (`Schedule.warm_up`), after which it goes at an even
    pace, and twice as many.
    """
    full = stages * find(schedule).warm_up
    return (full, 2 * full) if full and 6 * stages * micros > LONG and 3 * full < micros else (micros,)


def ordered_ns(
    order: Pattern, links: Sequence[Edge], tied: Tied, stage_ranks: Sequence[tuple[int, ...]], work: Work
) -> int:
    """Return `step_ns` of the program that `route` makes of this order, without making it.

    links, tied: edges and tied parameters.  O(actions * log ranks).
    """
    world, without = 1 + max(map(max, stage_ranks)), order.shape.forward_only
    frame = Program(0, world, tuple(stage_ranks), (), tied=tied, forward_only=without)
    code = _StepCode(work, frame.groups(TIED), in_order=order.in_order)
    slices, replicas = order.shape.slices, order.shape.replicas
    to = [receivers(links, piece) for piece in range(slices)]
    of = [senders(links, piece) for piece in range(slices)]

    def steps_of(kind: str, stage: int, unit: int) -> list[WorkerStep]:
        """A compute with its messages, as `Program.part` has them: receives and sends with the peers ascending."""
        way, (micro, piece) = ACTIONS[kind].way, divmod(unit, slices)
        steps = [code.receive((source, stage, way), unit) for source in of[piece].get((way, stage), ())]
        steps.append(code.local(kind, stage, piece))
        return steps + [code.send((stage, peer, way), unit, micro, piece) for peer in to[piece].get((way, stage), ())]

    known: dict[tuple[str, int], list[WorkerStep]] = {}
    ends = [(action.kind, action.stage) for action in frame.once_a_step() if action.kind in CHARGED]
    lanes = []
    for turns in order.workers:
        if order.in_order:  # the steps of all micro-batches are alike
            for kind, stage, _ in turns:
                if (kind, stage) not in known:
                    known[kind, stage] = steps_of(kind, stage, 0)
            steps = list(chain.from_iterable([known[kind, stage] for kind, stage, _ in turns]))
        else:
            steps = list(chain.from_iterable([steps_of(*turn) for turn in turns]))
        stages = tuple(dict.fromkeys(stage for _, stage, _ in turns))
        replica = turns[0][2] // slices % replicas[stages[0]]
        steps += [code.local(kind, stage, leads=not replica) for kind, stage in ends if stage in stages]
        lanes.append(Lane(stage_ranks[min(stages)][replica], stages, steps))
    return Play(lanes, code.meetings, overlap=work.overlap, host=work.host).run()


def _program_lanes(program: Program, work: Work) -> tuple[list[Lane], list[Meeting]]:
    code, workers, lanes = _StepCode(work, program.groups(TIED), in_order=False), _workers(program), []
    parts = program.parts(tuple(ranks[0] for _, ranks in workers))
    for (stages, ranks), part in zip(workers, parts, strict=True):
        own = ranks[0]
        led = {s for s in stages if not program.division(s).in_turn or own == program.stage_ranks[s][0]}
        lanes.append(Lane(own, stages, [code.step(action, leads=action.stage in led) for action in part], part))
    return lanes, code.meetings


def _workers(program: Program) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (stages, ranks) of each worker: the ranks that do the same at the same time."""
    found: dict[frozenset[int], list[int]] = {}
    for stage, ranks in enumerate(program.stage_ranks):
        found.setdefault(frozenset(ranks), []).append(stage)
    if sum(map(len, found)) > len(frozenset[int]().union(*found)):
        raise ProgramError(
            "a rank runs stages that have different replicas",
            where=str(program.stage_ranks),
            fix="put stages that share a rank on the same ranks",
        )
    workers = []
    for stages in found.values():
        ranks = program.stage_ranks[stages[0]]
        apart = [(rank,) for rank in ranks] if program.division(stages[0]).in_turn else [ranks]
        workers += [(tuple(stages), own) for own in apart]
    return workers


def _most_held(actions: Sequence[Action], work: Work) -> int:
    """Return the bytes of the micro-batches, or slices, in flight at most."""
    held = most = 0
    for action in actions:
        kind = ACTIONS[action.kind]
        if kind.role == COMPUTE:
            part = work.slices[action.slot.slice] if work.slices else work
            begun, waiting = HOLDING[action.kind]
            kept = part.weight_bytes[action.stage] if part.weight_bytes else 0
            held += begun * part.held_bytes[action.stage] + waiting * kept
            most = max(most, held)
    return most


def _buckets(size_bytes: int, bucket_bytes: int) -> int:
    """Return the number of buckets that gradients of so many bytes fill; the first one may be smaller."""
    first = min(FIRST_BUCKET_BYTES, bucket_bytes)
    return -(-size_bytes // first) if size_bytes <= first else 1 - (first - size_bytes) // bucket_bytes


class _StepCode:
    """Translates computes, messages and what happens once a step into steps of workers.

    groups: stages that share parameters, which meet.  in_order: whether messages between two stages are received in the
    order in which they are sent, so that the pair of stages is one channel; else every message is one.
    """

    def __init__(self, work: Work, groups: Sequence[tuple[int, ...]], *, in_order: bool) -> None:
        self._work, self._in_order = work, in_order
        self._wires = wires = _wires(work)
        self.meetings: list[Meeting] = []
        self._meetings: dict[tuple[str, int], int] = {}
        for group in groups:
            self._meetings |= {(SUM_TIED, stage): len(self.meetings) for stage in group}
            places = [place for place, (stages, _, _) in enumerate(work.tied) if stages[0] in group]
            more = work.tying_ns or (0,) * len(work.tied)
            sums = [(work.tied[at][0], _longer(wires.get((SUM_TIED, at), NO_WIRE), more[at])) for at in places]
            self.meetings.append(Meeting(group, sums))
        summing_ns = work.summing_ns or (0,) * len(work.reduce)
        for stage in range(len(work.fwd_ns)):
            self._meetings[SUM_REPLICAS, stage] = len(self.meetings)
            meeting = Meeting((stage,), [((stage,), wires.get((SUM_REPLICAS, stage), NO_WIRE))], over_replicas=True)
            if work.reduce:
                size, load = work.reduce[stage]
                meeting.first = min(1.0, min(FIRST_BUCKET_BYTES, work.bucket_bytes) / size) if size else 0.0
                meeting.last_ns = load.alone_ns(min(size, work.bucket_bytes))
                meeting.summing_ns = summing_ns[stage] + work.host.sum_ns * _buckets(size, work.bucket_bytes)
            self.meetings.append(meeting)
        self._channels: dict[tuple[int, int, Hashable], int] = {}
        self._times: list[dict[str, list[int]]] = []  # of the computes of each slice, by kind and stage
        for part in work.slices or (work,):
            weights = part.weight_ns or (0,) * len(part.bwd_ns)
            more = work.hidden_ns if work.hidden_ns and not work.slices else (0,) * len(part.bwd_ns)
            inputs = [whole - own + bare for whole, own, bare in zip(part.bwd_ns, weights, more, strict=True)]
            kinds = {"F": part.fwd_ns, "B": part.bwd_ns, "I": inputs, "W": weights}
            self._times.append({kind: [own + work.host.compute_ns for own in each] for kind, each in kinds.items()})

    def step(self, action: Action, *, leads: bool) -> WorkerStep:
        """Return the step of an action.  leads: as for `local`."""
        kind, peer = ACTIONS[action.kind], action.peer
        slot = action.micro, action.slot.slice
        if peer is not None and kind.role == SEND:
            return self.send((action.stage, peer, kind.way), slot, *slot)
        if peer is not None and kind.role == RECEIVE:
            return self.receive((peer, action.stage, kind.way), slot)
        return self.local(action.kind, action.stage, action.slot.slice, leads=leads)

    def local(self, kind: str, stage: int, piece: int = 0, *, leads: bool = True) -> WorkerStep:
        """Return the step of a compute (of a slice), or of what happens once a step.

        leads: whether the rank is the first replica, whose optimizer step stands for the gather of all replicas.
        """
        if ACTIONS[kind].role == COMPUTE:
            return WorkerStep(RUNS if kind == "F" else RUNS_BACK, self._times[piece][kind][stage])
        if kind == OPTIMIZER:
            taken = self._work.optimizer_ns[stage] if self._work.optimizer_ns else 0
            return WorkerStep(UPDATES, taken, self._wires.get((kind, stage), NO_WIRE) if leads else NO_WIRE)
        return WorkerStep(MEETS, self._meetings[kind, stage]) if kind in CHARGED else WorkerStep(RUNS, 0)

    def send(self, message: Message, slot: Hashable, micro: int, piece: int = 0) -> WorkerStep:
        """Return the step that sends a message.  slot: its micro-batch, and slice."""
        loads = len(self._work.messages[message][1]) if message in self._work.messages else 1
        wire = self._wires.get((*message, piece * loads + micro % loads), NO_WIRE)
        return WorkerStep(SENDS, self._channel(message, slot), wire)

    def receive(self, message: Message, slot: Hashable) -> WorkerStep:
        """Return the step that waits for a message."""
        return WorkerStep(RECEIVES, self._channel(message, slot))

    def _channel(self, message: Message, slot: Hashable) -> int:
        key = message[0], message[1], None if self._in_order else slot
        return self._channels.setdefault(key, len(self._channels))


def _longer(wire: Wire, more_ns: int) -> Wire:
    """Return how a sum travels if it also takes time from the cores that compute, which wait for it anyway."""
    return wire._replace(total_ns=wire.total_ns + more_ns) if wire.ways else wire


_Key = tuple[int, int, str, int] | tuple[str, int]
"""A message and the number of its wire; or the kind of what ends a step, and its stage or tied parameter."""


def _wires(work: Work) -> dict[_Key, Wire]:
    """Return how each message and each sum of gradients travels, if it takes time.

    O(loads): ports that are always busy together count as one (`merged`).
    """
    loads: list[tuple[_Key, int, PortLoad]] = []
    for message, (size, each) in work.messages.items():
        sizes = [part.sizes.get(message, 0) for part in work.slices] or [size]
        wires = product(sizes, each)  # of every slice, by micro-batch until they repeat
        loads += [((*message, number), *wire) for number, wire in enumerate(wires)]
    loads += [((SUM_REPLICAS, stage), *load) for stage, load in enumerate(work.reduce)]
    loads += [((OPTIMIZER, stage), *load) for stage, load in enumerate(work.gather)]
    loads += [((SUM_TIED, place), size, load) for place, (_, size, load) in enumerate(work.tied)]
    loads = [(key, size, load) for key, size, load in loads if size and load.kinds]
    different = tuple(dict.fromkeys(load for _, _, load in loads))
    ports = dict(zip(different, merged(different), strict=True))
    found = {}
    for key, size, load in loads:
        taken = load.busy_ns(size)
        ways = tuple([(port, taken[kind]) for port, kind in ports[load]])
        found[key] = Wire(load.latency_ns + max(taken.values()), ways)
    return found

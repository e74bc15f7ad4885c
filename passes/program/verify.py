"""The proof that a program runs: a walk over its one order.

Every rank plays its part of the order.  So if each action stands behind everything that it needs, then the first of all
unfinished actions has everything that it needs, and its ranks have nothing else left to do before it: it can run,
whatever the transport buffers or blocks.  By induction nothing waits for ever.

Both ends of a channel between two ranks read the messages off the same order (`Program.posts`): receives are posted in
the order of the sends, so that channels may be first-in first-out, one for each directed pair of ranks, and carry
messages of any stages on those ranks.  A compute waits for its own message (edge and slot), not for the next one.  One
in which ranks exchange parts of values (`ir.program.inside`) is an action of all of them, for which the induction holds
as for a sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from autopart.ir.actions import (
    ACTIONS,
    ALL,
    ALONE,
    COMPUTE,
    COMPUTES,
    FORWARD,
    IN_FLIGHT,
    OPTIMIZER,
    OWNERS,
    RECEIVE,
    REPLICAS,
    SEND,
    SENDS,
    TIED,
    UPDATE,
    Action,
    Slot,
    begins_step,
    completes,
    hands_on,
)
from autopart.ir.errors import ProgramError
from autopart.ir.program import Program
from autopart.passes.program.linearize import receivers, senders
from autopart.passes.program.orders import Shape, homes_of
from autopart.passes.program.schedules import find, most_held


def check_program(program: Program, schedule: str | None = None, *, backward: bool = True) -> Program:
    """Walk over the order and return the program, or raise ProgramError naming rank, stage and action.

    1. Every stage runs on ranks that exist; edges are single and point to later stages; actions name stages and
       micro-batches that exist, and messages have an edge.
    2. Every action stands behind all that it needs (`ir.actions.ACTIONS`): a backward behind its forward, the backward
       of weights behind that of inputs, a message behind the compute that makes it, a compute behind all messages to it
       and behind the actions that begin the step of its stage, an action that ends a step behind all backwards of the
       stages that meet in it.
    3. Every action stands in the order once: F and B, or F, I and W, of every stage and slot, every message, and the
       actions once a step (`Program.once_a_step`).  Stages that are forward only have no backward and no optimizer, and
       no gradient flows to them.
    4. The actions of stages that meet stand side by side.
    5. No action of a stage stands behind its optimizer.
    6. In asynchronous training the updates of a stage (U) stand in its order too: behind all backwards of their
       micro-batches, before the first backward of later ones, and before the forwards that use their weights
       (`ir.program.Streaming.version`).
    7. F done and B not yet: never more slots on a rank than the limit of the schedule, if it has one.
    With backward=False the program is forward only, and rule 7 does not apply.  O(actions).
    """
    _check_frame(program)
    walk = _Walk(program, schedule if backward else None, backward)
    for place, action in enumerate(program.order):
        problem = walk.step(action)
        if problem:
            what, why = problem
            raise ProgramError(what, where=_where(program, place), why=why)
    missing = next((action for action in _owed(program, backward) if not walk.is_over(action)), None) or walk.half_done
    if missing is not None:
        raise ProgramError(
            f"{missing} is missing",
            where=f"rank {program.stage_ranks[missing.stage][0]}, stage {missing.stage}",
            why="a whole step has every compute, message and sum once",
        )
    return program


def forward_program(program: Program) -> Program:
    """Make the forward half, for evaluation: same stages and ranks, nothing flows back or is summed.  O(actions)."""
    order = tuple(action for action in program.order if ACTIONS[action.kind].way == FORWARD)
    edges = tuple(replace(edge, grads=()) for edge in program.edges)
    return replace(program, order=order, edges=edges, tied=(), statistics=())


def _check_frame(program: Program) -> None:
    """Check rule 1 for stages, ranks and edges."""
    stages = len(program.stage_ranks)
    for stage, ranks in enumerate(program.stage_ranks):
        if not ranks or len(set(ranks)) < len(ranks) or min(ranks) < 0 or max(ranks) >= program.world:
            raise ProgramError(
                f"stage {stage} runs on ranks {list(ranks)}",
                why=f"it needs at least one, each once, of 0..{program.world - 1}",
            )
    divided = [(d.count, d.shards, len(program.stage_ranks[s])) for s in range(stages) for d in [program.division(s)]]
    if len({shards for _, shards, _ in divided}) > 1 or any(count * n != ranks for count, n, ranks in divided):
        why = "it is replicas x shards ranks, with as many shards on every stage"
        raise ProgramError(f"stages have (replicas, shards, ranks) {divided}", why=why)
    pairs = [(edge.src, edge.dst) for edge in program.edges]
    if len(set(pairs)) < len(pairs) or any(not 0 <= src < dst < stages for src, dst in pairs):
        raise ProgramError("edges must be single and point to a later stage", where=str(pairs))
    if not set(program.forward_only).isdisjoint(edge.src for edge in program.edges if edge.grads):
        raise ProgramError("gradients flow back to a stage without a backward", where=str(program.forward_only))
    for name, users in program.tied:
        if len(set(users)) < max(2, len(users)) or min(users) < 0 or max(users) >= stages:
            raise ProgramError(f"parameter {name} is tied over stages {list(users)}", why="it needs two stages or more")


def _where(program: Program, place: int) -> str:
    """Return the rank and stage of an action, and the actions of its rank before and after it."""
    action = program.order[place]
    if not 0 <= action.stage < len(program.stage_ranks):
        return f"action {place} of the order"
    rank = program.stage_ranks[action.stage][0]
    mine = {stage for stage, ranks in enumerate(program.stage_ranks) if rank in ranks}
    before = [str(a) for a in program.order[:place] if not mine.isdisjoint((a.stage, a.peer))]
    after = [str(a) for a in program.order[place + 1 :] if not mine.isdisjoint((a.stage, a.peer))]
    around = " ".join([*before[-5:], f"[{action}]", *after[:5]])
    return f"rank {rank}, stage {action.stage}, action {place}: {around}"


def _owed(program: Program, backward: bool) -> Iterator[Action]:
    """Yield every action of a complete program; computes as wholes."""
    stages = range(len(program.stage_ranks))
    for way, name in COMPUTES.items():
        if way == FORWARD or backward:
            for stage in stages if way == FORWARD else sorted({*stages}.difference(program.forward_only)):
                for micro, piece in product(range(program.micros), range(program.slices)):
                    yield Action(name, Slot(stage, micro, piece))
    for piece in range(program.slices):
        for (way, source), peers in receivers(program.edges, piece).items():
            if way == FORWARD or backward:
                for micro in range(program.micros):
                    yield from (Action(SENDS[way], Slot(source, micro, piece), peer) for peer in peers)
    for stage, every in enumerate(program.updates):
        yield from (program.updating(stage, micro) for micro in range(0, program.micros, every))
    yield from program.once_a_step(backward=backward)


Key = tuple[str, int, int, int, int | None]
"""Kind, stage, micro-batch, slice and peer."""
Problem = tuple[str, str]
"""(problem, reason)."""

_REST = {kind.needs: name for name, kind in ACTIONS.items() if kind.part_of and kind.frees}
"""By the first part of a compute, the part that has to follow."""

NO_GROUP = {
    TIED: "stage {} shares no trainable parameter",
    REPLICAS: "stage {} has no replicas",
    OWNERS: "the replicas of stage {} do not share the optimizer's state",
    ALL: "there is one rank, which meets nobody",
    ALONE: "stage {} has no optimizer step, since it is forward only",
}
"""Why a stage does not take part in an action, by who meets in it."""


class _Walk:
    """The state at one place of the order.

    over: finished actions; a whole compute counts as finished here when its messages may follow.  computed: by whole
    compute and stage, the number of slots for which all of it is finished.  halves: parts of computes that have to
    follow.  live: slots in flight, by stage and, where micro-batches are whole on one replica, by replica.  ended:
    stages whose optimizer has stepped.  meeting: the actions that still have to follow in a meeting.  to_begin: by
    stage, the actions that its computes wait for.
    """

    def __init__(self, program: Program, schedule: str | None, backward: bool) -> None:
        self._program, self._backward = program, backward
        self._schedule = find(schedule) if schedule is not None else None
        stages = range(len(program.stage_ranks))
        in_turn = tuple(program.division(stage).period for stage in stages)
        self._shape = Shape(len(stages), program.micros, program.slices, in_turn, homes_of(program.stage_ranks))
        self._over: set[Key] = set()
        self._computed: dict[tuple[str, int], int] = {}
        self._halves: dict[Key, None] = {}
        self._live: dict[tuple[int, int | None], int] = {}
        self._units = "micro-batches" if program.slices == 1 else "slices"
        self._ended: set[int] = set()
        self._meeting: set[Action] = set()
        self._played = {COMPUTE: self._compute, SEND: self._send, UPDATE: self._update}
        once = [(name, kind) for name, kind in ACTIONS.items() if not kind.is_per_slot]
        groups = {name: program.groups(kind.meets) for name, kind in once}
        self._groups = {(name, stage): group for name, found in groups.items() for group in found for stage in group}
        self._to_begin = {
            s: {name for name, _ in once if begins_step(name) and (name, s) in self._groups} for s in stages
        }
        self._peers = [receivers(program.edges, piece) for piece in range(program.slices)]
        self._sources = [senders(program.edges, piece) for piece in range(program.slices)]

    def is_over(self, action: Action) -> bool:
        """Return whether an action has been played."""
        return (action.kind, action.stage, action.micro, action.slot.slice, action.peer) in self._over

    @property
    def half_done(self) -> Action | None:
        """The first missing part of a split backward, None if there is none."""
        key = next(iter(self._halves), None)
        return None if key is None else Action(key[0], Slot(*key[1:4]))

    def step(self, action: Action) -> Problem | None:
        """Play one action; return what is wrong with it, or None."""
        kind = ACTIONS.get(action.kind)
        slot = action.slot
        key = action.kind, slot.stage, slot.micro, slot.slice, action.peer
        if kind is None or kind.role == RECEIVE:
            return f"{action.kind!r} is not an action of an order", "a receive is derived from its send"
        problem = self._misplaced(action)
        if problem is None and (key in self._over or (hands_on(action.kind), *slot, None) in self._over):
            problem = f"{action} stands twice", "everything happens once in a step"
        if problem is None:
            problem = self._played.get(kind.role, self._end)(action)
        self._over.add(key)
        return problem

    def _misplaced(self, action: Action) -> Problem | None:
        """Check rules 1 and 5, and rule 4 for actions between the sums of a group."""
        slot, kind = action.slot, ACTIONS[action.kind]
        if not 0 <= slot.stage < len(self._program.stage_ranks):
            return f"{action}: there is no stage {slot.stage}", ""
        if kind.is_per_slot and not 0 <= slot.micro < self._program.micros:
            return f"{action}: there is no micro-batch {slot.micro}", f"there are {self._program.micros}"
        if (slot.micro >= 0) != kind.is_per_slot or (slot.slice and not kind.is_per_slot):
            return f"{action}: there is no {slot}", "only computes and messages have a micro-batch and a slice"
        if not 0 <= slot.slice < self._program.slices:
            why = f"each micro-batch has {self._program.slices}" if self._program.slices > 1 else "none has slices"
            return f"{action}: there is no {slot}", why
        if kind.is_message != (action.peer is not None):
            return f"{action}: messages have a peer, other actions have none", ""
        if not self._backward and kind.way != FORWARD:
            return f"{action} stands in a forward program", ""
        if slot.stage in self._program.forward_only and kind.role == COMPUTE and kind.way != FORWARD:
            return f"{action}: stage {slot.stage} has no backward", "nothing learns there, or before it"
        if slot.stage in self._ended:
            return f"{action} stands behind the optimizer of its stage", ""
        if self._meeting and action not in self._meeting:
            waiting = ", ".join(sorted(map(str, self._meeting)))
            return f"{action} stands between sums that meet", f"{waiting} have to follow first"
        return None

    def _compute(self, action: Action) -> Problem | None:
        kind, stage, micro, piece = ACTIONS[action.kind], action.stage, action.micro, action.slot.slice
        if kind.needs and (kind.needs, stage, micro, piece, None) not in self._over:
            return f"{action} runs before its {ACTIONS[kind.needs].label}", ""
        whole = hands_on(action.kind)
        neighbour = piece - 1 if kind.way == FORWARD else piece + 1
        behind = whole and 0 <= neighbour < self._program.slices
        if behind and (whole, stage, micro, neighbour, None) not in self._over:
            return f"{action} runs before slice {neighbour}", f"its {kind.label} needs what that one leaves behind"
        if self._to_begin[stage]:
            begin = min(self._to_begin[stage])
            return f"{action} runs before {stage}{begin}", f"{ACTIONS[begin].label} begins the step"
        for source in self._sources[piece].get((kind.way, stage), ()):
            if (SENDS[kind.way], source, micro, piece, stage) not in self._over:
                return f"{action} runs before it can have received from stage {source}", ""
        if (problem := self._overtakes(action)) is not None:
            return problem
        self._finish(action, whole)
        where = stage, self._program.division(stage).player(micro)
        live = self._live[where] = self._live.get(where, 0) + IN_FLIGHT[action.kind]
        if self._schedule is None or stage in self._program.forward_only:
            return None
        allowed = most_held(self._schedule, stage, self._shape)
        if allowed is None or live <= allowed:
            return None
        return (
            f"{action} puts {live} {self._units} in flight on stage {stage}",
            f"schedule {self._schedule.name} allows {allowed}",
        )

    def _finish(self, action: Action, whole: str) -> None:
        """Note that a compute, or a part of one, is over.  whole: what its messages need."""
        slot = action.slot
        if whole:
            self._over.add((whole, *slot, None))
        if finished := completes(action.kind):
            self._computed[finished, slot.stage] = self._computed.get((finished, slot.stage), 0) + 1
            self._halves.pop((action.kind, *slot, None), None)
        else:
            self._halves[_REST[action.kind], *slot, None] = None

    def _send(self, action: Action) -> Problem | None:
        kind, stage = ACTIONS[action.kind], action.stage
        if action.peer not in self._peers[action.slot.slice].get((kind.way, stage), ()):
            return f"{action} sends what no edge carries", ""
        if (kind.needs, stage, action.micro, action.slot.slice, None) not in self._over:
            return f"{action} sends what is not computed yet", ""
        return None

    def _overtakes(self, action: Action) -> Problem | None:
        """Check rule 6 for a compute: a forward finds its weights, and a backward adds to the gradients of its own
        update."""
        program, stage, rhythm = self._program, action.stage, self._program.rhythm
        if rhythm is None:
            return None
        every, forward = rhythm.updates[stage], ACTIONS[action.kind].way == FORWARD
        first = action.micro // every * every
        if forward:
            first = rhythm.version(stage, action.micro // rhythm.micros) * every
        if not first or self.is_over(before := program.updating(stage, first - 1)):
            return None
        why = "it uses the weights that this one makes" if forward else "its gradients would be added to an earlier one"
        return f"{action} runs before {before}", why

    def _update(self, action: Action) -> Problem | None:
        stage, micro = action.stage, action.micro
        if not self._program.updates or self._program.updating(stage, micro) != action:
            return f"{action} is not an update of stage {stage}", ""
        done, owed = self._computed.get((ACTIONS[action.kind].needs, stage), 0), (micro + 1) * self._program.slices
        if done < owed:
            return f"{action} stands before the last backward", f"stage {stage} has done {done} of {owed} {self._units}"
        return None

    def _end(self, action: Action) -> Problem | None:
        """Play an action that happens once a step: a collective or the optimizer."""
        stage, kind = action.stage, ACTIONS[action.kind]
        group = self._groups.get((action.kind, stage))
        if group is None:
            return f"{action}: {NO_GROUP[kind.meets].format(stage)}", ""
        if kind.meets == ALL and stage != group[0]:
            return f"{action}: all ranks meet in {group[0]}{action.kind}", ""
        if not self._ended.isdisjoint(group):
            return f"{action} stands behind the optimizer of a stage that it needs", ""
        if kind.meets != ALL:
            others = {Action(action.kind, Slot(other)) for other in group}
            self._meeting = (self._meeting or others) - {action}
        if begins_step(action.kind):
            for member in group:
                self._to_begin[member].discard(action.kind)
        needed = kind.needs if self._backward or not kind.needs else COMPUTES[FORWARD]
        for member in group if needed else ():
            last = COMPUTES[FORWARD] if member in self._program.forward_only else needed
            done, owed = self._computed.get((last, member), 0), self._program.micros * self._program.slices
            if done < owed:
                why = f"stage {member} has done {done} of {owed} {self._units}"
                return f"{action} stands before the last {ACTIONS[last].label}", why
        if action.kind == OPTIMIZER:
            self._ended.add(stage)
        return None

"""The proof that a program runs: play all ranks at once and watch every rule.

Sends are buffered and never wait; a receive waits for the next message of its channel.  So which rank plays first
changes nothing: if one order of play ends, all do, and if one is stuck, all are (a Kahn network).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from autopart.ir.errors import ProgramError
from autopart.ir.plan import in_flight
from autopart.ir.program import KINDS, Action, Program


def check_program(program: Program, schedule: str, *, backward: bool = True) -> Program:
    """Play the program and return it, or raise ProgramError naming rank, stage and action.

    1. A stage runs on its own rank alone; actions name micro-batches and stages that exist.
    2. Every stage does F and B once per micro-batch, F first; every F has all its RF before, every B all its RB.
    3. Every edge carries its message once per micro-batch: sent after the compute that makes it, received in the
       order it was sent; nothing is sent that no edge carries, and no message is left over.
    4. No receive waits for ever.
    5. F done and B not yet: never more than `plan.in_flight` micro-batches.
    6. T is the last action of each stage that shares a trainable parameter, and of no other.
    With backward=False the program is forward only: no B, RB, SB or T, and rule 5 does not apply.
    O(actions + edges * micros).
    """
    _check_frame(program)
    play = _Play(program, schedule, backward)
    ready = deque(range(len(program.ranks)))
    while ready:
        rank = ready.popleft()
        actions = program.ranks[rank]
        while play.done[rank] < len(actions):
            action = actions[play.done[rank]]
            try:
                woken = play.step(action)
            except ProgramError as error:
                raise ProgramError(error.what, where=_where(program, rank, play.done[rank]), why=error.why) from None
            if woken is None:
                break
            play.done[rank] += 1
            ready.extend(woken)
    _check_stuck(program, play.done)
    play.finish()
    return program


def forward_program(program: Program) -> Program:
    """The forward half (F, SF, RF) for evaluation: same stages and channels, nothing flows back.  O(actions)."""
    ranks = tuple(tuple(a for a in actions if a.kind in ("F", "SF", "RF")) for actions in program.ranks)
    edges = tuple(replace(edge, grads=()) for edge in program.edges)
    return replace(program, ranks=ranks, edges=edges, tied=())


def _check_frame(program: Program) -> None:
    """Rule 1, and edges that point to later stages."""
    stages = len(program.stage_ranks)
    if len(set(program.stage_ranks)) != stages or not set(program.stage_ranks) <= set(range(len(program.ranks))):
        raise ProgramError(f"stage_ranks {program.stage_ranks} are not ranks of their own in 0..{len(program.ranks)}")
    pairs = [(edge.src, edge.dst) for edge in program.edges]
    if len(set(pairs)) < len(pairs) or any(not 0 <= src < dst < stages for src, dst in pairs):
        raise ProgramError("edges must be single and point to a later stage", where=str(pairs))
    for rank, actions in enumerate(program.ranks):
        for place, action in enumerate(actions):
            problem = ""
            if action.kind not in KINDS:
                problem = f"unknown kind {action.kind!r}"
            elif not 0 <= action.stage < stages or program.stage_ranks[action.stage] != rank:
                problem = f"rank {rank} does not run stage {action.stage}"
            elif not (action.micro == -1 if action.kind == "T" else 0 <= action.micro < program.micros):
                problem = f"there is no micro-batch {action.micro}"
            elif (len(action.kind) == 2) != (action.peer is not None):
                problem = "messages have a peer, other actions have none"
            if problem:
                raise ProgramError(f"action {action}: {problem}", where=_where(program, rank, place))


def _where(program: Program, rank: int, place: int) -> str:
    actions = program.ranks[rank]
    around = " ".join(f"[{a}]" if i == place else str(a) for i, a in enumerate(actions) if abs(i - place) <= 5)
    return f"rank {rank}, stage {actions[place].stage}, action {place}: {around}"


def _check_stuck(program: Program, done: list[int]) -> None:
    """Rule 4: name the ranks that wait, each for the next, until one that waits already or has ended."""
    stuck = [rank for rank, actions in enumerate(program.ranks) if done[rank] < len(actions)]
    if not stuck:
        return
    rank, chain, seen = stuck[0], [], set[int]()
    while rank not in seen and done[rank] < len(program.ranks[rank]):
        seen.add(rank)
        action = program.ranks[rank][done[rank]]
        peer = program.stage_ranks[action.peer or 0]
        chain.append(f"rank {rank} waits at {action} for rank {peer}")
        rank = peer
    chain.append(f"rank {rank} waits already" if rank in seen else f"rank {rank} has ended")
    raise ProgramError(
        f"the program deadlocks at {program.ranks[stuck[0]][done[stuck[0]]]}",
        where=_where(program, stuck[0], done[stuck[0]]),
        why="; ".join(chain),
    )


@dataclass(slots=True)
class _Play:
    """State of the play.  done[r]: actions of rank r that are over.

    computed: (F or B, stage, micro) done.  sent, received: messages (kind of the send, source stage, destination
    stage, micro).  channels: messages under way on each directed pair of stages.  live: micro-batches in flight.
    """

    program: Program
    schedule: str
    backward: bool
    done: list[int] = field(init=False)
    sources: dict[tuple[str, int], list[int]] = field(init=False)
    computed: set[tuple[str, int, int]] = field(default_factory=set)
    sent: set[tuple[str, int, int, int]] = field(default_factory=set)
    received: set[tuple[str, int, int, int]] = field(default_factory=set)
    channels: dict[tuple[int, int], deque[tuple[str, int]]] = field(default_factory=dict)
    live: dict[int, int] = field(default_factory=dict)
    summed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.done = [0] * len(self.program.ranks)
        self.sources = {}  # (F or B, stage): stages whose messages it needs
        for edge in self.program.edges:
            self.sources.setdefault(("F", edge.dst), []).append(edge.src)
            if edge.grads and self.backward:
                self.sources.setdefault(("B", edge.src), []).append(edge.dst)

    def step(self, action: Action) -> tuple[int, ...] | None:
        """Do one action: ranks that it may wake, or None when it has to wait."""
        if action.stage in self.summed:
            raise ProgramError(f"{action} stands behind T of its stage")
        if not self.backward and action.kind not in ("F", "SF", "RF"):
            raise ProgramError(f"{action} stands in a forward program")
        if action.kind == "T":
            return self._sum(action)
        if action.peer is None:
            return self._compute(action)
        return self._send(action) if action.kind[0] == "S" else self._receive(action)

    def _compute(self, action: Action) -> tuple[int, ...]:
        kind, stage, micro = action.kind, action.stage, action.micro
        if (kind, stage, micro) in self.computed:
            raise ProgramError(f"{action} runs twice")
        if kind == "B" and ("F", stage, micro) not in self.computed:
            raise ProgramError(f"{action} runs before its forward")
        for source in self.sources.get((kind, stage), ()):
            if (f"S{kind}", source, stage, micro) not in self.received:
                raise ProgramError(f"{action} runs before it has received from stage {source}")
        self.computed.add((kind, stage, micro))
        if self.backward:
            self.live[stage] = self.live.get(stage, 0) + (1 if kind == "F" else -1)
            limit = in_flight(self.schedule, stage, len(self.program.stage_ranks), self.program.micros)
            if self.live[stage] > limit:
                raise ProgramError(
                    f"{action} puts {self.live[stage]} micro-batches in flight on stage {stage}",
                    why=f"schedule {self.schedule} allows {limit}",
                )
        return ()

    def _send(self, action: Action) -> tuple[int, ...]:
        peer = action.peer if action.peer is not None else -1
        message = (action.kind, action.stage, peer, action.micro)
        if action.stage not in self.sources.get((action.kind[1], peer), ()):
            raise ProgramError(f"{action} sends what no edge carries")
        if message in self.sent:
            raise ProgramError(f"{action} sends twice")
        if (action.kind[1], action.stage, action.micro) not in self.computed:
            raise ProgramError(f"{action} sends what is not computed yet")
        self.sent.add(message)
        self.channels.setdefault((action.stage, peer), deque()).append((action.kind, action.micro))
        return (self.program.stage_ranks[peer],)

    def _receive(self, action: Action) -> tuple[int, ...] | None:
        peer = action.peer if action.peer is not None else -1
        kind = f"S{action.kind[1]}"
        message = (kind, peer, action.stage, action.micro)
        if peer not in self.sources.get((action.kind[1], action.stage), ()):
            raise ProgramError(f"{action} receives what no edge carries")
        if message in self.received:
            raise ProgramError(f"{action} receives twice")
        channel = self.channels.get((peer, action.stage))
        if not channel:
            return None
        if channel[0] != (kind, action.micro):
            other = Action(channel[0][0], peer, channel[0][1], action.stage)
            raise ProgramError(f"{action} meets {other}, which comes first on that channel")
        channel.popleft()
        self.received.add(message)
        return ()

    def _sum(self, action: Action) -> tuple[int, ...]:
        if not any(action.stage in stages for _, stages in self.program.tied):
            raise ProgramError(f"{action}: stage {action.stage} shares no trainable parameter")
        self.summed.add(action.stage)
        return ()

    def finish(self) -> None:
        """What must have happened once all ranks have ended: all computes, all messages, all sums.

        No message can be left over then: every F and B has run, and none runs before all its messages were received.
        """
        ranks = self.program.stage_ranks
        for action in self._owed():
            kind, peer = action.kind, action.peer
            if peer is None and kind != "T" and (kind, action.stage, action.micro) not in self.computed:
                raise ProgramError(f"{action} never runs", where=f"rank {ranks[action.stage]}")
            if peer is not None and (kind, action.stage, peer, action.micro) not in self.sent:
                raise ProgramError(f"{action} is missing", where=f"rank {ranks[action.stage]}")
            if kind == "T" and action.stage not in self.summed:
                raise ProgramError(f"{action} is missing", where=f"rank {ranks[action.stage]}")

    def _owed(self) -> Iterator[Action]:
        """Every F, B, send and T of a complete program."""
        for micro in range(self.program.micros):
            for stage in range(len(self.program.stage_ranks)):
                yield from (Action(kind, stage, micro) for kind in ("FB" if self.backward else "F"))
            for (kind, stage), sources in self.sources.items():
                yield from (Action(f"S{kind}", source, micro, stage) for source in sources)
        if self.backward:
            yield from (Action("T", stage) for stage in sorted({s for _, stages in self.program.tied for s in stages}))

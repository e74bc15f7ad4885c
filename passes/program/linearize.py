"""Lowering: the orders of all workers become one order in which every action stands behind those that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from autopart.ir.actions import ACTIONS, BACKWARD, COMPUTE, COMPUTES, FORWARD, SENDS, Action, Slot, hands_on
from autopart.ir.errors import ProgramError
from autopart.ir.program import MESSAGES_AHEAD, Edge, Program
from autopart.passes.program.orders import Turn

DURATION = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Virtual time of a compute: a backward is about two forwards, and each of its parts one."""


def receivers(links: Sequence[Edge], slice: int = 0) -> dict[tuple[str, int], list[int]]:
    """Return by (way, stage) the stages that it sends to, ascending: later ones forward, earlier ones backward.

    slice: all slices but the first are alike.
    """
    found: dict[tuple[str, int], list[int]] = {}
    for edge in links:
        if not slice or edge.names(FORWARD, slice):
            found.setdefault((FORWARD, edge.src), []).append(edge.dst)
        if edge.names(BACKWARD, slice):
            found.setdefault((BACKWARD, edge.dst), []).append(edge.src)
    return {key: sorted(stages) for key, stages in found.items()}


def senders(links: Sequence[Edge], slice: int = 0) -> dict[tuple[str, int], list[int]]:
    """Return by (way, stage) the stages that it receives from, ascending; slice: as for `receivers`."""
    found: dict[tuple[str, int], list[int]] = {}
    for (way, source), peers in sorted(receivers(links, slice).items()):
        for peer in peers:
            found.setdefault((way, peer), []).append(source)
    return found


def linear_order(schedule: str, orders: Sequence[Sequence[Turn]], program: Program) -> list[Action]:
    """Return all computes, each with its messages right behind it, in the order in which they could start.

    The workers run side by side in virtual time (`DURATION`; messages take none); of those that can start at the same
    time, the one with the lowest rank comes first (list scheduling).  Any order would be right that keeps the order of
    each worker and has every compute behind those that it needs; this one also keeps messages in the order in which
    they are made.  A stage without a backward, which nothing holds up, keeps pace with its readers, at most
    `MESSAGES_AHEAD` slots ahead where that is possible: its messages are posted, and need memory there, by this order.
    schedule: its name, for errors.  program: without an order.  Raises ProgramError for workers that do
    not fit the ranks, and for orders that can never end.  O(computes * log workers).
    """
    _check_workers(schedule, orders, program)
    slices, merge = program.slices, _Merge(orders, program)
    units = [divmod(unit, slices) for unit in range(program.micros * slices)]
    slots = [[Slot(stage, micro, piece) for micro, piece in units] for stage in range(len(program.stage_ranks))]
    sends = [
        {key: [(SENDS[key[0]], peer) for peer in peers] for key, peers in receivers(program.edges, piece).items()}
        for piece in range(slices)
    ]
    order: list[Action] = []
    for kind, stage, unit in merge.run():
        slot = slots[stage][unit]
        order.append(Action(kind, slot))
        for send, peer in sends[slot.slice].get((ACTIONS[kind].way, stage), ()):
            order.append(Action(send, slot, peer))
    merge.check_ended(schedule)
    return order


def _check_workers(schedule: str, orders: Sequence[Sequence[Turn]], program: Program) -> None:
    """Check that each stage has one worker (or one for each replica in turn), and that ranks do not mix workers."""
    home: dict[tuple[int, int], int] = {}
    serves: dict[int, int] = {}
    stage_ranks, slices = program.stage_ranks, program.slices
    replicas = [program.division(stage).period for stage in range(len(stage_ranks))]
    for worker, own in enumerate(orders):
        pairs = sorted({(stage, unit // slices % replicas[stage]) for _, stage, unit in own})
        first = pairs[0][0] if pairs else 0
        for stage, place in pairs:
            if home.setdefault((stage, place), worker) != worker:
                workers = f"{home[stage, place]} and {worker}"
                raise ProgramError(f"schedule {schedule} runs stage {stage} on workers {workers}")
            if set(stage_ranks[stage]) != set(stage_ranks[first]):
                raise ProgramError(
                    f"schedule {schedule} runs stages {first} and {stage} on one worker",
                    why=f"the plan has them on ranks {stage_ranks[first]} and {stage_ranks[stage]}",
                    fix="use a schedule with one worker for each stage",
                )
            for rank in stage_ranks[stage] if replicas[stage] == 1 else stage_ranks[stage][place : place + 1]:
                if serves.setdefault(rank, worker) != worker:
                    raise ProgramError(
                        f"schedule {schedule} has stage {stage} on worker {worker}",
                        why=f"the plan has it on rank {rank}, beside stages of worker {serves[rank]}",
                        fix="use a schedule that orders all stages of a rank as one worker",
                    )


class _Merge:
    """Workers that run their computes in virtual time.

    at: number of finished computes of each worker.  ended: when each compute ended.  waiting: by compute, the workers
    that wait for it.  paced: of workers that wait only to keep pace, the compute that they wait for.
    """

    def __init__(self, orders: Sequence[Sequence[Turn]], program: Program) -> None:
        stage_ranks, slices = program.stage_ranks, program.slices
        self._orders = orders
        self._first_rank = [min((stage_ranks[stage][0] for _, stage, _ in turns), default=0) for turns in orders]
        self._at = [0] * len(orders)
        self._clock = [0] * len(orders)
        self._ended: dict[Turn, int] = {}
        self._waiting: dict[Turn, list[int]] = {}
        self._slices = slices
        self._needs = [_needs(program.edges, len(stage_ranks), piece) for piece in range(slices)]
        self._ready: list[tuple[int, int, int]] = []
        self._paced: dict[int, Turn] = {}
        to = receivers(program.edges)
        self._readers = {stage: to.get((FORWARD, stage), []) for stage in program.forward_only}

    def run(self) -> list[Turn]:
        """Return the computes in order of their start; fewer than all if some can never start."""
        done: list[Turn] = []
        for worker in range(len(self._orders)):
            self._consider(worker)
        while self._ready or self._paced:
            if not self._ready:  # all wait, and some only to keep pace: the first of them need not
                waiting = min(self._paced, key=self._first_rank.__getitem__)
                self._waiting[self._paced.pop(waiting)].remove(waiting)
                self._consider(waiting, paced=False)
                continue
            start, _, worker = heappop(self._ready)
            turn = self._orders[worker][self._at[worker]]
            end = start + DURATION[turn[0]]
            done.append(turn)
            self._at[worker] += 1
            self._clock[worker] = end
            for over in dict.fromkeys((turn, _handed_on(turn))):
                self._ended[over] = end
                for waiter in self._waiting.pop(over, ()):
                    self._consider(waiter)
            self._consider(worker)
        return done

    def _consider(self, worker: int, *, paced: bool = True) -> None:
        """Queue the next compute of a worker, or add the worker to those that wait for a compute that it needs.

        paced: whether it waits to keep pace, too.
        """
        self._paced.pop(worker, None)
        if self._at[worker] == len(self._orders[worker]):
            return
        kind, stage, unit = self._orders[worker][self._at[worker]]
        start = self._clock[worker]
        for needed_kind, needed_stage in self._needs[unit % self._slices][kind, stage]:
            need = needed_kind, needed_stage, unit
            end = self._ended.get(need)
            if end is None:
                self._waiting.setdefault(need, []).append(worker)
                return
            start = max(start, end)
        for reader in self._readers.get(stage, ()) if paced and unit >= MESSAGES_AHEAD else ():
            need = COMPUTES[FORWARD], reader, unit - MESSAGES_AHEAD
            if need not in self._ended:
                self._waiting.setdefault(need, []).append(worker)
                self._paced[worker] = need
                return
            start = max(start, self._ended[need])
        heappush(self._ready, (start, self._first_rank[worker], worker))

    def check_ended(self, schedule: str) -> None:
        """Raise ProgramError if a compute waits for ever, with the chain of computes that it waits for."""
        blocked = {worker: need for need, workers in self._waiting.items() for worker in workers}
        if not blocked:
            return
        left = [(worker, turn) for worker, turns in enumerate(self._orders) for turn in turns[self._at[worker] :]]
        home = {over: worker for worker, turn in left for over in (turn, _handed_on(turn))}
        first = worker = min(blocked)
        chain: list[str] = []
        seen: set[int] = set()
        while worker not in seen:
            seen.add(worker)
            need = blocked[worker]
            chain.append(f"worker {worker} waits at {self._text(self._front(worker))} for {self._text(need)}")
            if need not in home:
                chain.append(f"no worker runs {self._text(need)}")
                break
            worker = home[need]
            if worker in seen:
                chain.append(f"worker {worker} runs it later")
        waits = f"{self._text(self._front(first))} waits for ever for {self._text(blocked[first])}"
        at, turns = self._at[first], self._orders[first]
        near = range(max(0, at - 5), min(len(turns), at + 6))
        around = " ".join(f"[{self._text(turns[i])}]" if i == at else self._text(turns[i]) for i in near)
        raise ProgramError(
            f"schedule {schedule} can never end: {waits}",
            where=f"worker {first}: {around}",
            why="; ".join(chain),
            fix="order the computes so that each comes after what it needs",
        )

    def _front(self, worker: int) -> Turn:
        return self._orders[worker][self._at[worker]]

    def _text(self, turn: Turn) -> str:
        kind, stage, unit = turn
        return str(Action(kind, Slot(stage, *divmod(unit, self._slices))))


def _handed_on(turn: Turn) -> Turn:
    """Return the whole compute whose messages may follow this one; the compute itself if none may."""
    return (hands_on(turn[0]) or turn[0]), *turn[1:]


def _needs(links: Sequence[Edge], stages: int, slice: int) -> dict[tuple[str, int], list[tuple[str, int]]]:
    """Return by (kind, stage) of a compute the (kind, stage) of those that it needs on the same slot."""
    found: dict[tuple[str, int], list[tuple[str, int]]] = {}
    sources = senders(links, slice)
    for name, kind in ACTIONS.items():
        for stage in range(stages) if kind.role == COMPUTE else ():
            own = [(kind.needs, stage)] if kind.needs else []
            found[name, stage] = own + [(COMPUTES[kind.way], source) for source in sources.get((kind.way, stage), ())]
    return found

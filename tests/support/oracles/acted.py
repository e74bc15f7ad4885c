"""Ranks that act out a program over a transport in memory, and say when they hang or mix something up.

Every rank plays its part in order, over Gloo as the runtime uses it: one first-in first-out channel for each directed
pair of ranks, of which the receiver posts its receives in the order of `Program.posts`; what is sent is taken by the
receive that was posted next, whatever it waits for.  Sends do not block, a receive waits where the part says so, and in
a sum all ranks meet.  What a compute needs is looked up in what its rank has received and done, by the edges of the
program alone: the order, which the verifier reads, is not consulted.

In asynchronous training each rank counts the updates of its stages, and keeps which micro-batches its gradients are of.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from autopart.ir.actions import ALL, TIED, Action, Slot
from autopart.ir.errors import ProgramError
from autopart.ir.program import Program
from autopart.passes.program.schedules import find

BACK = ("B", "W")
BACKWARDS = ("B", "I", "W")


def acted(program: Program, schedule: str) -> str:
    """Return what goes wrong, "" if nothing does."""
    try:
        return _Play(program, schedule).run()
    except (IndexError, KeyError, ValueError, ProgramError) as error:
        return f"no such action: {error!r}"


class _Play:
    def __init__(self, program: Program, schedule: str) -> None:
        self.program, self.limit = program, find(schedule).limit
        self.stages, self.micros = len(program.stage_ranks), program.micros
        for action in program.order:
            micros = range(self.micros) if action.is_a.is_per_slot else [-1]
            if not 0 <= action.stage < self.stages or action.micro not in micros or action.slot.slice:
                raise ValueError(str(action))
            if action.is_a.is_message and action.is_a.role == "receive":
                raise ValueError(str(action))
        self.parts = program.parts(range(program.world))
        self.at = [0] * program.world
        self.done: list[Counter[Action]] = [Counter() for _ in range(program.world)]
        self.sent: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
        self.taken: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        pairs = {pair for edge in program.edges for pair in program.channels(edge.src, edge.dst)}
        pairs |= {(dst, src) for src, dst in pairs}
        self.posted = {pair: list(program.posts(*pair)) for pair in pairs if pair[0] != pair[1]}
        self.handed: Counter[tuple[int, Action]] = Counter()
        self.gradients: defaultdict[tuple[int, int], Counter[int]] = defaultdict(Counter)
        self.updated: Counter[tuple[int, int]] = Counter()
        self.problem = ""

    def run(self) -> str:
        moved = True
        while moved and not self.problem:
            moved = False
            for rank in range(self.program.world):
                while self.at[rank] < len(self.parts[rank]) and not self.problem and self.step(rank):
                    moved = True
        if self.problem:
            return self.problem
        stuck = [rank for rank in range(self.program.world) if self.at[rank] < len(self.parts[rank])]
        if stuck:
            return f"rank {stuck[0]} hangs at {self.parts[stuck[0]][self.at[stuck[0]]]}"
        return self.left_out() or self.apart()

    def step(self, rank: int) -> bool:
        action = self.parts[rank][self.at[rank]]
        role = action.is_a.role
        if role in ("collective", "update"):
            return self.meet(action)
        together = self.together(rank, action) if role == "compute" else (rank,)
        return all(self.front(other) == action for other in together) and all(
            self.passes(other, action) for other in together
        )

    def together(self, rank: int, action: Action) -> tuple[int, ...]:
        """The ranks that exchange parts of values inside of a compute of a rank: its neighbours in the stage."""
        ranks, count = self.ranks(action.stage), self.program.division(action.stage).shards
        first = ranks.index(rank) // count * count
        return ranks[first : first + count]

    def passes(self, rank: int, action: Action) -> bool:
        """Let a rank do what it need not meet all others for; return whether it could."""
        role = action.is_a.role
        if role == "receive":
            places = self.places(rank, action.other_end)
            if places is None:
                return False
            for pair, place in places:
                self.taken[pair].add(place)
                if self.sent[pair][place] != self.posted[pair][place]:
                    self.problem = f"{action} gets {self.sent[pair][place]}"
        else:
            self.problem = self.wrong(rank, action)
        if role == "send":
            self.send(rank, action)
        if action.kind in BACKWARDS and self.program.rhythm is not None:
            self.gradients[rank, action.stage].update([action.micro] * (2 if action.kind == "B" else 1))
        self.done[rank][action] += 1
        self.at[rank] += 1
        return True

    def send(self, rank: int, action: Action) -> None:
        for part in self.program.transfers(action):
            if part.src_rank == part.dst_rank == rank:
                self.handed[rank, action] += 1
            elif part.src_rank == rank:
                self.sent[rank, part.dst_rank].append(action)

    def places(self, rank: int, send: Action) -> list[tuple[tuple[int, int], int]] | None:
        """The places in their channels of what a receive takes, None while something has not come."""
        found = []
        sources = [part.src_rank for part in self.program.transfers(send) if part.dst_rank == rank]
        for source in sources:
            if source == rank:
                if not self.handed[rank, send]:
                    return None
                continue
            pair = source, rank
            own = [place for place, posted in enumerate(self.posted[pair]) if posted == send]
            place = next((place for place in own if place not in self.taken[pair]), None)
            if place is None or place >= len(self.sent[pair]):
                return None
            found.append((pair, place))
        return found if sources else None

    def wrong(self, rank: int, action: Action) -> str:
        """What is wrong with an action of one rank alone, at this time."""
        done, slot, stage = self.done[rank], action.slot, action.stage
        if done[action]:
            return f"{action} is done twice"
        if done[Action("O", Slot(stage))]:
            return f"{action} is done with weights that the optimizer has changed"
        handed = done[Action("B", slot)] or done[Action("I", slot)]
        if action.kind == "F":
            sources = [Action("SF", slot.on(edge.src), stage) for edge in self.program.edges if edge.dst == stage]
            lacking = [send for send in sources if not self.done[rank][send.other_end]]
            rhythm = self.program.rhythm
            if stage in self.program.owners and not done[Action("G", Slot(stage))]:
                return f"{action}: the values that others own have not come"
            if rhythm is not None and self.updated[rank, stage] < rhythm.version(stage, action.micro // rhythm.micros):
                return f"{action}: its weights are not made yet"
        elif action.kind in ("B", "I"):
            users = [edge.dst for edge in self.program.edges if edge.src == stage and edge.grads]
            sources = [Action("SB", slot.on(user), stage) for user in users]
            lacking = [send for send in sources if not self.done[rank][send.other_end]]
            if handed or not done[Action("F", slot)]:
                return f"{action}: nothing is kept of its forward"
        elif action.kind == "W":
            return "" if done[Action("I", slot)] else f"{action}: I left nothing"
        elif action.kind == "O":
            return self.unready(rank, action)
        else:
            return self.wrong_message(rank, action)
        if lacking:
            return f"{action} has not got {lacking[0]}"
        return self.overfull(rank, action)

    def wrong_message(self, rank: int, action: Action) -> str:
        forward = action.kind == "SF"
        pair = (action.stage, action.peer) if forward else (action.peer, action.stage)
        edge = next((edge for edge in self.program.edges if (edge.src, edge.dst) == pair), None)
        if edge is None or not (forward or edge.grads):
            return f"{action}: nobody expects it"
        done = self.done[rank]
        kinds = "F" if forward else "BI"
        return "" if any(done[Action(kind, action.slot)] for kind in kinds) else f"{action} has nothing to send"

    def overfull(self, rank: int, action: Action) -> str:
        if self.limit is None or action.kind != "F":
            return ""
        counts = Counter({kind: 0 for kind in "FBW"})
        for other, times in self.done[rank].items():
            if other.stage == action.stage:
                counts[other.kind] += times
        held = 1 + counts["F"] - counts["B"] - counts["W"]
        most = self.limit(action.stage, self.stages, self.micros)
        if self.program.rhythm is not None:  # PipeDream, SOSP 2019, section 3.2
            in_turn = [division.period for division in self.program.divisions] or [1] * self.stages
            most = -(-sum(in_turn[action.stage :]) // in_turn[action.stage])
        return f"{action}: {held} micro-batches in flight" if held > most else ""

    def alone(self, slot: Slot, rank: int) -> bool:
        """Whether a rank has this slot: not, if another replica has the whole micro-batch."""
        return rank in self.program.players(Action("F", slot))

    def backward_ended(self, rank: int, stage: int) -> bool:
        done = self.done[rank]
        slots = [slot for micro in range(self.micros) if self.alone(slot := Slot(stage, micro), rank)]
        return all(any(done[Action(kind, slot)] for kind in BACK) for slot in slots)

    def unready(self, rank: int, action: Action) -> str:
        """Why the optimizer of a stage cannot step."""
        wanted = [a for a in self.program.once_a_step() if a.kind in "RT" and a.stage == action.stage]
        wanted += [Action("A", Slot(0))] * (self.program.world > 1)
        missing = [a for a in wanted if not self.done[rank][a]]
        if missing or not self.backward_ended(rank, action.stage):
            return f"{action} steps before {missing[:1] or 'the last backward'}"
        return ""

    def meet(self, action: Action) -> bool:
        """Let ranks meet: in a sum of several stages each rank once for each of its stages."""
        members = self.program.members(action)
        group = self.program.group(action)
        if action.kind == "U":
            return self.update(action)
        if not members or (action.is_a.meets == ALL and action.stage):
            self.problem = f"{action}: nobody meets there"
            return False
        of_group = {Action(action.kind, Slot(stage)) for stage in group} if action.is_a.meets == TIED else {action}
        fronts = {rank: self.front(rank) for rank in members}
        if not all(front in of_group for front in fronts.values()):
            return False
        for rank in members:
            own = [s for s in (group if action.is_a.meets != ALL else range(self.stages)) if rank in self.ranks(s)]
            if action.kind != "G" and not all(self.backward_ended(rank, stage) for stage in own):
                self.problem = f"{action} sums before the last backward"
            front = fronts[rank]
            assert front is not None
            self.problem = self.problem or (f"{front} twice" if self.done[rank][front] else "")
            if self.done[rank][Action("O", Slot(front.stage))]:
                self.problem = f"{front} after the optimizer"
        for rank in members:  # a rank with several of the stages passes all of them at once
            while self.front(rank) in of_group:
                front = self.front(rank)
                assert front is not None
                if self.done[rank][front]:
                    self.problem = f"{front} twice"
                    break
                self.done[rank][front] += 1
                self.at[rank] += 1
        return True

    def update(self, action: Action) -> bool:
        """Let the replicas of a stage sum the gradients of an update, which has to be the next one of the stage."""
        ranks, rhythm = self.ranks(action.stage), self.program.rhythm
        if rhythm is None:
            self.problem = f"{action}: nothing is updated"
            return False
        if any(self.front(rank) != action for rank in ranks):
            return False
        every = rhythm.updates[action.stage]
        first = action.micro // every * every
        expected = Counter({micro: 2 for micro in range(first, min(first + every, self.micros))})  # inputs and weights
        own = [self.gradients[rank, action.stage] for rank in ranks]
        in_turn = bool(self.program.divisions) and self.program.divisions[action.stage].period > 1
        summed = [sum(own, Counter())] if in_turn else own
        if action.micro != max(expected) or any(found != expected for found in summed):
            self.problem = f"{action} updates with the gradients of {[sorted(found) for found in summed]}"
        for rank in ranks:
            self.gradients[rank, action.stage].clear()
            self.updated[rank, action.stage] += 1
            self.done[rank][action] += 1
            self.at[rank] += 1
        return True

    def front(self, rank: int) -> Action | None:
        return self.parts[rank][self.at[rank]] if self.at[rank] < len(self.parts[rank]) else None

    def ranks(self, stage: int) -> tuple[int, ...]:
        return self.program.stage_ranks[stage]

    def left_out(self) -> str:
        """What a whole step would have, and nobody did."""
        once = list(self.program.once_a_step())
        for stage, ranks in enumerate(self.program.stage_ranks):
            for rank in ranks:
                done = self.done[rank]
                if not self.backward_ended(rank, stage):
                    return f"rank {rank} leaves out a backward of stage {stage}"
                missing = [a for a in once if a.stage == stage and not done[a]]
                if missing:
                    return f"rank {rank} leaves out {missing[0]}"
        if any(self.gradients.values()):
            return "gradients are left that no update takes"
        for rank in range(self.program.world):
            here = [sent for pair, sent in self.sent.items() if pair[1] == rank]
            here.append([send for owner, send in self.handed if owner == rank])
            for send in (send for sent in here for send in sent):
                compute = {"SF": "F", "SB": "BI"}[send.kind]
                assert send.peer is not None
                own = self.alone(send.slot.on(send.peer), rank)
                if own and not any(self.done[rank][Action(kind, send.slot.on(send.peer))] for kind in compute):
                    return f"nobody needed {send}"
        return ""

    def apart(self) -> str:
        """Sums of stages that share parameters are one operation: nothing may stand between them."""
        for group in self.program.groups(TIED):
            places = [place for place, a in enumerate(self.program.order) if a.kind == "T" and a.stage in group]
            if places and places[-1] - places[0] >= len(places):
                return f"the sums of stages {group} do not stand side by side"
        return ""

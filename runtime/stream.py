"""One rank's part of asynchronous training: it plays tick after tick, without a flush between batches.

Slots, and the state that the player keeps for them, are numbered in a ring (`ir.program.Streaming`); a tick leaves out
what does not exist, before the first batch and, in a flush, behind the last one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import lcm

import torch

from autopart.ir.actions import BACKWARD, COMPUTES, FORWARD, UPDATE, Action, Slot
from autopart.ir.program import Streaming
from autopart.ir.timeline import Span
from autopart.runtime.activity import set_activity
from autopart.runtime.messages.stream_mailbox import StreamMailbox
from autopart.runtime.player import BatchPlan, Player, State, label_of
from autopart.runtime.stages.versions import WeightVersions
from autopart.runtime.sums.replicas import ReplicaSums
from autopart.runtime.trace import StepTrace

Update = Callable[[], None]
"""Steps the optimizer of this rank's parameters."""


class StreamEngine:
    """Plays asynchronous training on one rank, over Gloo.

    player: of the program of one turn of the ring, with a `StreamMailbox`.  ticks: the actions of this rank in each
    tick of the ring.  sums: of the stages that this rank trains with other replicas.  parameters: of this rank.
    update: steps their optimizer.  losses: of the batches whose loss is complete and was not taken yet, by batch since
    the last flush: by micro-batch of the batch (0-dim, unweighted).  spans: where the spans of actions are added, None
    if they are not traced.
    """

    def __init__(
        self,
        player: Player,
        rhythm: Streaming,
        ticks: Sequence[Sequence[Action]],
        sums: Mapping[int, ReplicaSums],
        parameters: Mapping[str, torch.nn.Parameter],
        update: Update,
    ) -> None:
        assert isinstance(player.mailbox, StreamMailbox)
        self._player, self._messages, self._runners = player, player.mailbox, player.runners
        self._rhythm, self._ticks, self._update = rhythm, ticks, update
        self._messages.follow(rhythm, ticks)
        self._sums, self._parameters = sums, parameters
        player.do["U"] = self._run_update
        self._labels = {action: label_of(action) for tick in ticks for action in tick}
        own: dict[int, list[int]] = {stage: [] for stage in self._runners}
        for number, tick in enumerate(ticks):
            for action in tick:
                if action.kind == COMPUTES[FORWARD]:
                    own[action.stage].append(number)
        self._forwards = own
        self._plans: deque[BatchPlan] = deque()
        self.losses: dict[int, dict[int, torch.Tensor]] = {}
        self.spans: list[Span] | None = None
        for stage, runner in self._runners.items():
            runner.micros = rhythm.micros
            runner.versions = WeightVersions(self._trained(stage), self._version_of)
        self._restart()

    def _trained(self, stage: int) -> dict[str, torch.Tensor]:
        return {name: self._parameters[name] for name in self._runners[stage].held if name in self._parameters}

    def _restart(self) -> None:
        self._tick = self._entered = 0
        self._plans.clear()
        self._state: State | None = None
        self._trace: StepTrace | None = None

    @property
    def batches(self) -> int:
        """Batches that have entered since the last flush."""
        return self._entered // self._rhythm.micros

    @property
    def versions(self) -> dict[int, WeightVersions]:
        """The versions of the weights of this rank's stages."""
        return {stage: runner.versions for stage, runner in self._runners.items() if runner.versions is not None}

    # -- playing -------------------------------------------------------------------------------------------------

    @property
    def turn(self) -> int:
        """How many micro-batches lie between the first of the next batch and the last one that the first of several
        replicas in turn has taken."""
        return self._entered % lcm(*self._rhythm.periods)

    def enter(self, given: BatchPlan) -> None:
        """Play the ticks in which the micro-batches of one more batch enter.

        given: with as many micro-batches without rows before its first as `turn` says."""
        if self._state is None:
            self._state = self._player.begin(given, {}, train=True)
            self._state.named = self._named
            self._messages.open(given.rows)
        self._plans.append(self._placed(given))
        kept = self._rhythm.ring // self._rhythm.micros
        while len(self._plans) > kept:
            self._plans.popleft()
        self._entered += len(given.rows) - self.turn
        while self._tick < self._entered:
            self._play_tick(self._state)
        self._plans[-1] = replace(self._plans[-1], inputs=())  # read by the forwards of these ticks
        self._report()
        set_activity("between batches")

    def flush(self) -> None:
        """Play until nothing is in flight: all stages have then made the updates of all batches."""
        if self._state is None:
            return
        last = self._rhythm.last_tick(self._entered)
        while self._tick <= last:
            self._play_tick(self._state)
        self._messages.flush()
        self._report()
        for runner in self._runners.values():
            runner.finish()
            assert runner.versions is not None
            runner.versions.restart()
        self._restart()

    def _report(self) -> None:
        """Add what was traced to `spans`, with times from the first batch since the last flush."""
        if self._trace is not None and self.spans is not None:
            self.spans.extend(self._trace.spans())

    def _placed(self, given: BatchPlan) -> BatchPlan:
        """Return the plan of a batch with its micro-batches at their places in the ring."""
        first = self._entered % self._rhythm.ring - self.turn
        shares = {stage: [*[()] * first, *own] for stage, own in given.shares.items()}
        return replace(
            given,
            rows=(0,) * first + given.rows,
            inputs=[*[{}] * first, *given.inputs] if given.inputs else (),
            shares=shares,
            idle={(stage, first + micro): names for (stage, micro), names in given.idle.items()},
        )

    def _play_tick(self, state: State) -> None:
        tick, rhythm = self._tick, self._rhythm
        if self._trace is None and self.spans is not None:
            self._trace = StepTrace(self._player.rank, self._player.device)
        trace = self._trace if self.spans is not None else None
        self._messages.pass_to(tick, self._entered)
        oldest = self.batches - len(self._plans)
        for action in self._ticks[tick % rhythm.ring]:
            micro = tick - (0 if action.is_a.way == FORWARD else rhythm.lags[action.stage])
            first = micro - rhythm.updates[action.stage] + 1 if action.is_a.role == UPDATE else micro
            if micro < 0 or first >= self._entered:
                continue
            state.given = self._plans[min(micro, self._entered - 1) // rhythm.micros - oldest]
            self._renew(action, state)
            self._player.play(action, self._labels[action], state, trace)
            if action.kind == COMPUTES[BACKWARD]:
                self._collect(action, micro, state)
        self._tick += 1

    def _named(self, action: Action) -> Action:
        """Return an action of this tick with its micro-batch, counted from the last flush."""
        micro = self._tick - (0 if action.is_a.way == FORWARD else self._rhythm.lags[action.stage])
        return action._replace(slot=action.slot._replace(micro=micro))

    def _renew(self, action: Action, state: State) -> None:
        """Count the messages of a slot that is used again."""
        if action.kind in COMPUTES.values():
            way = action.is_a.way
            state.sends_left[action.slot, way] = self._player.sends[action.slot, way]

    def _collect(self, action: Action, micro: int, state: State) -> None:
        """Keep the loss of a micro-batch, and forget what its slot holds."""
        if action.stage == state.loss_stage and action.micro in state.losses:
            batch, number = divmod(micro, self._rhythm.micros)
            self.losses.setdefault(batch, {})[number] = state.losses.pop(action.micro)

    # -- updates -------------------------------------------------------------------------------------------------

    def _version_of(self, slot: Slot) -> int:
        """Return the version for the micro-batch that enters a slot in this tick."""
        return self._rhythm.version(slot.stage, self._tick // self._rhythm.micros)

    def _run_update(self, action: Action, state: State) -> None:
        """Sum the gradients of the micro-batches since the last update over the replicas, and update the weights."""
        stage, rhythm = action.stage, self._rhythm
        micro = self._tick - rhythm.lags[stage]
        first = micro - rhythm.updates[stage] + 1
        batches = (min(micro + 1, self._entered) - first) // rhythm.micros
        sums = self._sums.get(stage)
        if sums is not None:
            new_buffers = self._runners[stage].new_buffers(sums.updated)
            sums.begin(self._parameters)
            sums.finish(self._parameters, new_buffers, uneven=True)
            sums.release()
        versions = self._runners[stage].versions
        assert versions is not None
        grads = [p.grad for p in versions.parameters if p.grad is not None]
        if batches > 1 and grads:
            torch._foreach_mul_(grads, 1 / batches)
        versions.update(self._update, rhythm.version(stage, self._next_forward(stage) // rhythm.micros))
        for parameter in self._trained(stage).values():
            parameter.grad = None

    def _next_forward(self, stage: int) -> int:
        """Return the number of the micro-batch of this rank's next forward of a stage."""
        ring, ticks = self._rhythm.ring, self._forwards[stage]
        turn, place = divmod(self._tick + 1, ring)
        return next((turn * ring + n for n in ticks if n >= place), (turn + 1) * ring + ticks[0])

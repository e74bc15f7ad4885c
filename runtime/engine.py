"""One rank's loop over its part of a program, step after step (`player` says what each action does)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType

import torch

from autopart.ir.actions import COMPUTE
from autopart.ir.program import inside
from autopart.ir.timeline import Span
from autopart.runtime.activity import set_activity
from autopart.runtime.group.world import World
from autopart.runtime.player import BatchPlan, Player, State, label_of
from autopart.runtime.sums.reduce import GradientsAside
from autopart.runtime.trace import StepTrace


class StepOutcome:
    """What one step left on this rank, until `commit` or `discard`; leaving its context without a commit discards it.

    losses: on the rank that computes them, by micro-batch (0-dim, unweighted).  results: in evaluation, what the stages
    of this rank returned, by micro-batch and value name.  before: gradients of earlier steps, by parameter.
    computed_ns: nanoseconds that its computes took, 0 on a CUDA device, which runs them later.
    """

    def __init__(self, engine: Engine, state: State, aside: GradientsAside) -> None:
        self._engine, self._aside, self._open = engine, aside, True
        self.losses: Mapping[int, torch.Tensor] = state.losses
        self.results: Mapping[int, Mapping[str, torch.Tensor]] = state.results
        self.before = aside.before
        self.computed_ns = 0

    def commit(self, *, gradients: bool = True) -> None:
        """Keep the step.  gradients: whether to keep gradients and new values of buffers too."""
        if gradients:
            self._aside.keep()
        else:
            self._aside.restore()
        self._open = False
        self._engine.end(kept=gradients)

    def discard(self) -> None:
        """Restore gradients and buffers.  Messages may still be on their way, so no other step may follow."""
        if self._open:
            self._open = False
            self._aside.restore()
            self._engine.abandon()

    def __enter__(self) -> StepOutcome:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.discard()


class Engine:
    """Plays one rank's part of a program, step after step.

    spans: where the spans of steps are added, None if steps are not traced.
    """

    def __init__(self, world: World, player: Player) -> None:
        self._player = player
        self._labels = [label_of(action) for action in player.part]
        self._alone = _count_alone(world, player)
        self.spans: list[Span] | None = None
        self._trace: StepTrace | None = None

    def step(
        self,
        given: BatchPlan,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        train: bool,
        masters: Mapping[str, torch.nn.Parameter] = MappingProxyType({}),
    ) -> StepOutcome:
        """Play the program once; the caller commits or discards the outcome when it knows that of all ranks.

        masters: the master weights that get gradients, by parameter.  Raises StageError for a failing op, WorkerError
        for a lost peer; the step is then discarded.
        """
        state = self._player.begin(given, parameters if train else {}, train=train)
        outcome = StepOutcome(self, state, GradientsAside(state.parameters, masters))
        try:
            for sums in self._player.sums.values() if train else ():
                sums.begin(state.parameters)
            outcome.computed_ns = self._play(state)
            if train and self._player.values is not None:
                self._player.values.drop_foreign_gradients()
        except BaseException:
            outcome.discard()
            raise
        return outcome

    def end(self, *, kept: bool) -> None:
        """End a step that all ranks have played.  kept: whether buffers take their new values."""
        if self._trace is not None and self.spans is not None:
            self.spans.extend(self._trace.spans())
        self._trace = None
        for sums in self._player.sums.values():
            sums.release()
        for runner in self._player.runners.values():
            if kept:
                runner.finish()
            else:  # a NaN would stay in running statistics for ever
                runner.clear()
        set_activity("between steps")

    def abandon(self) -> None:
        """Forget a failed step."""
        self._trace = None
        for sums in self._player.sums.values():
            sums.release()
        for runner in self._player.runners.values():
            runner.clear()

    def _play(self, state: State) -> int:
        """Run all actions; return the nanoseconds of the computes where they run at once."""
        player = self._player
        trace = self._trace = StepTrace(player.rank, player.device) if self.spans is not None else None
        computed_ns, clock = 0, time.perf_counter_ns
        try:
            for number, (action, label) in enumerate(zip(player.part, self._labels, strict=True)):
                if number == self._alone:
                    self._begin_messages(state.given)
                began = clock()
                player.play(action, label, state, trace)
                if action.is_a.role == COMPUTE:
                    computed_ns += clock() - began
                player.mailbox.passed(action)
            if self._alone == len(player.part):
                self._begin_messages(state.given)
            player.mailbox.flush()
            if player.values is not None:
                player.values.arrive()
        finally:
            if player.values is not None:
                player.values.forget()
        return computed_ns if player.device.type == "cpu" else 0

    def _begin_messages(self, given: BatchPlan) -> None:
        """Agree with the other ranks on this step, and post the first receives."""
        if given.agree is not None:
            given.agree()
        self._player.mailbox.begin(given.rows)


def _count_alone(world: World, player: Player) -> int:
    """Return how many of the first actions need no other rank."""
    if world.carrier is not None:
        return 0
    summing = {player.last_backward[stage] for stage in player.sums if stage in player.last_backward}
    for number, action in enumerate(player.part):
        if action.is_a.role != COMPUTE or action in summing or inside(player.program, action):
            return number
    return len(player.part)

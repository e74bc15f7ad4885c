"""One rank's loop over its part of a program.

The program decides everything; the engine only keeps the values that are on their way.  For each slot it holds what the
forward reads and, after the backward, the gradients that go back; both are dropped when they were used.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from autopart.ir.actions import BACKWARD, COMPUTE, COMPUTES, FORWARD, SEND, Action, Slot, completes
from autopart.ir.errors import AutopartError
from autopart.ir.graph import Op
from autopart.ir.program import Program
from autopart.ir.shares import RowLayout, Window
from autopart.ir.timeline import Span
from autopart.runtime.activity import encoded, set_activity
from autopart.runtime.group.world import World
from autopart.runtime.messages.mailbox import Mailbox
from autopart.runtime.stages.failing_op import located
from autopart.runtime.stages.stage import StageRunner
from autopart.runtime.sums.reduce import COLLECTIVES, GradientsAside
from autopart.runtime.sums.replicas import ReplicaSums
from autopart.runtime.sums.shared_values import SharedValues
from autopart.runtime.trace import StepTrace

Specs = Mapping[int | tuple[int, int], Mapping[str, torch.Tensor]]
"""Shape and dtype of every value, as tensors on the meta device: by rows that this rank has (or by rows and slice), and
by name."""


@dataclass(frozen=True)
class BatchPlan:
    """What one rank is given for one step.

    rows: rows of each micro-batch, of all replicas together.  inputs: on the ranks of stage 0 the model's inputs by
    value name for each micro-batch, elsewhere empty.  key: (seed, step).  shares: for each stage of this rank and each
    micro-batch its weight in the whole loss, then the numbers that stage code takes (`StageModule.numbers`).  idle: by
    stage and micro-batch, values without weight in the loss, as if every target is ignored: they get no gradient.
    uneven: whether a replica has no weight somewhere.  scale: of the loss, for its backward.  agree: called before this
    rank needs another one, to wait until all ranks make this step; None if they have agreed.
    """

    rows: tuple[int, ...]
    inputs: Sequence[Mapping[str, torch.Tensor]]
    key: tuple[int, int]
    shares: Mapping[int, Sequence[Sequence[float]]]
    idle: Mapping[tuple[int, int], frozenset[str]] = field(default_factory=dict)
    uneven: bool = False
    scale: float = 1.0
    agree: Callable[[], None] | None = None


class StepOutcome:
    """What one step left on this rank, until `commit` or `discard`; leaving its context without a commit discards it.

    losses: on the rank that computes them, by micro-batch (0-dim, unweighted).  results: in evaluation, what the stages
    of this rank returned, by micro-batch and value name.  before: gradients of earlier steps, by parameter.
    computed_ns: nanoseconds that its computes took, 0 on a CUDA device, which runs them later.
    """

    def __init__(self, engine: Engine, state: _State, aside: GradientsAside) -> None:
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


@dataclass
class _State:
    """Values on their way in one step, by slot.

    values: what the forward reads and made, until it was sent.  grads: gradients of what the stage made.  back:
    gradients of what it received, until they were sent.  sends_left: messages of a slot, one way, not yet sent.
    loss_stage: the stage that computes the loss, if it is on this rank.
    """

    given: BatchPlan
    train: bool
    sends_left: Counter[tuple[Slot, str]]
    parameters: Mapping[str, torch.nn.Parameter]
    values: dict[Slot, dict[str, torch.Tensor]] = field(default_factory=lambda: defaultdict(dict))
    grads: dict[Slot, dict[str, torch.Tensor]] = field(default_factory=lambda: defaultdict(dict))
    back: dict[Slot, dict[str, torch.Tensor]] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    results: dict[int, dict[str, torch.Tensor]] = field(default_factory=lambda: defaultdict(dict))
    loss_stage: int | None = None


class Engine:
    """Plays one rank's part of a program, step after step.

    runners: of the stages that this rank runs.  ops: of the captured graph, to name one that fails.  loss: the name of
    the loss, None if there is none.  layouts: of values that are cut between replicas (`RowRoutes`).  sums: of the
    stages of this rank that other ranks train too.  values: the parameters that replicas own in shares.  spans: where
    the spans of steps are added, None if steps are not traced.
    """

    mailbox: type[Mailbox] = Mailbox

    def __init__(
        self,
        world: World,
        program: Program,
        runners: Mapping[int, StageRunner],
        specs: Specs,
        ops: Mapping[str, Op],
        loss: str | None,
        layouts: Mapping[str | tuple[str, int], RowLayout] = MappingProxyType({}),
        sums: Mapping[int, ReplicaSums] = MappingProxyType({}),
        values: SharedValues | None = None,
    ) -> None:
        self._rank = world.rank
        self._device = world.device
        self._program = program
        self._runners = runners
        self._ops = ops
        self._loss = loss
        self._specs = specs
        self._part = program.part(world.rank)
        self._labels = [encoded(_activity(action)) for action in self._part]
        self._sends = Counter((a.slot, a.is_a.way) for a in self._part if a.is_a.role == SEND)
        self._mailbox = self.mailbox(world, program, specs, layouts)
        kinds = dict.fromkeys(action.kind for action in program.order)
        self._collectives = {kind: COLLECTIVES[kind](world, program) for kind in kinds if kind in COLLECTIVES}
        self._sums = sums
        self._values = values
        self._divided = {
            stage: (program.division(stage), program.stage_ranks[stage].index(world.rank)) for stage in runners
        }
        self._windows: dict[tuple[int, int, int], Window] = {}
        self._last_backward = {a.stage: a for a in self._part if completes(a.kind) == COMPUTES[BACKWARD]}
        self._alone = self._count_alone(world)
        self._joins = {a for a in self._part if a.kind in self._collectives and program.joins(world.rank, a)}
        self._do: dict[str, Callable[[Action, _State], None]] = {
            "F": self._run_forward,
            "B": self._run_backward,
            "I": self._run_backward,
            "W": self._run_weights,
            "SF": self._send,
            "SB": self._send,
            "RF": self._receive,
            "RB": self._receive,
            "G": self._gather_values,
            "R": self._sum_replicas,
            "A": self._leave_to_caller,
            "O": self._leave_to_caller,
        }
        self._do |= dict.fromkeys(self._collectives, self._meet)
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
        state = _State(given, train, self._sends.copy(), parameters if train else {})
        outcome = StepOutcome(self, state, GradientsAside(state.parameters, masters))
        try:
            for sums in self._sums.values() if train else ():
                sums.begin(state.parameters)
            outcome.computed_ns = self._play(state)
            if train and self._values is not None:
                self._values.drop_foreign_gradients()
        except BaseException:
            outcome.discard()
            raise
        return outcome

    def end(self, *, kept: bool) -> None:
        """End a step that all ranks have played.  kept: whether buffers take their new values."""
        if self._trace is not None and self.spans is not None:
            self.spans.extend(self._trace.spans())
        self._trace = None
        for sums in self._sums.values():
            sums.release()
        for runner in self._runners.values():
            if kept:
                runner.finish()
            else:  # a NaN would stay in running statistics for ever
                runner.clear()
        set_activity("between steps")

    def abandon(self) -> None:
        """Forget a failed step."""
        self._trace = None
        for sums in self._sums.values():
            sums.release()
        for runner in self._runners.values():
            runner.clear()

    def _play(self, state: _State) -> int:
        """Run all actions; return the nanoseconds of the computes where they run at once."""
        trace = self._trace = StepTrace(self._rank, self._device) if self.spans is not None else None
        computed_ns, clock = 0, time.perf_counter_ns
        try:
            for number, (action, label) in enumerate(zip(self._part, self._labels, strict=True)):
                if number == self._alone:
                    self._begin_messages(state.given)
                set_activity(label)
                start = trace.now() if trace is not None else None
                began = clock()
                self._do[action.kind](action, state)
                if action.is_a.role == COMPUTE:
                    computed_ns += clock() - began
                if trace is not None and start is not None:
                    trace.add(action, start)
                self._mailbox.passed(action)
            if self._alone == len(self._part):
                self._begin_messages(state.given)
            self._mailbox.flush()
            if self._values is not None:
                self._values.arrive()
        finally:
            if self._values is not None:
                self._values.forget()
        return computed_ns if self._device.type == "cpu" else 0

    def _count_alone(self, world: World) -> int:
        """Return how many of the first actions need no other rank."""
        if world.carrier is not None or self._program.statistics:
            return 0
        summing = {self._last_backward[stage] for stage in self._sums if stage in self._last_backward}
        for number, action in enumerate(self._part):
            if action.is_a.role != COMPUTE or action in summing:
                return number
        return len(self._part)

    def _begin_messages(self, given: BatchPlan) -> None:
        """Agree with the other ranks on this step, and post the first receives."""
        if given.agree is not None:
            given.agree()
        self._mailbox.begin(given.rows)

    # -- computes ------------------------------------------------------------------------------------------------

    def _window(self, slot: Slot, state: _State) -> Window:
        """Return this rank's rows of a micro-batch; cached, since finding them is O(replicas)."""
        divided, replica = self._divided[slot.stage]
        key = slot.stage, slot.micro % divided.period, state.given.rows[slot.micro]
        if key not in self._windows:
            self._windows[key] = divided.windows(slot.micro, key[-1])[replica]
        return self._windows[key]

    def _run_forward(self, action: Action, state: _State) -> None:
        slot, given = action.slot, state.given
        window, values = self._window(slot, state), state.values[slot]
        if not window.own:
            if state.train:
                self._runners[slot.stage].join_forward(slot, self._specs, given.key, self._device)
            return
        if given.inputs and slot.stage == 0:
            values.update(given.inputs[slot.micro])
        runner = self._runners[slot.stage]
        try:
            numbers = given.shares[slot.stage][slot.micro][1:]
            outputs = runner.forward(slot, window, values, given.key, train=state.train, numbers=numbers)
        except Exception as error:
            raise self._located(error, action) from error
        if self._loss is not None and self._loss in outputs:
            state.loss_stage = slot.stage
            loss = outputs[self._loss].detach()  # slices have parts of one sum
            state.losses[slot.micro] = state.losses[slot.micro] + loss if slot.slice else loss
        if not state.train:
            state.results[slot.micro].update(outputs)
        values.update(outputs)
        if slot.stage in self._program.forward_only:
            runner.end_forward(slot)
        if not state.sends_left[slot, FORWARD]:
            del state.values[slot]

    def _run_backward(self, action: Action, state: _State) -> None:
        slot = action.slot
        grads = state.grads.pop(slot, {})
        runner = self._runners[slot.stage]
        if not self._window(slot, state).own:
            runner.join_backward(slot)
            return
        if self._loss is not None and slot.stage == state.loss_stage:
            given, loss = state.given, state.losses[slot.micro]
            weight = given.shares[slot.stage][slot.micro][0] * given.scale
            # Without a valid target the loss may be 0/0, and no gradient flows.
            grads = grads | {self._loss: torch.full_like(loss, weight)} if weight else {}
        idle = state.given.idle.get((slot.stage, slot.micro))
        if idle:  # these may be 0/0, where even a gradient of 0 would give NaN
            grads = {name: grad for name, grad in grads.items() if name not in idle}
        if slot.stage in self._sums and action == self._last_backward[slot.stage]:
            self._sums[slot.stage].arm()
        try:
            back = runner.backward(slot, grads, whole=bool(completes(action.kind)))
        except Exception as error:
            raise self._located(error, action) from error
        if state.sends_left[slot, BACKWARD]:
            state.back[slot] = back

    def _run_weights(self, action: Action, state: _State) -> None:
        slot, runner = action.slot, self._runners[action.stage]
        if not self._window(slot, state).own:
            return
        sums = self._sums.get(slot.stage)
        if sums is not None and action == self._last_backward[slot.stage]:
            sums.arm(later=runner.deferred(slot))
        try:
            runner.backward_of_weights(slot, sums.complete if sums is not None else None)
        except Exception as error:
            raise self._located(error, action) from error

    def _located(self, error: Exception, action: Action) -> AutopartError:
        """Return the error with rank, stage, micro-batch, module and line."""
        return located(error, action, self._rank, self._ops)

    # -- messages ------------------------------------------------------------------------------------------------

    def _send(self, action: Action, state: _State) -> None:
        kept = state.values if action.is_a.way == FORWARD else state.back
        self._mailbox.send(action, kept.get(action.slot, {}))
        state.sends_left[action.slot, action.is_a.way] -= 1
        if not state.sends_left[action.slot, action.is_a.way]:
            kept.pop(action.slot, None)

    def _receive(self, action: Action, state: _State) -> None:
        found = self._mailbox.receive(action)
        if action.is_a.way == FORWARD:
            state.values[action.slot].update(found)
            return
        grads = state.grads[action.slot]
        for name, grad in found.items():
            grads[name] = grads[name] + grad if name in grads else grad

    # -- once a step -----------------------------------------------------------------------------------------------

    def _gather_values(self, action: Action, state: _State) -> None:
        if self._values is not None:
            self._values.begin(action.stage)

    def _meet(self, action: Action, state: _State) -> None:
        """Join a collective once for all stages of this rank that meet in it."""
        if action in self._joins:
            self._collectives[action.kind](action, state.parameters)

    def _sum_replicas(self, action: Action, state: _State) -> None:
        sums = self._sums[action.stage]
        new_buffers = self._runners[action.stage].new_buffers(sums.updated)
        sums.finish(state.parameters, new_buffers, uneven=state.given.uneven)

    def _leave_to_caller(self, action: Action, state: _State) -> None:
        """Do nothing: after the step the caller makes the ranks agree on its outcome, and the user's optimizer
        steps."""


def _activity(action: Action) -> str:
    if not action.is_a.is_per_slot:
        return f"{action}: {action.is_a.label}"
    sliced = f", slice {action.slot.slice}" if action.slot.slice else ""
    return f"{action}: {action.is_a.label} of micro-batch {action.micro}{sliced}"

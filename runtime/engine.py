"""One rank's loop over its part of a program.

The program decides everything; the engine only keeps the values that are on their way.  For each slot it holds what F
will read and, after B, the gradients that go back; both leave as soon as they are used.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from autopart.ir.errors import AutopartError, StageError
from autopart.ir.graph import Op
from autopart.ir.program import BACKWARD, FORWARD, SEND, Action, Program, Slot
from autopart.ir.shares import RowLayout, Window
from autopart.runtime.activity import set_activity
from autopart.runtime.group.world import World
from autopart.runtime.messages.mailbox import Mailbox
from autopart.runtime.messages.transport import Spec
from autopart.runtime.stages.failing_op import failing_op
from autopart.runtime.stages.stage import StageRunner
from autopart.runtime.sums.reduce import COLLECTIVES, GradientsAside
from autopart.runtime.sums.replicas import ReplicaSums, Shared
from autopart.runtime.sums.shared_values import SharedValues
from autopart.runtime.trace import Trace

_IN_FP32 = (
    "this device has no such op in half precision: call it on x.float() under torch.autocast(device_type, "
    "enabled=False) in forward()"
)

Specs = Mapping[int | tuple[int, int], Mapping[str, Spec]]
"""Shape and dtype of every value, by rows that this rank has (and where sequences are cut, the slice) and by name."""


@dataclass(frozen=True)
class BatchPlan:
    """What one rank is given for one step.

    rows: rows of each micro-batch, of which a replica has its part (`Division.windows`).  inputs: on the ranks of stage
    0 the model's inputs by value name for each micro-batch, elsewhere empty.  key: (seed, step).  shares: for each
    stage of this rank and each micro-batch the share of its loss in the whole loss, then the numbers that stage code
    takes (`StageModule.numbers`).  idle: by stage and micro-batch, values that carry no weight in the loss, as where
    every target is ignored: no gradient goes back from them.  uneven: whether some replica has no weight somewhere.
    scale: of the loss, for its backward.
    """

    rows: tuple[int, ...]
    inputs: Sequence[Mapping[str, torch.Tensor]]
    key: tuple[int, int]
    shares: Mapping[int, Sequence[Sequence[float]]]
    idle: Mapping[tuple[int, int], frozenset[str]] = field(default_factory=dict)
    uneven: bool = False
    scale: float = 1.0


class StepOutcome:
    """What one step left on this rank, until its caller keeps it (`commit`) or not (`discard`).  Leaving its context
    without a commit discards it.

    losses: on the rank that computes them, by micro-batch (0-dim, unweighted).  results: in evaluation, what the stages
    of this rank returned, by micro-batch and value name.  before: gradients of earlier steps, by parameter, to which
    those of this one are to be added.
    """

    def __init__(self, engine: Engine, state: _State, aside: GradientsAside) -> None:
        self._engine, self._aside, self._open = engine, aside, True
        self.losses: Mapping[int, torch.Tensor] = state.losses
        self.results: Mapping[int, Mapping[str, torch.Tensor]] = state.results
        self.before = aside.before

    def commit(self, *, gradients: bool = True) -> None:
        """Count the step on all ranks.  gradients: whether gradients and buffers keep what the step made of them."""
        if gradients:
            self._aside.keep()
        else:
            self._aside.restore()
        self._open = False
        self._engine.end(kept=gradients)

    def discard(self) -> None:
        """Gradients and buffers are as before the step.  Messages may be under way, so no other step may follow."""
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

    values: what F reads and what it made, until it was sent.  grads: gradients of what the stage made.  back:
    gradients of what it received, until they were sent.  sends_left: messages of a slot, one way, not yet sent.
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


class Engine:
    """Plays one rank's part of a program, step after step.

    runners: of the stages that this rank runs.  ops: of the captured graph, to name one that fails.  loss: the value
    that is the loss, None where there is none.  layouts: of values that are cut between replicas (`RowRoutes`).
    shared: what the replicas of each stage of this rank keep alike.  values: the parameters that they own in shares.
    """

    def __init__(
        self,
        world: World,
        program: Program,
        runners: Mapping[int, StageRunner],
        specs: Specs,
        ops: Mapping[str, Op],
        loss: str | None,
        layouts: Mapping[str | tuple[str, int], RowLayout] = MappingProxyType({}),
        shared: Mapping[int, Shared] = MappingProxyType({}),
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
        self._labels = [_activity(action) for action in self._part]
        self._sends = Counter((a.slot, a.is_a.way) for a in self._part if a.is_a.role == SEND)
        self._mailbox = Mailbox(world, program, specs, layouts)
        kinds = dict.fromkeys(action.kind for action in program.order)
        self._collectives = {kind: COLLECTIVES[kind](world, program) for kind in kinds if kind in COLLECTIVES}
        self._sums = self._open_sums(world, program, shared)
        self._values = values
        self._owners = {name: rank for stage in runners for name, rank in shared.get(stage, Shared()).owners.items()}
        self._divided = {
            stage: (program.division(stage), program.stage_ranks[stage].index(world.rank)) for stage in runners
        }
        self._windows: dict[tuple[int, int, int], Window] = {}
        self._last_backward = {a.stage: a for a in self._part if a.kind == "B"}
        self._joins = {a for a in self._part if a.kind in self._collectives and program.joins(world.rank, a)}
        self._do: dict[str, Callable[[Action, _State], None]] = {
            "F": self._run_forward,
            "B": self._run_backward,
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
        self.trace: Trace | None = None

    def _open_sums(self, world: World, program: Program, shared: Mapping[int, Shared]) -> dict[int, ReplicaSums]:
        """For the stages of this rank that have replicas and are trained.  Every rank opens the groups of all."""
        found = {}
        for stage in dict.fromkeys(action.stage for action in program.order if action.kind == "R"):
            sums = ReplicaSums(world, program.stage_ranks[stage], self._runners.get(stage), shared.get(stage, Shared()))
            if self._rank in program.stage_ranks[stage]:
                found[stage] = sums
        return found

    def step(
        self,
        given: BatchPlan,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        train: bool,
        masters: Mapping[str, torch.nn.Parameter] = MappingProxyType({}),
    ) -> StepOutcome:
        """Play the program once; the caller keeps the outcome or not, once it knows of all ranks.

        masters: of some of the parameters, which get their gradients.  Raises StageError for a failing op, WorkerError
        for a lost peer; the step is then discarded.
        """
        state = _State(given, train, self._sends.copy(), parameters if train else {})
        outcome = StepOutcome(self, state, GradientsAside(state.parameters, masters))
        try:
            for sums in self._sums.values() if train else ():
                sums.begin(state.parameters)
            self._play(state)
            for name, owner in self._owners.items():
                if train and owner != self._rank:
                    state.parameters[name].grad = None  # its owner has the sum
        except BaseException:
            outcome.discard()
            raise
        return outcome

    def end(self, *, kept: bool) -> None:
        """End a step that all ranks have played.  kept: buffers take their new values."""
        if self.trace is not None:
            self.trace.end()
        for sums in self._sums.values():
            sums.release()
        for runner in self._runners.values():
            if kept:
                runner.finish()
            else:  # buffers stay as before the step: what a NaN reached would stay in running statistics for ever
                runner.clear()
        set_activity("between steps")

    def abandon(self) -> None:
        """A step does not count: what it left behind is forgotten."""
        for sums in self._sums.values():
            sums.abandon()
        for runner in self._runners.values():
            runner.clear()

    def _play(self, state: _State) -> None:
        trace = self.trace
        if trace is not None:
            trace.begin(self._device)
        self._mailbox.begin(state.given.rows)
        try:
            for action, label in zip(self._part, self._labels, strict=True):
                set_activity(label)
                start = trace.now() if trace is not None else None
                self._do[action.kind](action, state)
                if trace is not None and start is not None:
                    trace.add(action, start)
                self._mailbox.passed(action)
            self._mailbox.flush()
            if self._values is not None:
                self._values.arrive()
        finally:
            if self._values is not None:
                self._values.forget()

    # -- computes ------------------------------------------------------------------------------------------------

    def _window(self, slot: Slot, state: _State) -> Window:
        """The rows of a micro-batch that this rank has: found once, since that takes as long as there are replicas."""
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
            raise self._told(error, action) from error
        if self._loss is not None and self._loss in outputs:
            loss = outputs[self._loss].detach()  # of slices the parts of one sum
            state.losses[slot.micro] = state.losses[slot.micro] + loss if slot.slice else loss
        if not state.train:
            state.results[slot.micro].update(outputs)
        values.update(outputs)
        if not state.sends_left[slot, FORWARD]:
            del state.values[slot]

    def _run_backward(self, action: Action, state: _State) -> None:
        slot = action.slot
        grads = state.grads.pop(slot, {})
        runner = self._runners[slot.stage]
        if not self._window(slot, state).own:
            runner.join_backward(slot)
            return
        if self._loss is not None and runner.makes(self._loss):
            given, loss = state.given, state.losses[slot.micro]
            weight = given.shares[slot.stage][slot.micro][0] * given.scale
            # No valid target here: its loss may be 0/0, its gradient is nothing.
            grads = grads | {self._loss: torch.full_like(loss, weight)} if weight else {}
        idle = state.given.idle.get(
            (slot.stage, slot.micro), frozenset()
        )  # may be 0/0: even a gradient of 0 would be NaN there
        grads = {name: grad for name, grad in grads.items() if name not in idle}
        if slot.stage in self._sums and action == self._last_backward[slot.stage]:
            self._sums[slot.stage].arm()
        try:
            back = runner.backward(slot, grads)
        except Exception as error:
            raise self._told(error, action) from error
        if state.sends_left[slot, BACKWARD]:
            state.back[slot] = back

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
        """Join a collective, once with all stages of this rank that meet in it."""
        if action in self._joins:
            self._collectives[action.kind](action, state.parameters)

    def _sum_replicas(self, action: Action, state: _State) -> None:
        self._sums[action.stage].finish(state.parameters, uneven=state.given.uneven)

    def _leave_to_caller(self, action: Action, state: _State) -> None:
        """Do nothing: every gradient is complete, and the caller makes the ranks agree on what this part has given.
        The optimizer is the user's: it steps when that is done."""

    def _told(self, error: Exception, action: Action) -> AutopartError:
        """The error with stage, micro-batch, module and line."""
        if isinstance(error, AutopartError):
            return error
        op = self._ops.get(failing_op(error) or "")
        where = f"module {op.module}, {op.target} at {op.where}" if op else ""
        why = (str(error).splitlines() or [""])[0]
        return StageError(
            f"{action.slot}, {action.is_a.label}: {type(error).__name__}",
            where=", ".join(part for part in (f"rank {self._rank}", where) if part),
            why=why,
            fix=_IN_FP32 if "not implemented for 'Half'" in why or "not implemented for 'BFloat16'" in why else "",
        )


def _activity(action: Action) -> str:
    if not action.is_a.is_per_slot:
        return f"{action}: {action.is_a.label}"
    sliced = f", slice {action.slot.slice}" if action.slot.slice else ""
    return f"{action}: {action.is_a.label} of micro-batch {action.micro}{sliced}"

"""What each action of a program does on one rank, with the values that are on their way from action to action.

The program decides everything; a player only keeps these values.  For each slot it holds what the forward reads and,
after the backward, the gradients that go back; both are dropped when they were used.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from autopart.ir.actions import BACKWARD, COMPUTES, FORWARD, SEND, Action, Slot, completes
from autopart.ir.errors import AutopartError
from autopart.ir.graph import Op
from autopart.ir.program import Program
from autopart.ir.shares import Window
from autopart.runtime.activity import encoded, set_activity
from autopart.runtime.group.world import World
from autopart.runtime.messages.mailbox import Mailbox
from autopart.runtime.stages.failing_op import located
from autopart.runtime.stages.stage import StageRunner
from autopart.runtime.sums.reduce import COLLECTIVES
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


@dataclass
class State:
    """Values on their way in one step, by slot.

    values: what the forward reads and made, until it was sent.  grads: gradients of what the stage made.  back:
    gradients of what it received, until they were sent.  sends_left: messages of a slot, one way, not yet sent.
    loss_stage: the stage that computes the loss, if it is on this rank.  named: an action as errors and traces name it,
    where slots are used again; None where they are not.
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
    named: Callable[[Action], Action] | None = None


class Player:
    """Plays single actions of one rank's part of a program; what plays them in turn is an engine.

    runners: of the stages that this rank runs.  specs: of all values.  ops: of the captured graph, to name one that
    fails.  loss: the name of the loss, None if there is none.  sums: of the stages of this rank that other ranks train
    too.  values: the parameters that replicas own in shares.
    """

    def __init__(
        self,
        world: World,
        program: Program,
        runners: Mapping[int, StageRunner],
        specs: Specs,
        ops: Mapping[str, Op],
        loss: str | None,
        mailbox: Mailbox,
        sums: Mapping[int, ReplicaSums] = MappingProxyType({}),
        values: SharedValues | None = None,
    ) -> None:
        self.rank, self.device, self.program = world.rank, world.device, program
        self.runners, self.mailbox, self.sums, self.values = runners, mailbox, sums, values
        self._ops, self._loss, self._specs = ops, loss, specs
        self.part = program.part(world.rank)
        self.sends = Counter((a.slot, a.is_a.way) for a in self.part if a.is_a.role == SEND)
        kinds = dict.fromkeys(action.kind for action in program.order)
        self._collectives = {kind: COLLECTIVES[kind](world, program) for kind in kinds if kind in COLLECTIVES}
        self._divided = {
            stage: (program.division(stage), program.stage_ranks[stage].index(world.rank)) for stage in runners
        }
        self._windows: dict[tuple[int, int, int], Window] = {}
        self.last_backward = {a.stage: a for a in self.part if completes(a.kind) == COMPUTES[BACKWARD]}
        self._joins = {a for a in self.part if a.kind in self._collectives and program.joins(world.rank, a)}
        self.do: dict[str, Callable[[Action, State], None]] = {
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
        self.do |= dict.fromkeys(self._collectives, self._meet)

    def begin(self, given: BatchPlan, parameters: Mapping[str, torch.nn.Parameter], *, train: bool) -> State:
        """Return the state before the first action."""
        return State(given, train, self.sends.copy(), parameters)

    def play(self, action: Action, label: bytes, state: State, trace: StepTrace | None) -> None:
        """Do what an action is.  label: of this rank's activity (`label_of`).

        Raises StageError for a failing op, WorkerError for a lost peer."""
        set_activity(label)
        start = trace.now() if trace is not None else None
        self.do[action.kind](action, state)
        if trace is not None and start is not None:
            trace.add(action if state.named is None else state.named(action), start)

    # -- computes ------------------------------------------------------------------------------------------------

    def _window(self, slot: Slot, state: State) -> Window:
        """Return this rank's rows of a micro-batch; cached, since finding them is O(replicas)."""
        divided, replica = self._divided[slot.stage]
        key = slot.stage, slot.micro % divided.period, state.given.rows[slot.micro]
        if key not in self._windows:
            self._windows[key] = divided.windows(slot.micro, key[-1])[replica]
        return self._windows[key]

    def _run_forward(self, action: Action, state: State) -> None:
        slot, given = action.slot, state.given
        window, values = self._window(slot, state), state.values[slot]
        if not window.own:
            if state.train:
                self.runners[slot.stage].join_forward(slot, self._specs, given.key, self.device)
            return
        if given.inputs and slot.stage == 0:
            values.update(given.inputs[slot.micro])
        runner = self.runners[slot.stage]
        try:
            numbers = given.shares[slot.stage][slot.micro][1:]
            outputs = runner.forward(slot, window, values, given.key, train=state.train, numbers=numbers)
        except Exception as error:
            raise self._located(error, action, state) from error
        if self._loss is not None and self._loss in outputs:
            state.loss_stage = slot.stage
            loss = outputs[self._loss].detach()  # slices have parts of one sum
            state.losses[slot.micro] = state.losses[slot.micro] + loss if slot.slice else loss
        if not state.train:
            state.results[slot.micro].update(outputs)
        values.update(outputs)
        if slot.stage in self.program.forward_only:
            runner.end_forward(slot)
        if not state.sends_left[slot, FORWARD]:
            del state.values[slot]

    def _run_backward(self, action: Action, state: State) -> None:
        slot = action.slot
        grads = state.grads.pop(slot, {})
        runner = self.runners[slot.stage]
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
        if slot.stage in self.sums and action == self.last_backward[slot.stage]:
            self.sums[slot.stage].arm()
        try:
            back = runner.backward(slot, grads, whole=bool(completes(action.kind)))
        except Exception as error:
            raise self._located(error, action, state) from error
        if state.sends_left[slot, BACKWARD]:
            state.back[slot] = back

    def _run_weights(self, action: Action, state: State) -> None:
        slot, runner = action.slot, self.runners[action.stage]
        if not self._window(slot, state).own:
            return
        sums = self.sums.get(slot.stage)
        if sums is not None and action == self.last_backward[slot.stage]:
            sums.arm(later=runner.deferred(slot))
        try:
            runner.backward_of_weights(slot, sums.complete if sums is not None else None)
        except Exception as error:
            raise self._located(error, action, state) from error

    def _located(self, error: Exception, action: Action, state: State) -> AutopartError:
        """Return the error with rank, stage, micro-batch, module and line."""
        return located(error, action if state.named is None else state.named(action), self.rank, self._ops)

    # -- messages ------------------------------------------------------------------------------------------------

    def _send(self, action: Action, state: State) -> None:
        kept = state.values if action.is_a.way == FORWARD else state.back
        self.mailbox.send(action, kept.get(action.slot, {}))
        state.sends_left[action.slot, action.is_a.way] -= 1
        if not state.sends_left[action.slot, action.is_a.way]:
            kept.pop(action.slot, None)

    def _receive(self, action: Action, state: State) -> None:
        found = self.mailbox.receive(action)
        if action.is_a.way == FORWARD:
            state.values[action.slot].update(found)
            return
        grads = state.grads[action.slot]
        for name, grad in found.items():
            grads[name] = grads[name] + grad if name in grads else grad

    # -- once a step -----------------------------------------------------------------------------------------------

    def _gather_values(self, action: Action, state: State) -> None:
        if self.values is not None:
            self.values.begin(action.stage)

    def _meet(self, action: Action, state: State) -> None:
        """Join a collective once for all stages of this rank that meet in it."""
        if action in self._joins:
            self._collectives[action.kind](action, state.parameters)

    def _sum_replicas(self, action: Action, state: State) -> None:
        sums = self.sums[action.stage]
        new_buffers = self.runners[action.stage].new_buffers(sums.updated)
        sums.finish(state.parameters, new_buffers, uneven=state.given.uneven)

    def _leave_to_caller(self, action: Action, state: State) -> None:
        """Do nothing: after the step the caller makes the ranks agree on its outcome, and the user's optimizer
        steps."""


def label_of(action: Action) -> bytes:
    """Return what a rank that plays an action is said to do (`set_activity`)."""
    if not action.is_a.is_per_slot:
        return encoded(f"{action}: {action.is_a.label}")
    sliced = f", slice {action.slot.slice}" if action.slot.slice else ""
    return encoded(f"{action}: {action.is_a.label} of micro-batch {action.micro}{sliced}")

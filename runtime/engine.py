"""One rank's loop over its actions.

The program decides everything; the engine only keeps the values that are on their way.  For each micro-batch it holds
what F will read and, after B, the gradients that go back; both leave as soon as they are used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from autopart.ir.errors import AutopartError, StageError
from autopart.ir.graph import Op
from autopart.ir.program import Action, Program
from autopart.runtime.activity import set_activity
from autopart.runtime.failing_op import failing_op
from autopart.runtime.stage import StageRunner
from autopart.runtime.tied_gradients import TiedGradients
from autopart.runtime.trace import Trace
from autopart.runtime.transport import Inbox, Outbox, Spec
from autopart.runtime.world import World

Specs = Mapping[int, Mapping[str, Spec]]  # by rows of the micro-batch, by value name


@dataclass(frozen=True)
class StepInput:
    """What one rank is given for one step.

    rows: rows of each micro-batch.  micros: on the rank of stage 0 the model's inputs by value name for each
    micro-batch, elsewhere empty.  weights: share of each micro-batch's loss in the whole loss.  key: (seed, step).
    """

    rows: tuple[int, ...]
    micros: Sequence[Mapping[str, torch.Tensor]]
    weights: Sequence[float]
    key: tuple[int, int]


class Engine:
    """Plays one rank's part of a program, step after step."""

    def __init__(
        self, world: World, program: Program, runner: StageRunner, specs: Specs, ops: Mapping[str, Op], loss: str | None
    ) -> None:
        self._world, self._program, self._runner, self._specs, self._ops = world, program, runner, specs, ops
        self._actions = program.ranks[world.rank] if world.rank < len(program.ranks) else ()
        self._loss = loss
        self._forward = {(e.src, e.dst): e.values for e in program.edges}
        self._backward = {(e.dst, e.src): e.grads for e in program.edges if e.grads}
        self._acks = _acknowledgements(program, world.rank)
        self._outboxes, self._inboxes = self._channels(program)
        self._tied = TiedGradients(world, program)
        self._labels = {action: _activity(action) for action in self._actions}
        self.trace: Trace | None = None
        self._do: dict[str, Callable[[Action, StepInput], None]] = {
            "F": self._run_forward, "B": self._run_backward, "SF": self._send_values, "RF": self._receive_values,
            "SB": self._send_grads, "RB": self._receive_grads, "T": self._sum_tied,
        }  # fmt: skip

    def _channels(self, program: Program) -> tuple[dict[int, Outbox], dict[int, Inbox]]:
        """A box per directed pair of ranks.  Every rank opens every channel's group, in the same order."""
        me, world = self._world.rank, self._world
        outboxes: dict[int, Outbox] = {}
        inboxes: dict[int, Inbox] = {}
        for a, b in _rank_pairs(program):
            group = world.channel(a, b)
            if a == me:
                outboxes[b] = Outbox(b, group)
            elif b == me:
                inboxes[a] = Inbox(a, group, world.device)
        return outboxes, inboxes

    def step(self, given: StepInput, parameters: Mapping[str, torch.nn.Parameter], *, train: bool) -> StepResult:
        """Play the program once.  Raises StageError for a failing op, WorkerError for a lost peer."""
        self._state = _State(given, train)
        self._tied.begin(parameters)
        trace = self.trace
        if trace is not None:
            trace.begin()
        try:
            for peer, inbox in self._inboxes.items():
                inbox.expect(self._expected(peer, given.rows))
            for action in self._actions:
                set_activity(self._labels[action])
                start = trace.now() if trace is not None else 0
                self._do[action.kind](action, given)
                if trace is not None:
                    trace.add(action, start)
            for outbox in self._outboxes.values():
                outbox.flush()
            self._runner.finish()
        except BaseException:
            self._runner.clear()
            raise
        set_activity("between steps")
        return StepResult(self._state.losses, self._state.results)

    def _expected(self, peer: int, rows: tuple[int, ...]) -> list[tuple[Spec, ...]]:
        """The messages that `peer` sends in one step, in order."""
        messages = []
        for action in self._program.ranks[peer]:
            if action.peer is None or self._program.stage_ranks[action.peer] != self._world.rank:
                continue
            specs = self._specs[rows[action.micro]]
            if action.kind == "SF":
                messages.append(tuple(specs[name] for name in self._forward[action.stage, action.peer]))
            elif action.kind == "SB":
                messages.append(tuple(specs[name] for name in self._backward[action.stage, action.peer]))
        return messages

    def _run_forward(self, action: Action, given: StepInput) -> None:
        state, micro = self._state, action.micro
        values = state.values[micro]
        if given.micros:
            values.update(given.micros[micro])
        try:
            outputs = self._runner.forward(micro, given.rows[micro], values, given.key, train=state.train)
        except Exception as error:
            raise self._blame(error, action) from error
        if self._loss is not None and self._loss in outputs:
            state.losses[micro] = outputs[self._loss].detach()
        if not state.train:
            state.results[micro] = outputs
        values.update(outputs)
        if not any(a == action.stage for a, _ in self._forward):
            del state.values[micro]

    def _run_backward(self, action: Action, given: StepInput) -> None:
        state, micro = self._state, action.micro
        grads = state.grads.pop(micro, {})
        if self._loss is not None and micro in state.losses:
            loss = state.losses[micro]
            grads[self._loss] = torch.full_like(loss, given.weights[micro])
            if given.weights[micro] == 0.0:  # no valid target here: its loss may be 0/0, its gradient is nothing
                grads = {}
        try:
            state.back[micro] = self._runner.backward(micro, grads)
        except Exception as error:
            raise self._blame(error, action) from error

    def _send_values(self, action: Action, given: StepInput) -> None:
        assert action.peer is not None
        values = self._state.values[action.micro]
        names = self._forward[action.stage, action.peer]
        self._outboxes[self._program.stage_ranks[action.peer]].send([values[name] for name in names])
        last = max(dst for src, dst in self._forward if src == action.stage)
        if action.peer == last:
            del self._state.values[action.micro]

    def _receive_values(self, action: Action, given: StepInput) -> None:
        assert action.peer is not None
        names = self._forward[action.peer, action.stage]
        self._state.values[action.micro].update(zip(names, self._take(action.peer), strict=True))

    def _send_grads(self, action: Action, given: StepInput) -> None:
        assert action.peer is not None
        names = self._backward[action.stage, action.peer]
        back = self._state.back[action.micro]
        self._outboxes[self._program.stage_ranks[action.peer]].send([back.pop(name) for name in names])
        if not back:
            del self._state.back[action.micro]

    def _receive_grads(self, action: Action, given: StepInput) -> None:
        assert action.peer is not None
        grads = self._state.grads[action.micro]
        for name, grad in zip(self._backward[action.peer, action.stage], self._take(action.peer), strict=True):
            grads[name] = grads[name] + grad if name in grads else grad

    def _sum_tied(self, action: Action, given: StepInput) -> None:
        self._tied.reduce()

    def _take(self, stage: int) -> list[torch.Tensor]:
        peer = self._program.stage_ranks[stage]
        tensors = self._inboxes[peer].receive()
        self._state.received[peer] += 1
        if peer in self._outboxes:
            self._outboxes[peer].acknowledge(self._acks[peer][self._state.received[peer] - 1])
        return tensors

    def _blame(self, error: Exception, action: Action) -> AutopartError:
        if isinstance(error, AutopartError):
            return error
        op = self._ops.get(failing_op(error) or "")
        where = f"module {op.module}, {op.target} at {op.where}" if op else ""
        phase = "forward" if action.kind == "F" else "backward"
        return StageError(
            f"stage {action.stage}, micro-batch {action.micro}, {phase}: {type(error).__name__}",
            where=", ".join(part for part in (f"rank {self._world.rank}", where) if part),
            why=(str(error).splitlines() or [""])[0],
        )


@dataclass(frozen=True)
class StepResult:
    """On the rank that computes it: losses by micro-batch (0-dim, unweighted).  results: in evaluation, what the stage
    returned, by micro-batch and value name."""

    losses: dict[int, torch.Tensor]
    results: dict[int, dict[str, torch.Tensor]]


class _State:
    """Values on their way in one step."""

    def __init__(self, given: StepInput, train: bool) -> None:
        self.train = train
        self.values: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
        self.grads: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
        self.back: dict[int, dict[str, torch.Tensor]] = {}
        self.losses: dict[int, torch.Tensor] = {}
        self.results: dict[int, dict[str, torch.Tensor]] = {}
        self.received: dict[int, int] = defaultdict(int)


def _rank_pairs(program: Program) -> list[tuple[int, int]]:
    pairs: dict[tuple[int, int], None] = {}
    for edge in program.edges:
        a, b = program.stage_ranks[edge.src], program.stage_ranks[edge.dst]
        pairs[a, b] = None
        if edge.grads:
            pairs[b, a] = None
    return list(pairs)


def _acknowledgements(program: Program, me: int) -> dict[int, list[int]]:
    """acks[peer][k]: when the k-th message of `peer` has arrived, it has consumed that many of mine.

    Known before the run, from the peer's own list of actions: sends can be released without ever blocking on one.
    """
    acks: dict[int, list[int]] = {}
    for peer, actions in enumerate(program.ranks):
        consumed, counts = 0, []
        for action in actions:
            if action.peer is None or program.stage_ranks[action.peer] != me:
                continue
            if action.kind[0] == "R":
                consumed += 1
            else:
                counts.append(consumed)
        acks[peer] = counts
    return acks


_PHASES = {"F": "forward", "B": "backward", "SF": "sending", "RF": "receiving", "SB": "sending", "RB": "receiving"}


def _activity(action: Action) -> str:
    if action.kind == "T":
        return f"{action}: summing tied gradients"
    return f"{action}: {_PHASES[action.kind]} of micro-batch {action.micro}"

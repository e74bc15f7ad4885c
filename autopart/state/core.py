"""What all parts of one pipe share, and what a part may do while the pipe runs.

A part is one object for one pipe that has a few verbs of users (`autopart.pipe.rows`) and gets the core.  Parts do not
know each other: what one tells the others goes through the core.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from autopart.capture import CaptureCache
from autopart.ir.cluster import Cluster
from autopart.ir.errors import UsageError
from autopart.ir.graph import Graph
from autopart.ir.plan import Plan
from autopart.ir.timeline import Timeline
from autopart.options import Options
from autopart.session.ranks.listener import Listener
from autopart.session.session import Session
from autopart.session.step.data import Arguments
from autopart.state.companions import Companion
from autopart.state.misuse_guards import watch_optimizers
from autopart.state.scaler import LossScaler
from autopart.state.state_dict import take_masters
from autopart.state.torch_calls import Open, notice

P = TypeVar("P", bound="Part")
NO_PARAMETER = "no_parameter_on_this_rank"
"""The name of the empty parameter that a rank without trainable parameters yields."""
_NUMBERS = itertools.count(1)
_TRAINED: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""For each model, the number of the newest pipe that has trained it."""


class Part:
    """A part of a pipe.  What is below is called on every rank, in the order of the rows, and does nothing here."""

    def __init__(self, core: Core) -> None:
        self.core = core

    @property
    def listeners(self) -> Sequence[Listener]:
        """What hears of the session from its first call on."""
        return ()

    def now(self, cluster: Cluster) -> Cluster:
        """Return the cluster with its devices as they are found to be now.  Called before another plan is made."""
        return cluster

    def replanned(self) -> None:
        """Follow a plan for the cluster as `now` found it, which runs now."""

    def around_step(self, session: Session, batch: Sequence[Any]) -> AbstractContextManager[None]:
        """Return a context in which a training step runs.  batch: its arguments."""
        return nullcontext()

    def batch_taken(self) -> None:
        """Note that a batch was taken from the user's iterable, before it is given to the pipeline."""

    def batch_given(self) -> None:
        """Note that the batch which was taken first is given to the pipeline."""

    def batches_dropped(self) -> None:
        """Note that batches which were taken and not given will come again."""


class Core:
    """What all parts of one pipe share.

    running: the session, None before the first plan and after `close`.  placeholder: the parameter of a rank that
    trains none.  steps: training steps taken.  synced: those after which the model had all values.  warned: of a
    loss that is not finite.  skipped: how many in a row added no gradients.  clipped: the step after
    which gradients were clipped, and their norm before.  restored: fp32 masters of a state that was loaded before the
    first plan.  companions: what checkpoints keep besides, by name.  whole: whether the model has the values of all
    ranks.  timeline: the last one of all ranks, with the plan under which it ran.  unwatch: ends the check of
    optimizers.  parts: by kind; whoever knows what happens calls what they hear of it.
    """

    def __init__(self, captures: CaptureCache, cluster: Cluster, options: Options) -> None:
        self.captures, self.cluster, self.options = captures, cluster, options
        self.running: Session | None = None
        self.placeholder = nn.Parameter(torch.empty(0))
        self.steps = self.skipped = 0
        self.synced = 0
        self.warned = False
        self.clipped: tuple[int, float] = (-1, 0.0)
        self.loss_scale = LossScaler()
        self.restored: Mapping[str, torch.Tensor] = {}
        self.companions: dict[str, Companion] = {}
        self.closed = self.whole = self.stopped = False
        self.timeline: tuple[Plan, Timeline] | None = None
        self.unwatch: Callable[[], None] = lambda: None
        self.parts: dict[type[Part], Part] = {}
        self._number = next(_NUMBERS)
        self._at_close: tuple[int, Plan, Graph] | None = None

    def add(self, kinds: Sequence[type[Part]]) -> None:
        """Make a part of each kind."""
        self.parts.update((kind, kind(self)) for kind in kinds)

    def part(self, kind: type[P]) -> P:
        """Return the part of this kind."""
        found = self.parts[kind]
        assert isinstance(found, kind)
        return found

    @property
    def model(self) -> nn.Module:
        """The model that was compiled."""
        return self.captures.model

    @property
    def session(self) -> Session:
        """The session of this rank.  Raises UsageError before the pipeline has been planned, and after its end."""
        self.require_open()
        if self.running is None:
            raise UsageError(
                "the pipeline has not been planned yet",
                why="compile was called without a sample, and no step has run",
                fix="pass sample=batch to compile, or call step(batch) first",
            )
        return self.running

    @property
    def facts(self) -> tuple[int, Plan, Graph]:
        """(rank, plan, graph), also after `close`."""
        if self._at_close is not None:
            return self._at_close
        session = self.running or self.session  # the latter says what is missing
        return session.world.rank, session.plan, session.graph

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scaler in fp16, None in another precision."""
        return self.loss_scale if self.facts[1].provenance.precision == "fp16" else None

    @property
    def superseded(self) -> bool:
        """Whether a newer pipe of the same model has trained."""
        return _TRAINED.get(self.model, 0) > self._number

    def require_open(self) -> None:
        """Raise UsageError for a pipe that takes no calls."""
        if self.whole:
            raise UsageError(
                "the pipe is used inside pipe.full_parameters()",
                why="the model has copies of all values there, and ranks would run with these",
                fix="end the block first",
            )
        if self.closed:
            raise UsageError(
                "the pipe is closed",
                fix="compile the model again: it holds the trained values, so that training goes on from there",
            )
        if self.superseded:
            raise UsageError(
                "another pipe of this model, compiled later, has trained it",
                why="this pipe's ranks may hold older values than those of the later one",
                fix="close this pipe; next time close it before the model is compiled again",
            )

    def bring_up(self, arguments: Arguments, *, sharded: bool = False) -> Session:
        """Make the session, with a plan for the batch of these arguments.  Collective."""
        session = Session(self.captures, self.cluster, self.options)
        for part in self.parts.values():
            session.calls.listeners += part.listeners
        session.bring_up(arguments, sharded=sharded)
        self.running = session
        take_masters(session, self.restored)
        opened = Open(
            self.model,
            held=lambda: session.tensors.driven.values(),
            ours=lambda: (*dict(self.named_parameters()).values(), *self.model.parameters()),
            parted=lambda: session.standing.divides_parameters,
            idle=lambda: not (self.whole or session.calls.under_way),
            stale=lambda: self.steps > self.synced,
        )
        session.calls.listeners.append(opened)
        watches = ExitStack()
        watches.callback(notice(opened))
        watches.callback(
            watch_optimizers(
                session.world.size,
                lambda: session.tensors,
                lambda: {id(p) for _, p in self.named_parameters()},
                opened.stepped,
            )
        )
        self.unwatch = watches.close
        return session

    def now(self) -> Cluster:
        """Return the cluster with its devices as they are found to be now."""
        cluster = self.cluster
        for part in self.parts.values():
            cluster = part.now(cluster)
        return cluster

    @contextmanager
    def around_step(self, session: Session, batch: Sequence[Any]) -> Iterator[None]:
        """Let all parts look at a training step while it runs."""
        with ExitStack() as around:
            for part in self.parts.values():
                around.enter_context(part.around_step(session, batch))
            yield

    def count_step(self) -> None:
        """Count a training step that was run."""
        self.steps += 1
        _TRAINED[self.model] = self._number
        self.session.world.stepped = True

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what this rank's optimizer updates, under the names of the model (`Pipe.named_parameters`)."""
        if self.running is None:
            yield from self.captures.trained.named_parameters()
            return
        driven, keeps = self.running.tensors.driven, self.running.standing.keeps
        held = [(name, t) for name, t in driven.items() if isinstance(t, nn.Parameter) and keeps(name)]
        yield from held
        if not any(parameter.requires_grad for _, parameter in held):
            self.placeholder.requires_grad_(True)
            yield NO_PARAMETER, self.placeholder

    def end(self) -> Session | None:
        """Take no further call; return the session that ran, None if there was none or it has ended before."""
        self.unwatch()
        session, self.closed = self.running, True
        if session is not None:
            self._at_close, self.running = self.facts, None
        return session

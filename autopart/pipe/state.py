"""The parameters and the state of a pipe, under the names of the model that was compiled."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import nn

from autopart.capture import CaptureCache
from autopart.extras.asynchronous.limits import refuse_in_training
from autopart.ir.errors import UsageError
from autopart.ir.graph import Graph
from autopart.ir.plan import Plan
from autopart.runtime.activity import current
from autopart.session.ranks.agreement import from_rank
from autopart.session.session import Session
from autopart.state.companions import Companion
from autopart.state.full_parameters import full_parameters
from autopart.state.misuse_guards import refuse_clipping, short_tracebacks
from autopart.state.module_surface import ModuleSurface
from autopart.state.scaler import LossScaler
from autopart.state.state_dict import (
    clip_gradients,
    gather_gradients,
    load_state,
    local_state,
    remembered,
    sync_state,
    whole_state,
)

NO_PARAMETER = "no_parameter_on_this_rank"
"""The name of the empty parameter that a rank without trainable parameters yields."""
_NUMBERS = itertools.count(1)
_TRAINED: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""For each model, the number of the newest pipe that has trained it."""


@short_tracebacks
class PipeState(ModuleSurface):
    """Parameters, gradients and state of a pipe, and the session that holds them.

    companions: what checkpoints keep besides, by name.
    """

    def __init__(self, captures: CaptureCache) -> None:
        self._captures = captures
        self._session: Session | None = None
        self._placeholder = nn.Parameter(torch.empty(0))
        self._steps = 0
        self._skipped_in_a_row = 0
        self._clipped: tuple[int, float] = (-1, 0.0)
        self._scaler = LossScaler()
        self._number = next(_NUMBERS)
        self._restored: Mapping[str, torch.Tensor] = {}
        self.companions: dict[str, Companion] = {}
        self._closed = self._whole = self._stopped = False
        self._at_close: tuple[int, Plan, Graph] | None = None

    @property
    def session(self) -> Session:
        """The session of this rank, for tools and checks.  Raises UsageError before the pipeline has been planned."""
        self._require_open()
        if self._session is None:
            raise UsageError(
                "the pipeline has not been planned yet",
                why="compile was called without a sample, and no step has run",
                fix="pass sample=batch to compile, or call step(batch) first",
            )
        return self._session

    @property
    def _facts(self) -> tuple[int, Plan, Graph]:
        """(rank, plan, graph), also after `close`."""
        if self._at_close is not None:
            return self._at_close
        session = self._session or self.session  # the latter says what is missing
        return session.world.rank, session.plan, session.graph

    @property
    def plan(self) -> Plan:
        """The plan that runs; after `close` the last one."""
        return self._facts[1]

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scaler in fp16, equal on every rank and kept by `state_dict`; None in another precision."""
        return self._scaler if self.plan.provenance.precision == "fp16" else None

    def _require_open(self) -> None:
        if self._whole:
            raise UsageError(
                "the pipe is used inside pipe.full_parameters()",
                why="the model has copies of all values there, and ranks would run with these",
                fix="end the block first",
            )
        if self._closed:
            raise UsageError(
                "the pipe is closed",
                fix="compile the model again: it holds the trained values, so that training goes on from there",
            )
        if self._superseded:
            raise UsageError(
                "another pipe of this model, compiled later, has trained it",
                why="this pipe's ranks may hold older values than those of the later one",
                fix="close this pipe; next time close it before the model is compiled again",
            )

    def _mark_trained(self) -> None:
        _TRAINED[self.model] = self._number
        self.session.world.stepped = True

    @property
    def _superseded(self) -> bool:
        """Whether a newer pipe of the same model has trained."""
        return _TRAINED.get(self.model, 0) > self._number

    @property
    def stop_requested(self) -> bool:
        """Whether a rank was asked to stop by SIGTERM or SIGUSR1, or all to make room for ranks that join; True on all
        ranks after the same call, also after `close`.  While a pipe runs, the first SIGTERM does not end its process:
        save, and leave the loop."""
        stopped = self._stopped if self._session is None else self._session.world.stop_requested
        if stopped and current().asked:
            current().heeded = 1
        return stopped

    # -- like a module ------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The model that was compiled.  Parameters that other ranks train are stale until `sync_model` or `close`."""
        return self._captures.model

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self.model.training

    def train(self, mode: bool = True) -> Self:
        """Set the training flags of the model; the next step follows them.  Call it on every rank.  `eval_loss` and
        `predict` need no eval(): they run in eval mode."""
        self.model.train(mode)
        return self

    def eval(self) -> Self:
        """Call `train(False)`."""
        return self.train(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of this rank's parameters, as the optimizer's zero_grad() does."""
        for parameter in self.parameters():
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.detach_().zero_()

    # -- parameters ----------------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters under their original names: those that its optimizer updates.

        Tied ones have the first name; with zero=1 only those that this rank owns are yielded.  Before the first step of
        a pipe without a sample, all parameters of the model are.  A rank without trainable ones (idle, with the loss or
        with frozen layers alone) also yields an empty one that is, since torch's optimizers refuse an empty list.
        """
        if self._session is None:
            yield from self._captures.trained.named_parameters()
            return
        driven, keeps = self._session.tensors.driven, self._session.standing.keeps
        held = [(name, t) for name, t in driven.items() if isinstance(t, nn.Parameter) and keeps(name)]
        yield from held
        if not any(parameter.requires_grad for _, parameter in held):
            self._placeholder.requires_grad_(True)
            yield NO_PARAMETER, self._placeholder

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield `named_parameters` without the names.  Clip with `pipe.clip_grad_norm_`: torch's function would use the
        norm of this rank's gradients alone, and is refused."""
        if self._session is not None and self._session.standing.divides_parameters:
            refuse_clipping(sys._getframe(1))
        for _, parameter in self.named_parameters():
            yield parameter

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's buffers under their original names."""
        held = self._session.tensors.held if self._session is not None else {}
        for name, buffer in self._captures.trained.named_buffers():
            if self._session is None or name in held:
                yield name, held.get(name, buffer)

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Return the gradient of every trainable parameter by original name, tied ones once, on every rank, on the CPU.
        A missing one is None, a sparse one is dense.  Sends the size of the model: meant for checks."""
        with self.session.call("gradients") as session:
            return gather_gradients(session)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their global norm over all stages is at most max_norm; tied parameters count
        once.  Returns the norm before, on every rank, like torch.nn.utils.clip_grad_norm_."""
        if norm_type <= 0:
            raise UsageError(f"norm_type is {norm_type}", fix="use a positive number or float('inf')")
        refuse_in_training(self.plan, "clipping by the norm of all gradients")
        with self.session.call("clip_grad_norm_") as session:
            norm = clip_gradients(session, max_norm, norm_type)
        if norm_type == 2:
            self._clipped = self._steps, float(norm)
        return norm

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what the model's own `state_dict` makes of the values of all ranks, on every rank, on the CPU.

        Its own load_state_dict accepts it.  It also holds `steps`, the loss scale and fp32 master weights, which
        torch.save keeps."""
        with self.session.call("state_dict") as session:
            more = {"scaler": self.scaler.state_dict()} if self.scaler is not None else {}
            return whole_state(session, steps=self._steps, **more)

    def local_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of `state_dict`, on the CPU; also after a step that failed.  Not collective.

        It holds what this rank trains, and what no rank trains, by the names of parameters and buffers, without hooks
        of the model.  The parts of all ranks together are the whole state: `{**part0, **part1}`.  After an error in
        the script itself, parts may be one optimizer step apart.
        """
        return local_state(self.session, self._steps)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
        """Load a state of the model, the same on every rank, and what else `state_dict` keeps, such as `steps`.

        Returns the names that are missing and those that are unexpected, like torch; with strict both raise UsageError.
        Nothing changes when a name or a shape does not fit (UsageError).
        """
        self._require_open()
        keys = load_state(self._captures.trained, self._session, state, strict=strict)
        more = remembered(state)
        self._restored = more.get("masters", {})
        self.steps = more.get("steps", self._steps)
        if "scaler" in more:
            self._scaler.load_state_dict(more["scaler"])
        return keys

    def sync_model(self) -> None:
        """Copy the trained values into the model that was compiled, on every rank, so that `model.state_dict()` and
        `model.save_pretrained(...)` have them.  Collective; `close` does it too."""
        with self.session.call("sync_model") as session:
            sync_state(session)

    def save_pretrained(self, folder: str | os.PathLike[str], **options: Any) -> None:
        """Copy the trained values into the model, as `sync_model` does, and call its own `save_pretrained` on rank 0.
        Collective; the folder is complete on that host when it returns.

        options: of the model's method.  Raises UsageError for a model without it, and on all ranks what it raises."""
        save = getattr(self.model, "save_pretrained", None)
        if save is None:
            raise UsageError(
                f"{type(self.model).__name__} has no save_pretrained",
                why="it is a method of models of transformers and diffusers",
                fix="pipe.save(folder), or state = pipe.state_dict() on every rank and torch.save(state, file) on one",
            )

        def written() -> None:
            save(folder, **options)

        with self.session.call("save_pretrained") as session:
            sync_state(session)
            from_rank(session.world, 0, "saving the model", written)

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        """Have the whole model's current values in `model` inside, on every rank: for logging, norms and generation.

        Entering is collective; no step runs inside.  Needs memory for the model, given back at the end.  What is
        written to parameters or buffers inside is lost, and raises UsageError at the end; training goes on exactly.
        """
        with full_parameters(self.session):
            self._whole = True
            try:
                yield
            finally:
                self._whole = False

    @property
    def steps(self) -> int:
        """Training steps taken, part of the key of random numbers.  Set it to resume from a state without it."""
        return self._steps

    @steps.setter
    def steps(self, count: int) -> None:
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise UsageError(f"steps is {count!r}", fix="use the number of steps that were taken, an integer")
        self._steps = count

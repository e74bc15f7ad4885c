"""Averages of the weights that a rank keeps, with torch's own arithmetic, saved and loaded with checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, Self

import torch
from torch import nn
from torch.optim import swa_utils

from autopart.files.checkpoints.document import AVERAGES
from autopart.ir.errors import UsageError
from autopart.passes.program.schedules import find, streams
from autopart.session.ranks.listener import Listener
from autopart.session.session import Session
from autopart.state.companions import refusal, require_integer
from autopart.state.core import Core
from autopart.state.misuse_guards import MissingError, short_tracebacks
from autopart.state.module_surface import ModuleSurface

Average = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | int], torch.Tensor]
Tensors = tuple[torch.Tensor, ...] | list[torch.Tensor]
Averages = Callable[[Tensors, Tensors, torch.Tensor | int], None]
_CHANGING = ("step", "train", "load", "adopt")
"""Calls that would change or move parameters which hold averages."""


_STATE = "pipe.save and pipe.load keep averages; their weights: with averaged.applied(): state = pipe.state_dict()"
_INSTEAD = {
    **dict.fromkeys(("state_dict", "load_state_dict"), _STATE),
    **dict.fromkeys(("module", "parameters", "named_parameters"), "with averaged.applied(): pipe.named_parameters()"),
    "train": "leave it out: a call runs in eval mode, and pipe.train() is of the pipe",
}
"""What to use instead of what torch's AveragedModel has as a module."""


class Averageable(Protocol):
    """What averages need of a pipe: this room lies below that of `Pipe`."""

    _core: Core

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's buffers."""

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns in eval mode."""


class _Kept(nn.Module):
    """The parameters and buffers that a rank keeps, as a module that torch's AveragedModel can copy and walk."""

    def __init__(self, parameters: Iterable[nn.Parameter], buffers: Iterable[torch.Tensor]) -> None:
        super().__init__()
        for number, parameter in enumerate(parameters):
            self.register_parameter(f"parameter{number}", parameter)
        for number, buffer in enumerate(buffers):
            self.register_buffer(f"buffer{number}", buffer)


@short_tracebacks
class AveragedModel(Listener):
    """Averages of a pipe's weights: updated and called as `torch.optim.swa_utils.AveragedModel`, but no module.

    In place of its `module`, `parameters` and `state_dict`, `with averaged.applied():` puts averages into the pipe, and
    `pipe.state_dict()` returns them there.

        averaged = autopart.AveragedModel(pipe, multi_avg_fn=get_ema_multi_avg_fn(0.999))
        ...; optimizer.step(); averaged.update_parameters()
        with averaged.applied():
            loss = pipe.eval_loss(batch)

    Each rank averages what its optimizer updates (`pipe.named_parameters`): fp32 masters where they exist, with ZeRO
    its own share.  Buffers are those of the last update, or averages with use_buffers.  Make it on every rank.
    `pipe.save` and `pipe.load` keep it, also for another plan; `pipe.adopt` is refused.  Bytes: those of the
    parameters and buffers that this rank keeps.

    avg_fn, multi_avg_fn, use_buffers: as in torch; the arithmetic is torch's own.  n_averaged: updates so far.

    Raises UsageError for both functions at once, for a pipe that has not been planned yet, and under asynchronous
    schedules, whose stages are not at the same update.
    """

    def __init__(
        self,
        pipe: Averageable,
        *,
        avg_fn: Average | None = None,
        multi_avg_fn: Averages | None = None,
        use_buffers: bool = False,
    ) -> None:
        if not isinstance(pipe, ModuleSurface):
            raise UsageError(
                f"AveragedModel was given a {type(pipe).__name__}",
                fix="pass the pipe that autopart.compile returned; for a plain model use torch's AveragedModel",
            )
        if avg_fn is not None and multi_avg_fn is not None:
            raise UsageError("avg_fn and multi_avg_fn were both given", where="AveragedModel", fix="pass one of them")
        core = pipe._core
        session = core.session
        if streams(find(session.plan.schedule)):
            raise UsageError(
                f"AveragedModel has no meaning under schedule {session.plan.schedule}",
                why="each stage updates its weights by itself, so there is no moment at which all are at one update",
                fix="use a synchronous schedule, such as schedule='1f1b'",
            )
        self._core, self._pipe = core, pipe
        parameters, buffers = dict(core.named_parameters()), dict(pipe.named_buffers())
        self._kept = _Kept(parameters.values(), buffers.values())
        self._averaged = swa_utils.AveragedModel(
            self._kept, avg_fn=avg_fn, multi_avg_fn=multi_avg_fn, use_buffers=use_buffers
        )
        copies = self._averaged.module
        live = [*parameters.items(), *buffers.items()]
        averages = [*copies.parameters(), *copies.buffers()]
        self._pairs = {name: (tensor, average) for (name, tensor), average in zip(live, averages, strict=True)}
        self._inside = False
        session.calls.listeners.append(self)
        title = AVERAGES
        while title in core.companions:
            first, _, number = title.partition("-")
            title = f"{first}-{int(number or 1) + 1}"
        core.companions[title] = self

    def __getattr__(self, name: str) -> Any:
        if name not in _INSTEAD:
            raise AttributeError(f"'AveragedModel' object has no attribute {name!r}")
        raise MissingError(f"averages of a pipe have no attribute {name!r}", fix=_INSTEAD[name])

    @property
    def n_averaged(self) -> torch.Tensor:
        """How many updates the averages hold, as in torch a number in a tensor."""
        return self._averaged.n_averaged

    def update_parameters(self, pipe: Averageable | None = None) -> None:
        """Take the present weights into the averages.  Call it on every rank, after `optimizer.step()`; not collective.

        pipe: may be passed as torch's scripts pass the model; it has to be the pipe that is averaged.
        """
        if pipe is not None and pipe is not self._pipe:
            raise UsageError(
                "update_parameters was given another object than the pipe that is averaged",
                fix="call update_parameters() or update_parameters(pipe); make an AveragedModel for each pipe",
            )
        self._require_outside("update_parameters")
        self._require_all()
        self._averaged.update_parameters(self._kept)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns in eval mode with the averages, on every rank: `Pipe.predict` inside `applied`.
        Collective.  For many batches enter `applied` once."""
        with self.applied():
            return self._pipe.predict(*args, **kwargs)

    def eval(self) -> Self:
        """Return itself, for torch's scripts: a call runs in eval mode, whatever mode the pipe trains in."""
        return self

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Have the averages in the pipe's parameters and buffers inside, and the trained values again afterwards.

        Enter it on every rank.  Inside, `eval_loss`, `predict`, `state_dict`, `sync_model` and `save` see the averages;
        steps, `load` and `adopt` are refused.  After a `close` inside the model keeps the averages.  Needs memory for a
        second copy of what this rank keeps.  Raises UsageError at the end if a parameter was written to inside, as by
        an optimizer; the trained values are back then.
        """
        session = self._core.session
        self._require_outside("applied")
        session.tensors.masters.check()
        self._require_all()
        trained = {name: live.detach().clone() for name, (live, _) in self._pairs.items()}
        self._inside = True
        written: str | None = None
        try:
            self._put(session, {name: average for name, (_, average) in self._pairs.items()})
            yield
            written = None if self._core.closed else self._written()
        finally:
            self._inside = False
            if not self._core.closed:
                self._put(session, trained)
        if written is not None:
            raise UsageError(
                f"{written} was written to inside averaged.applied()",
                why="the parameters hold averages there, so the write is lost; training goes on with the values before",
                fix="write to parameters, load states and step optimizers outside the block",
            )

    def before_call(self, name: str) -> BaseException | None:
        """Refuse what would change or move the averages."""
        if self._inside and name in _CHANGING:
            return _inside(f"pipe.{name}")
        if name != "adopt":
            return None
        return UsageError(
            "pipe.adopt is called while the weights are averaged (AveragedModel)",
            why="the averages of each parameter lie on the ranks that keep it under the present plan",
            fix="pipe.save(folder, optimizer), close the pipe, compile with the other plan, make the AveragedModel and "
            "pipe.load(folder, optimizer): averages and optimizer state move with the checkpoint",
        )

    def _require_outside(self, call: str) -> None:
        """Raise UsageError if some averages of this pipe are in its parameters."""
        if any(isinstance(each, AveragedModel) and each._inside for each in self._core.session.calls.listeners):
            raise _inside(call)

    def _written(self) -> str | None:
        """Return the first parameter whose value differs from its average; torch's version counter would also count
        `sync_model`, which writes the same values."""
        for name, parameter in self._core.named_parameters():
            average = self._pairs[name][1].detach() if name in self._pairs else parameter.detach()
            if not torch.allclose(parameter.detach(), average, rtol=0, atol=0, equal_nan=True):
                return name
        return None

    def _put(self, session: Session, values: Mapping[str, torch.Tensor]) -> None:
        """Write values into the parameters and buffers of this rank, in place.  One that is equal is not touched, so
        that a buffer that never changes does not look changed."""
        with torch.no_grad():
            for name, value in values.items():
                live = self._pairs[name][0]
                if not torch.equal(live, value):
                    live.copy_(value)
        session.tensors.masters.write()

    def _require_all(self) -> None:
        """Raise UsageError if this rank trains a parameter that is not averaged."""
        for name, parameter in self._core.named_parameters():
            if parameter.requires_grad and parameter.numel() and name not in self._pairs:
                raise UsageError(
                    f"{name} is trained now, and was not used by any stage when AveragedModel was made",
                    why="a batch of another kind brought it in, and its earlier values are not in the averages",
                    fix="run a batch of each kind first (pipe.eval_loss), then make the AveragedModel",
                )

    # -- with checkpoints (`companions.Companion`) ---------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the number of updates."""
        return {"n_averaged": int(self.n_averaged)}

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return this rank's averages by name; nobody writes that of the empty parameter of a rank without any."""
        return {name: average.detach() for name, (_, average) in self._pairs.items()}

    def check(self, state: Any) -> None:
        """Raise CheckpointError for a state without the number of averaged values."""
        if not isinstance(state, dict):
            raise refusal("the state of the averages", state, "it has to be a dict")
        require_integer(state.get("n_averaged"), "n_averaged of the averages")

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over the averages of a checkpoint; what it has none of, such as a buffer that is not persistent, gets
        the present value."""
        with torch.no_grad():
            for name, (live, average) in self._pairs.items():
                average.copy_(tensors.get(name, live))
            self.n_averaged.fill_(state["n_averaged"])


def _inside(call: str) -> UsageError:
    return UsageError(
        f"{call} is called inside averaged.applied()",
        why="the parameters hold the averages there, and get the trained values back at its end",
        fix="end the block first",
    )

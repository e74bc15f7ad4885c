"""Gradients and state of a pipe, under the names of the model that was compiled."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from autopart.ir.errors import UsageError
from autopart.session.ranks.agreement import from_rank
from autopart.state.core import Part
from autopart.state.misuse_guards import refuse_in_training
from autopart.state.state_dict import (
    clip_gradients,
    full_parameters,
    gather_gradients,
    load_state,
    local_state,
    remembered,
    sync_state,
    whole_state,
)


class State(Part):
    """Gradients and state of a pipe, and the number of its steps."""

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Return the gradient of every trainable parameter by original name, tied ones once, on every rank, on the CPU.
        A missing one is None, a sparse one is dense.  Sends the size of the model: meant for checks."""
        with self.core.session.call("gradients") as session:
            return gather_gradients(session)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their global norm over all stages is at most max_norm; tied parameters count
        once.  Returns the norm before, on every rank, like torch.nn.utils.clip_grad_norm_."""
        if not isinstance(max_norm, int | float | torch.Tensor) or not max_norm >= 0:
            raise UsageError(
                f"max_norm is {f'a {type(max_norm).__name__}' if not isinstance(max_norm, int | float) else max_norm}",
                why="a pipe clips the gradients of all its parameters, of all ranks",
                fix="pipe.clip_grad_norm_(1.0), without parameters",
            )
        if norm_type <= 0:
            raise UsageError(f"norm_type is {norm_type}", fix="use a positive number or float('inf')")
        refuse_in_training(self.core.facts[1], "clipping by the norm of all gradients")
        with self.core.session.call("clip_grad_norm_") as session:
            norm = clip_gradients(session, max_norm, norm_type)
        if norm_type == 2:
            self.core.clipped = self.core.steps, float(norm)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Return what the model's own `state_dict` makes of the values of all ranks, on every rank, on the CPU.

        Its own load_state_dict accepts it.  It also holds `steps`, the loss scale and fp32 master weights, which
        torch.save keeps."""
        with self.core.session.call("state_dict") as session:
            more = {"scaler": self.core.scaler.state_dict()} if self.core.scaler is not None else {}
            return whole_state(session, steps=self.core.steps, **more)

    def local_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of `state_dict`, on the CPU; also after a step that failed.  Not collective.

        It holds what this rank trains, and what no rank trains, by the names of parameters and buffers, without hooks
        of the model.  The parts of all ranks together are the whole state: `{**part0, **part1}`.  After an error in
        the script itself, parts may be one optimizer step apart.
        """
        return local_state(self.core.session, self.core.steps)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
        """Load a state of the model, the same on every rank, and what else `state_dict` keeps, such as `steps`.

        Returns the names that are missing and those that are unexpected, like torch; with strict both raise UsageError.
        Nothing changes when a name or a shape does not fit (UsageError).
        """
        self.core.require_open()
        keys = load_state(self.core.captures.trained, self.core.running, state, strict=strict)
        more = remembered(state)
        self.core.restored = more.get("masters", {})
        self.set_steps(more.get("steps", self.core.steps))
        if "scaler" in more:
            self.core.loss_scale.load_state_dict(more["scaler"])
        return keys

    def sync_model(self) -> None:
        """Copy the trained values into the model that was compiled, on every rank, so that `model.state_dict()` and
        `model.save_pretrained(...)` have them.  Collective; `close` does it too."""
        with self.core.session.call("sync_model") as session:
            sync_state(session)
        self.core.synced = self.core.steps

    def save_pretrained(self, /, folder: str | os.PathLike[str], **options: Any) -> None:
        """Copy the trained values into the model, as `sync_model` does, and call its own `save_pretrained` on rank 0.
        Collective; the folder is complete on that host when it returns.

        options: of the model's method.  Raises UsageError for a model without it, and on all ranks what it raises."""
        save = getattr(self.core.model, "save_pretrained", None)
        if save is None:
            raise UsageError(
                f"{type(self.core.model).__name__} has no save_pretrained",
                why="it is a method of models of transformers and diffusers",
                fix="pipe.save(folder), or state = pipe.state_dict() on every rank and torch.save(state, file) on one",
            )

        def written() -> None:
            save(folder, **options)

        with self.core.session.call("save_pretrained") as session:
            sync_state(session)
            self.core.synced = self.core.steps
            from_rank(session.world, 0, "saving the model", written)

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        """Have the whole model's current values in `model` inside, on every rank: for logging, norms and generation.

        Entering is collective; no step runs inside.  Needs memory for the model, given back at the end.  What is
        written to parameters or buffers inside is lost, and raises UsageError at the end; training goes on exactly.
        """
        with full_parameters(self.core.session):
            self.core.whole = True
            try:
                yield
            finally:
                self.core.whole = False

    def set_steps(self, count: int) -> None:
        """Set the number of training steps that were taken."""
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise UsageError(f"steps is {count!r}", fix="use the number of steps that were taken, an integer")
        self.core.steps = count

"""One model's captures, each made once: by mode, shape of the batch and size; and whether the model is still theirs."""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import replace

import torch
from torch import nn

from autopart.capture.batch.batch import Batch
from autopart.capture.batch.questions import Questions
from autopart.capture.capture import Captured, capture
from autopart.capture.guards import CaptureWarning, check_model
from autopart.capture.habits.autocast import Autocast, autocast_for
from autopart.capture.trace.export import LossFn
from autopart.capture.trained import Trained
from autopart.capture.watch.changes import Watch, check_tensors, tensors_of
from autopart.capture.watch.observed import Observed
from autopart.ir.errors import UsageError
from autopart.ir.plan import Precision
from autopart.ir.size import Size

_KEEP = 32  # captures; a batch of a new shape every step must not fill the memory
_NAMED = 3  # changes that a message names
_MANY = 8  # captures of one kind of batch that differ in what the model's Python reads from the batch


class CaptureCache:
    """Captures of `model` as it stands; `refresh` says whether they still are of it.

    autocast: that the model and its loss run in (`run_in`).  trained: the model, and a loss function that has
    parameters.  version: a digest of every change that was seen, equal on ranks whose models changed alike, and
    the last changes in words.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn | None = None) -> None:
        self.model = check_model(model)
        if isinstance(loss_fn, nn.Module):
            check_model(loss_fn)
        self.trained = Trained(model, loss_fn)
        self.autocast: Autocast | None = None
        self.version = ""
        self._loss_fn = loss_fn
        self._observed = Observed()
        self._flags: dict[nn.Module, bool] = {}
        self._watches: list[Watch] = []
        self._tensors: dict[str, tuple[str, torch.Tensor]] = {}
        self._made: dict[tuple[object, ...], Captured] = {}
        self._asked: dict[tuple[object, ...], list[Questions]] = {}

    def run_in(self, precision: Precision, device_type: str) -> None:
        """Capture from now on for a precision on devices of a type.  Raises UsageError when there are captures of
        another: what runs holds tensors and messages of that."""
        autocast = autocast_for(precision, device_type)
        if self._made and autocast != self.autocast:
            raise UsageError(
                f"the plan is for {precision}, and the pipeline runs in another precision",
                fix="close the pipe, and compile with this plan",
            )
        self.autocast = autocast

    def __call__(self, batch: Batch, size: Size, mode: str = "step") -> Captured:
        """The capture for micro-batches of `size` of `batch`, or of one like it; modes as in `capture`."""
        batch = self.judged(batch, mode)
        key = (mode, size, batch.signature())
        if key not in self._made:
            captured = capture(
                self.model, batch, size=size, loss_fn=self._loss_fn, mode=mode,
                whole=lambda: self(batch, Size(batch.rows or 1), mode), autocast=self.autocast,
            )  # fmt: skip
            self._tensors = self._tensors or tensors_of(self.trained)
            if captured.questions is not None:
                key = (mode, size, self._noted(batch, mode, captured.questions).signature())
            self._made[key] = captured
            self._observed.update(captured.observed)
            if mode == "step":
                self._flags = self._flags_read()
            self._watches = [Watch(self.model, self._observed, self._flags)]
            if self.trained.loss_fn is not None:
                self._watches.append(Watch(self.trained.loss_fn, Observed(order=self._observed.order), {}))
            if len(self._made) > _KEEP:
                del self._made[next(iter(self._made))]
        return self._made[key]

    def _flags_read(self) -> dict[nn.Module, bool]:
        """In the order of the modules, which is the same on all ranks."""
        loss = self._loss_fn.modules() if isinstance(self._loss_fn, nn.Module) else ()
        return {
            module: module.training for module in (*self.model.modules(), *loss) if module in self._observed.training
        }

    def judged(self, batch: Batch, mode: str = "step") -> Batch:
        """The batch with its answers to what the model's Python asks about its numbers, where a batch of its kind that
        answers alike was captured; else as it is.  Costs the ops that are asked for."""
        if batch.answers is None:
            for questions in self._asked.get((mode, batch.rows, batch.signature()), ()):
                if questions.hold(batch.tensors):
                    return replace(batch, answers=questions.answers)
        return batch

    def settled(self, batch: Batch, size: Size, mode: str) -> Batch:
        """The same; what was not captured yet is captured, for micro-batches of `size`."""
        self(batch, size, mode)
        return self.judged(batch, mode)

    def _noted(self, batch: Batch, mode: str, questions: Questions) -> Batch:
        known = self._asked.setdefault((mode, batch.rows, replace(batch, answers=None).signature()), [])
        if all(other.answers != questions.answers for other in known):
            known.insert(0, questions)
            del known[_KEEP:]
            if len(known) == _MANY:
                _warn_of_many(questions)
        return replace(batch, answers=questions.answers)

    def refresh(self, *, training: bool) -> list[str]:
        """Forget all captures when the model is not what was captured any more; returns what changed, in words.

        training: whether training flags count; evaluation sets its own.  Raises RefusedError for what captures cannot
        follow, such as a parameter that is another object.  Costs what `Watch.changes` costs.
        """
        changes = [change for watch in self._watches for change in watch.changes(training=training)]
        if not self._watches:  # what was captured last could not be
            self.check_tensors()
        if changes:
            self._made.clear()
            self._asked.clear()
            self._observed = Observed()
            self._flags = {}
            self._watches.clear()
            digest = hashlib.blake2b("\n".join([self.version, *changes]).encode(), digest_size=8).hexdigest()
            self.version = f"{digest} {', '.join(changes[:_NAMED])}"
        return changes

    def check_tensors(self) -> None:
        """Raises RefusedError when parameters or buffers are other objects than those of the first capture."""
        if self._tensors:
            check_tensors(self.trained, self._tensors)

    def is_own(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a parameter or buffer is the one that was captured first; a later one is the user's affair."""
        return name not in self._tensors or self._tensors[name][1] is tensor


def _warn_of_many(questions: Questions) -> None:
    numbers = [q.where for q, value in zip(questions.asked, questions.values, strict=True) if type(value) is not bool]
    warnings.warn(
        f"{_MANY} batches of one shape were captured, each anew, for forward() reads other numbers from each: results "
        f"stay exact, but every such step waits for a capture ({', '.join(dict.fromkeys(numbers)) or 'flags'}); "
        "compute with the tensor instead of .item(), .tolist(), int() or float()",
        CaptureWarning,
        stacklevel=2,
    )

"""The captures of one model, each made once: by mode, kind of batch and size; forgotten when the model changes."""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopart.batch.batch import Batch
from autopart.batch.guesses import FLATTENED, in_words, other_guesses
from autopart.capture.capture import Captured, capture
from autopart.capture.python.guards import CaptureWarning, check_model, uncompiled
from autopart.capture.python.watch.changes import ModelWatch, check_tensors, tensors_of
from autopart.capture.python.watch.observed import Observed
from autopart.capture.python.watch.values import ValueUsed, free_of
from autopart.capture.recent import Recent
from autopart.capture.shortened import without_prefix
from autopart.capture.trace.autocast import Autocast, autocast_for
from autopart.capture.trace.export import LossFn
from autopart.capture.trained import Trained
from autopart.ir.errors import AutopartError, CaptureError, UsageError
from autopart.ir.graph import Size
from autopart.ir.plan import Precision

_Answers = tuple[tuple[str, str, Any], ...]
_KEEP = 128  # captures; 32 kinds of batches are kept, each with several
_KEEP_ANSWERS = 32  # sets of answers of one kind of batch
_NAMED = 3  # changes that a message names
_MANY = 8  # captures of one kind of batch that differ in what the model's Python reads from the batch
_MANY_SHAPES = 16  # kinds of batches that differ in the shapes of their tensors


class CaptureCache:
    """Captures of `model` as it is; `refresh` forgets them when it changed.

    autocast: the region that the model and its loss run in (`run_in`).  trained: the model, and a loss function that
    has parameters.  version: a digest of all changes that were seen, and the last ones in words; equal on ranks whose
    models changed alike.  kept: the captures.  made: captures since the start, also those that are forgotten.
    seconds: that they took.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn | None = None) -> None:
        model = uncompiled(model)
        self.model = check_model(model)
        if isinstance(loss_fn, nn.Module):
            check_model(loss_fn)
        self.trained = Trained(model, loss_fn)
        self.autocast: Autocast | None = None
        self.values_come = False
        self.made = 0
        self.seconds = 0.0
        self._loss_fn = loss_fn
        self._tensors: dict[str, tuple[str, torch.Tensor]] = {}
        self._aside: list[dict[str, Any]] = []
        self._shapes: set[tuple[object, ...]] = set()
        self._forget("")

    def _forget(self, version: str) -> None:
        self.version = version
        self._values: dict[tuple[str, object], set[object]] = {}
        self._free: dict[tuple[str, object], tuple[int, ...]] = {}
        self._observed = Observed()
        self._flags: dict[nn.Module, bool] = {}
        self._watches: list[ModelWatch] = []
        self.kept: Recent[tuple[object, ...], Captured] = Recent(_KEEP, self._bytes_of)
        self._asked: dict[tuple[object, ...], list[tuple[_Answers, Callable[[Sequence[torch.Tensor]], bool]]]] = {}

    def run_in(self, precision: Precision, device_type: str, *, values_come: bool = False) -> None:
        """Capture from now on for a precision on devices of a type.  values_come: as for `capture`.

        Raises UsageError if there are captures for another one: the running pipeline holds tensors in that.
        """
        autocast = autocast_for(precision, device_type)
        if len(self.kept) and autocast != self.autocast:
            raise UsageError(
                f"the plan is for {precision}, and the pipeline runs in another precision",
                fix="close the pipe, and compile with this plan",
            )
        self.autocast, self.values_come = autocast, values_come

    def __call__(self, batch: Batch, size: Size, mode: str = "step") -> Captured:
        """Return the capture for micro-batches of `size` of batches like this one; modes as in `capture`."""
        batch = self.judged(batch, mode)
        key = (mode, size, batch.signature())
        captured = self.kept.get(key)
        if captured is None and batch.kept:
            captured = without_prefix(self(batch.plain, size, mode), [name for name, _ in batch.kept])
            if captured.questions is not None:
                key = (mode, size, replace(batch, answers=captured.questions.answers).signature())
            self.kept.add(key, captured)
        if captured is None:
            began, known = time.perf_counter(), self.seconds
            try:
                captured = self._capture(batch, size, mode)
            except ValueUsed:
                raise
            except CaptureError as error:
                raise self._explained(error, batch, size, mode) from error.__cause__
            self.seconds = known + time.perf_counter() - began  # with the captures that this one asked for
            self._tensors = self._tensors or tensors_of(self.trained)
            if captured.questions is not None:
                answers = captured.questions.answers
                self._note_questions(batch, mode, answers, captured.questions.hold)
                key = (mode, size, replace(batch, answers=answers).signature())
            self.kept.add(key, captured)
            if batch.free:  # also where the batch comes from another rank
                self._free.setdefault((mode, batch.signature(batch.values)), batch.free)
            self.made += 1
            self._note_shapes(batch)
            self._observed.update(captured.observed)
            if mode == "step":  # in the order of the modules, which all ranks share
                loss = self._loss_fn.modules() if isinstance(self._loss_fn, nn.Module) else ()
                read = (module for module in (*self.model.modules(), *loss) if module in self._observed.training)
                self._flags = {module: module.training for module in read}
            self._watches = [ModelWatch(self.model, self._observed, self._flags)]
            if self.trained.loss_fn is not None:
                self._watches.append(ModelWatch(self.trained.loss_fn, Observed(order=self._observed.order), {}))
        return captured

    def _capture(self, batch: Batch, size: Size, mode: str) -> Captured:
        return capture(
            self.model, batch, size=size, loss_fn=self._loss_fn, mode=mode,
            whole=lambda: self(batch, Size(batch.rows or 1), mode), autocast=self.autocast,
            values_come=self.values_come,
        )  # fmt: skip

    def _explained(self, error: CaptureError, batch: Batch, size: Size, mode: str) -> CaptureError:
        """Return the error of a capture at some rows of a batch.  If the whole batch can be captured, it says which
        inputs were taken to have rows, and looks for a statement with which these rows can be captured too."""
        try:
            if batch.rows in (None, size.rows) or size.rows == 1:
                return error
            self(batch, Size(batch.rows or 1), mode)
        except AutopartError:
            return error
        fix = FLATTENED
        for name, axis, guess in other_guesses(batch):
            with suppress(AutopartError):
                self._capture(guess, size, mode)
                fix = f'pass rows_axis={{"{name}": {axis}}}: with it these rows can be captured'
                break
        why = f"{error.why or error.what}; {in_words(batch)}"
        what = f"the model runs on the whole batch, and not on {size.rows} rows cut from its inputs"
        return CaptureError(what, where=error.where, why=why, fix=f"{fix}; or use micro_batches=1 and replicas=1")

    def _bytes_of(self, captured: Captured) -> int:
        """Estimate the bytes of host memory that a capture adds.  A constant that another capture has too, such as a
        tensor that is an attribute of the model, is counted once."""
        known = {address for other in self.kept.values() for address in other.constants}
        lifted = sum(size for address, size in captured.constants.items() if address not in known)
        return captured.program_bytes + lifted

    def judged(self, batch: Batch, mode: str = "step") -> Batch:
        """Return the batch with its answers to what the model's Python asks about its numbers.

        It stays as it is if no batch of its kind with the same answers was captured.  Costs the ops that are asked for.
        """
        if batch.answers is None:
            for answers, hold in self._asked.get((mode, batch.rows, batch.plain.signature()), ()):
                if hold(batch.tensors):
                    return replace(batch, answers=answers)
        return batch

    def settled(self, given: Batch, size: Size, mode: str) -> Batch:
        """Return the batch with its answers, after a capture for micro-batches of `size` if there is none yet; without
        the values that its program does not depend on, once there are two batches that differ in values alone."""
        batch = self.judged(self._freed(given, size, mode), mode)
        try:
            questions = self(batch, size, mode).questions
        except ValueUsed:  # free in other batches of the kind
            batch = self.judged(self._freed(given, size, mode, again=True), mode)
            questions = self(batch, size, mode).questions
        return batch if questions is None or batch.answers is not None else replace(batch, answers=questions.answers)

    def _freed(self, batch: Batch, size: Size, mode: str, *, again: bool = False) -> Batch:
        """Return the batch without the values that its program does not depend on.  again: whether to look for them
        anew."""
        if not batch.values:
            return batch
        kind = mode, batch.signature(batch.values)
        seen, free = self._values.setdefault(kind, set()), self._free.get(kind)
        if again or (free is None and seen and batch.signature() not in seen):
            found = free_of(batch, self._observed, lambda attempt: self(attempt, size, mode))
            self._free[kind] = free = tuple(place for place in found if free is None or place in free)
        batch = batch.freed(free or ())
        signature = batch.signature()
        if signature not in seen and len(seen) < _MANY:
            seen.add(signature)
            if len(seen) == _MANY:
                _warn_of_many([f"input {batch.names[place]}" for place in batch.values])
        return batch

    def _note_questions(self, batch: Batch, mode: str, answers: _Answers, hold: Callable[..., bool]) -> None:
        known = self._asked.setdefault((mode, batch.rows, replace(batch, answers=None).signature()), [])
        if all(other != answers for other, _ in known):
            known.insert(0, (answers, hold))
            del known[_KEEP_ANSWERS:]
            if len(known) == _MANY:
                _warn_of_many([where for _, where, value in answers if type(value) is not bool])

    def _note_shapes(self, batch: Batch) -> None:
        shapes = tuple(tensor.shape[split:] for tensor, split in batch.tensors_and_splits())
        if shapes not in self._shapes:
            self._shapes.add(shapes)
            if len(self._shapes) == _MANY_SHAPES:
                warnings.warn(
                    f"{_MANY_SHAPES} kinds of batches were captured that differ in the shapes of their tensors: "
                    "results stay exact, but each new kind waits for a capture; pad sequences to a few lengths in the "
                    "collate function of the loader, as DataCollatorWithPadding(pad_to_multiple_of=64) does",
                    CaptureWarning,
                    stacklevel=2,
                )

    def refresh(self, *, training: bool) -> list[str]:
        """Put all captures aside if the model changed since; return what changed, in words.

        Captures of the last models that differed are taken up again if the model is as it was for them, as where layers
        are frozen in every other step.  training: whether training flags count; evaluation sets its own.  Raises
        RefusedError for a change that no capture can follow, such as a parameter that is another object.  Costs what
        `ModelWatch.changes` costs.
        """

        def changed(watches: Iterable[ModelWatch]) -> list[str]:
            return [change for watch in watches for change in watch.changes(training=training)]

        changes = changed(self._watches)
        if not self._watches:  # the last capture failed
            self.check_tensors()
        if changes:
            aside = {name: vars(self)[name] for name in _OF_ONE_MODEL}
            known = next((own for own in self._aside if own["_watches"] and not changed(own["_watches"])), None)
            self._aside = [own for own in (aside, *self._aside) if own is not known][:_MODELS]
            digest = hashlib.blake2b("\n".join([self.version, *changes]).encode(), digest_size=8).hexdigest()
            self._forget(f"{digest} {', '.join(changes[:_NAMED])}")
            vars(self).update(known or {})
        return changes

    def check_tensors(self) -> None:
        """Raise RefusedError if parameters or buffers are other objects than at the first capture."""
        if self._tensors:
            check_tensors(self.trained, self._tensors)

    def is_own(self, name: str, tensor: torch.Tensor) -> bool:
        """Return whether a parameter or buffer is the object that was captured first, and not a later one."""
        return name not in self._tensors or self._tensors[name][1] is tensor


_OF_ONE_MODEL = ("version", "kept", "_values", "_free", "_observed", "_flags", "_watches", "_asked")
_MODELS = 3


def _warn_of_many(places: Iterable[str]) -> None:
    named = ", ".join(dict.fromkeys(places)) or "flags"
    warnings.warn(
        f"{_MANY} batches of one shape were captured, one after the other, since forward() reads other numbers from "
        f"each: results stay exact, but every such step waits for a capture ({named}); compute with the tensor instead "
        "of .item(), .tolist(), int() or float(); pass a number as a tensor",
        CaptureWarning,
        stacklevel=2,
    )

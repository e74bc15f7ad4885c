"""Batches as the user passes them, read and padded to a few lengths (`pad_to=`) before they are told apart."""

from __future__ import annotations

import operator
from typing import Any

import torch

from autopart.capture import CaptureCache
from autopart.capture.batch.batch import Batch, BatchReader
from autopart.capture.batch.padding import Padding
from autopart.capture.derive.same_loss import require_same_loss
from autopart.options import Options
from autopart.runtime.activity import patient


class PaddingReader:
    """Reads the batches of one rank.  With `pad_to=` they are padded, unless the model's outputs are wanted.

    Each first padded batch of a kind is compared with what the user passed, by `prove`.
    """

    def __init__(self, captures: CaptureCache, options: Options) -> None:
        self._captures, self._loss_fn = captures, options.loss_fn
        self._reader = BatchReader()
        wanted = options.pad_to
        self._padding = Padding(captures.model, wanted, options.pad_with) if wanted else None
        self._last: tuple[Batch, Batch, str] | None = None
        self._proved: set[tuple[object, ...]] = set()

    def read(self, batch: Any, mode: str = "step") -> Batch:
        """Return a batch taken apart, and padded; in a prediction it holds no target.  Raises BatchError."""
        with_target = self._loss_fn is not None and mode != "predict"
        plain = self._reader.read(batch, with_target=with_target)
        self._last = None
        if self._padding is None or mode == "predict":
            return plain
        padded = self._padding.padded(plain, self._reader, with_target=with_target)
        self._last = plain, padded, mode
        return padded

    def prove(self, *, here: bool) -> None:
        """Prove that the last batch has the loss and gradients of the one that was passed, if it is the first of its
        kind that is padded, or that was given a mask.

        here: whether this rank does it.  Local.  Raises RefusedError.
        """
        last, self._last = self._last, None
        if last is None or not here:
            return
        plain, padded, mode = last
        if len(plain.leaves) == len(padded.leaves) and all(map(operator.is_, plain.leaves, padded.leaves)):
            return
        shapes = _shapes(plain)
        longer = any(shapes.get(name, shape) != shape for name, shape in _shapes(padded).items())
        kind = mode, self._captures.version, padded.signature(), longer
        if kind in self._proved:
            return
        with patient("comparing a padded batch with the one that was passed"):
            if require_same_loss(self._captures.model, self._loss_fn, plain, padded, training=mode == "step"):
                self._proved.add(kind)


def _shapes(batch: Batch) -> dict[str, torch.Size]:
    """Return the shape of each tensor by its name."""
    return {n: leaf.shape for n, leaf in zip(batch.names, batch.leaves, strict=True) if isinstance(leaf, torch.Tensor)}

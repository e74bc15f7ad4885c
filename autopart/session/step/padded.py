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

    `prove` compares the first padded batch of each kind with what the user passed, and later ones with more padding.
    """

    def __init__(self, captures: CaptureCache, options: Options) -> None:
        self._captures, self._loss_fn = captures, options.loss_fn
        self._reader = BatchReader()
        wanted = options.pad_to
        self._padding = Padding(captures.model, wanted, options.pad_with) if wanted else None
        self._last: tuple[Batch, Batch, str] | None = None
        self._proved: dict[tuple[object, ...], tuple[int, ...]] = {}
        """The most that was proved of each kind: how much longer each axis became."""

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
        kind, or if no other of its kind was padded by as much.

        here: whether this rank does it.  Local.  Raises RefusedError.
        """
        last, self._last = self._last, None
        if last is None or not here:
            return
        plain, padded, mode = last
        if len(plain.leaves) == len(padded.leaves) and all(map(operator.is_, plain.leaves, padded.leaves)):
            return
        kind = mode, self._captures.version, padded.signature(), len(plain.tensors)
        added, most = _added(plain, padded), self._proved.get(kind)
        if most is not None and all(more <= proved for more, proved in zip(added, most, strict=True)):
            return
        with patient("comparing a padded batch with the one that was passed"):
            if require_same_loss(self._captures.model, self._loss_fn, plain, padded, training=mode == "step"):
                self._proved[kind] = added if most is None else tuple(map(max, added, most))


def _added(plain: Batch, padded: Batch) -> tuple[int, ...]:
    """Return by how much each axis of each tensor of a padded batch is longer."""
    before, found = _shapes(plain), _shapes(padded)
    pairs = [(shape, before.get(name, shape)) for name, shape in found.items()]
    return tuple(new - old for longer, shorter in pairs for new, old in zip(longer, shorter, strict=True))


def _shapes(batch: Batch) -> dict[str, torch.Size]:
    """Return the shape of each tensor by its name."""
    pairs = zip(batch.names, batch.leaves, strict=True)
    return {name: leaf.shape for name, leaf in pairs if isinstance(leaf, torch.Tensor)}

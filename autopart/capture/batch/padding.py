"""Sequences of a batch are padded at their end up to one of a few lengths, so that few kinds of batches exist.

A key of the batch is padded if it is one of the usual ones, or if `pad_with` has a filler for it.  Another key with an
axis as long as the sequences is refused by name.  `derive.same_loss` proves that the loss stays the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from autopart.capture.batch.batch import Batch, BatchReader, unflatten
from autopart.ir.errors import BatchError

Number = bool | int | float
Filler = Number | None
"""What a key is padded with; None: it is no sequence, and stays as it is."""

IGNORED = -100
"""The label that torch's losses ignore unless they are told another."""
MASK = "attention_mask"
DECODER = "decoder_"
_TOKENS = ("input_ids", "idx", "ids", "tokens", "token_ids")
_EMBEDDED = "inputs_embeds"
_LABELS = ("labels", "label_ids", "lm_labels", "targets", "target")
_ZEROS = (MASK, "token_type_ids", "position_ids", _EMBEDDED)


def are_lengths(value: object) -> bool:
    """Return whether a value is possible for `pad_to`."""
    return isinstance(value, tuple) and all(type(length) is int and length > 0 for length in value)


def are_fillers(value: object) -> bool:
    """Return whether a value is possible for `pad_with`."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        return False
    return all(isinstance(filler, bool | int | float | None) for filler in value.values())


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A tensor of a batch.  name: the keyword of the model that takes it.  place: among the leaves.  first: its first
    axis that may be one of tokens."""

    name: str
    place: int
    tensor: torch.Tensor
    first: int

    @property
    def group(self) -> str:
        """The sequences that it belongs to: those of the decoder, or others."""
        return DECODER if self.name.startswith(DECODER) else ""

    def axes_of(self, length: int) -> tuple[int, ...]:
        """Return its axes of this size."""
        return tuple(axis for axis in range(self.first, self.tensor.dim()) if self.tensor.shape[axis] == length)

    def usual_axis(self) -> int | None:
        """Return the axis of tokens if this is a usual key in its usual form."""
        name, dim = self.name.removeprefix(DECODER), self.tensor.dim()
        whole = not (self.tensor.is_floating_point() or self.tensor.dtype in (torch.bool, torch.uint8))
        if name == "position_ids" and dim == 1 and self.first == 0:
            return 0
        if dim != (3 if name == _EMBEDDED else 2):
            return None
        return 1 if (name in (*_TOKENS, *_LABELS) and whole) or name in _ZEROS else None


class Padding:
    """Pads the batches of one model.

    lengths: in tokens, to the next of which sequences are padded; longer ones stay as they are.  fillers: by key of the
    batch; they go before those of the usual keys.
    """

    def __init__(self, model: nn.Module, lengths: tuple[int, ...], fillers: Mapping[str, Filler]) -> None:
        self._lengths, self._fillers = sorted(lengths), fillers
        self._parameters = list(inspect.signature(model.forward).parameters)
        config = getattr(model, "config", None)
        token = getattr(config, "pad_token_id", None)
        self._token = token if isinstance(token, int) and token >= 0 else 0
        self._has_decoder = bool(getattr(config, "is_encoder_decoder", False))
        self._fixed: set[tuple[str, int]] = set()
        """Axes, by key, that once were not as long as the sequences: they are something else."""

    def padded(self, batch: Batch, reader: BatchReader, *, with_target: bool) -> Batch:
        """Return the batch with its sequences padded, and with an attention mask if the model takes one.

        reader: that has read the batch.  Raises BatchError for keys that are not recognised.  O(elements).
        """
        if MASK in self._parameters and not any(leaf.name == MASK for leaf in self._leaves(batch)):
            batch = self._with_mask(batch, reader, with_target=with_target)
        found = list(self._leaves(batch))
        lengths = self._lengths_of(found)
        leaves = list(batch.leaves)
        for leaf in found:
            filler, axes = self._filler_and_axes(leaf, lengths)
            for axis in axes:
                leaves[leaf.place] = self._filled(leaves[leaf.place], axis, filler)
        # Masks stay in the program, whether they hide something or not: padded and whole batches are of one kind.
        masks = () if any(leaf.name.endswith(MASK) for leaf in found) else batch.masks
        return replace(batch, leaves=tuple(leaves), masks=masks)

    def _filled(self, tensor: torch.Tensor, axis: int, filler: Number) -> torch.Tensor:
        length = tensor.shape[axis]
        missing = next((wanted for wanted in self._lengths if wanted >= length), length) - length
        if not missing:
            return tensor
        shape = (*tensor.shape[:axis], missing, *tensor.shape[axis + 1 :])
        return torch.cat([tensor, tensor.new_full(shape, filler)], dim=axis)

    # -- what is a sequence ----------------------------------------------------------------------------------------

    def _leaves(self, batch: Batch) -> Iterator[_Leaf]:
        for place, (name, leaf, split) in enumerate(zip(batch.names, batch.leaves, batch.splits, strict=True)):
            if isinstance(leaf, torch.Tensor):
                yield _Leaf(self._keyword(name), place, leaf, int(split))

    def _keyword(self, name: str) -> str:
        """Return the keyword of a positional argument, which a batch names "arg0"."""
        number = name.removeprefix("arg")
        positional = number != name and number.isdecimal() and int(number) < len(self._parameters)
        return self._parameters[int(number)] if positional else name

    def _lengths_of(self, leaves: list[_Leaf]) -> dict[str, int]:
        """Return the length of the sequences of each group.  Raises BatchError if there are none."""
        lengths: dict[str, int] = {}
        for leaf in leaves:
            axis = leaf.usual_axis()
            if axis is not None and leaf.name not in self._fillers and leaf.name not in _LABELS:
                lengths.setdefault(leaf.group, leaf.tensor.shape[axis])
        for leaf in leaves:
            if self._fillers.get(leaf.name) is not None and leaf.tensor.dim() > leaf.first:
                lengths.setdefault(leaf.group, leaf.tensor.shape[leaf.first])
        if "" not in lengths:
            raise BatchError(
                f"pad_to= finds no sequences among {', '.join(leaf.name for leaf in leaves)}",
                why=f"none of these keys is one of {', '.join((*_TOKENS, _EMBEDDED, MASK))} with an axis of tokens",
                fix=f"name the keys that hold sequences, and what pads them: pad_with={{{leaves[0].name!r}: 0}}"
                if leaves
                else "pass tensors",
            )
        return lengths

    def _filler_and_axes(self, leaf: _Leaf, lengths: Mapping[str, int]) -> tuple[Number, tuple[int, ...]]:
        """Return with what a tensor is padded, and along which axes."""
        if leaf.name in self._fillers:
            filler = self._fillers[leaf.name]
            return (filler, self._stated_axes(leaf, lengths)) if filler is not None else (0, ())
        axis, name = leaf.usual_axis(), leaf.name.removeprefix(DECODER)
        if axis is None:
            self._require_no_sequence(leaf, lengths)
            return 0, ()
        decoded = name in _LABELS and (self._has_decoder or DECODER in lengths)
        own, length = leaf.tensor.shape[axis], lengths.get(DECODER if decoded else leaf.group)
        if own == length or (decoded and length is None):
            return IGNORED if name in _LABELS else 0 if name in _ZEROS else self._token, (axis,)
        if name in _LABELS:  # of classes, not of tokens
            return 0, ()
        raise _refused(leaf, f"it has {own} tokens, and the other keys have {length}")

    def _stated_axes(self, leaf: _Leaf, lengths: Mapping[str, int]) -> tuple[int, ...]:
        """Return the axes that pad_with= pads: those that are as long as any sequences, else the first."""
        alike = {axis for length in lengths.values() for axis in leaf.axes_of(length)}
        if not alike:
            return (leaf.first,) if leaf.tensor.dim() > leaf.first else ()
        self._fixed |= {(leaf.name, axis) for axis in range(leaf.first, leaf.tensor.dim()) if axis not in alike}
        return tuple(axis for axis in sorted(alike) if (leaf.name, axis) not in self._fixed)

    def _require_no_sequence(self, leaf: _Leaf, lengths: Mapping[str, int]) -> None:
        for axis in range(leaf.first, leaf.tensor.dim()):
            if leaf.tensor.shape[axis] not in lengths.values():
                self._fixed.add((leaf.name, axis))
            elif (leaf.name, axis) not in self._fixed:
                raise _refused(leaf, "an axis is as long as the sequences, and it is no usual key in its usual form")

    # -- the mask --------------------------------------------------------------------------------------------------

    def _with_mask(self, batch: Batch, reader: BatchReader, *, with_target: bool) -> Batch:
        """Return the batch with an attention mask that hides nothing."""
        leaves = list(self._leaves(batch))
        length = self._lengths_of(leaves)[""]
        lead = next((leaf for leaf in leaves if not leaf.group and leaf.first == 1 and leaf.axes_of(length)), None)
        if lead is None:
            return batch
        mask = torch.ones(lead.tensor.shape[0], length, dtype=torch.long, device=lead.tensor.device)
        empty = next((i for i, name in enumerate(batch.names) if self._keyword(name) == MASK), None)
        filled = tuple(mask if place == empty else leaf for place, leaf in enumerate(batch.leaves))
        args, kwargs, target = unflatten(filled, batch.spec)
        inputs = (args, kwargs if empty is not None else {**kwargs, MASK: mask})
        return reader.read((inputs, target) if with_target else inputs, with_target=with_target)


def _refused(leaf: _Leaf, why: str) -> BatchError:
    return BatchError(
        f"pad_to= cannot pad {leaf.name}",
        where=f"{leaf.tensor.dtype}, shape {tuple(leaf.tensor.shape)}",
        why=why,
        fix=f"say with what: pad_with={{{leaf.name!r}: 0}}, or None instead of 0 if it holds no tokens",
    )

"""Attention masks that the inputs decide: one that hides nothing, or exactly the later tokens, is left out.

While a model is traced it builds a mask even where none is needed, and attention with a mask runs on slower kernels.
The question what a mask hides is put to the whole batch, like those of the model's Python: a batch with another answer
is another kind of batch.  A mask that depends on parameters or buffers stays; a bias stays without what hides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, ClassVar

import torch
from torch import fx

from autopart.batch.batch import Batch
from autopart.capture.python.reads.late import different_rows
from autopart.capture.python.reads.mask_parts import (
    HIDES,
    Ask,
    MaskPart,
    Written,
    bias_and_condition,
    is_constant,
    is_hiding,
    of_keys_alone,
    parts_of,
    sources_of,
    whole,
)

ASKED = "attention mask"
"""What questions about masks give as the op that asks."""


def with_masks(batch: Batch, masks: tuple[str, ...]) -> Batch:
    """Return a batch that is not asked what its attention masks hide.  masks: what the first ones hide; others stay."""
    answers = batch.answers and tuple(answer for answer in batch.answers if answer[0] != ASKED)
    return replace(batch, masks=masks, answers=answers)


class Effect(StrEnum):
    """What a mask does to the scores of attention."""

    NONE = "hides nothing"
    CAUSAL = "hides later tokens"
    BIAS = "adds a bias and hides nothing"
    OTHER = "stays"


class Masks:
    """Judges each attention mask of a traced program once, and again after ops wrote to it in place.

    given: effects of the masks in the order in which attention meets them, to take over from another capture; None to
    ask.  found: the effects so far.
    """

    def __init__(self, given: tuple[str, ...] | None) -> None:
        self._given = given or ()
        self.found: list[str] = []
        self._known: dict[fx.Node, tuple[Effect, fx.Node]] = {}  # by mask, with the last op when it was judged
        self._biases: dict[fx.Node, torch.Tensor] = {}

    def note(self, node: fx.Node, args: Sequence[Any]) -> None:
        """Note a choice between numbers and one number, which may be a bias with a mask."""
        if len(args) == 3 and is_hiding(args[2]) and isinstance(args[1], torch.Tensor):
            self._biases[node] = args[1]

    def without(self, node: fx.Node, args: Any, kwargs: Any, ask: Ask, written: Written) -> Any:
        """Return the arguments of attention, without a mask that is not needed.

        node: the mask.  written: whether ops write to the memory of a node in place.
        """
        given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
        pair = given["query"].shape[-2], given["key"].shape[-2]
        if given.get("is_causal") or given["query"].dim() < 3:
            return args, kwargs
        node = whole(node, written)
        if node not in self._known or written(node, None, self._known[node][1]):
            place = len(self.found)
            known = self._given[place] if place < len(self._given) else None
            self._known[node] = (
                Effect(known) if known else self._effect(node, pair, ask, written),
                next(iter(reversed(node.graph.nodes))),
            )
            self.found.append(self._known[node][0])
        effect = self._known[node][0]
        if effect is Effect.OTHER:
            return args, kwargs
        given |= {"attn_mask": self._biases.get(node) if effect is Effect.BIAS else None}
        return (), given | {"is_causal": effect is Effect.CAUSAL}

    def _effect(self, node: fx.Node, pair: tuple[int, int], ask: Ask, written: Written) -> Effect:
        """Return what a mask does."""
        found = _effect(node, pair, ask, written)
        split = bias_and_condition(node)
        if found is not Effect.OTHER or split is None or node not in self._biases or written(node):
            return found
        bias = self._biases[node]
        if bias.dtype is not node.meta["val"].dtype or bias.dim() < 2:
            return found
        if any(written(each, None, node) for each in split):
            return found
        return Effect.BIAS if _effect(split[1], pair, ask, written) is Effect.NONE else Effect.OTHER


def _effect(node: fx.Node, pair: tuple[int, int], ask: Ask, written: Written) -> Effect:
    """Return what a mask does, by the cheapest questions that settle it.

    Its parts are constants, answered while tracing, and what depends on inputs, such as the padding of keys, which is
    small.
    """
    parts = list(parts_of(MaskPart(node), written))
    constants = [part for part in parts if is_constant(part.node)]
    others = [part for part in parts if part not in constants]
    square = pair[0] == pair[1] > 1
    known = Effect.NONE
    if constants and not _shown(constants, ask, written):
        flags = tuple(part.hides for part in constants)
        if not (square and ask(_Triangle(pair[0], flags), [part.node for part in constants])):
            return Effect.OTHER
        known = Effect.CAUSAL
    shown = _shown(others, ask, written) if others else True
    if shown or shown is None:
        return known if shown else Effect.OTHER
    if not square or all(of_keys_alone(part.node) for part in others):
        return Effect.OTHER  # a key is hidden from its own query
    return Effect.CAUSAL if ask(_Triangle(pair[0], (False,)), [node]) else Effect.OTHER


def _shown(parts: Sequence[MaskPart], ask: Ask, written: Written) -> bool | None:
    """Return whether masks hide nothing, None if that depends on more than inputs and constants."""
    sources = dict.fromkeys(source for part in parts for source in sources_of(part, ask, written))
    return ask(_AllShown(tuple(source.hides for source in sources)), [source.node for source in sources])


@dataclass(frozen=True)
class _AllShown:
    """Asks whether masks hide nothing.  hides: for each mask, whether True hides a key."""

    hides: tuple[bool, ...]
    takes_late: ClassVar[bool] = True

    def __call__(self, *masks: Any) -> bool:
        """Return whether the masks hide nothing.  Waits for the device once, or for each different row."""
        return all(self._shown(*rows) for rows in different_rows(masks))

    def _shown(self, *masks: torch.Tensor) -> bool:
        pairs = list(zip(masks, self.hides, strict=True))
        if len(pairs) == 1:
            return not bool(masks[0].any()) if self.hides[0] else bool(_shows(masks[0], hides=False).all())
        return bool(torch.stack([_shows(mask, hides=hides).all() for mask, hides in pairs]).all())


@dataclass(frozen=True)
class _Triangle:
    """Asks whether masks, (..., queries, keys), together hide exactly the later tokens of a sequence.

    tokens: its length.  hides: for each mask, whether True hides a key.
    """

    tokens: int
    hides: tuple[bool, ...]
    takes_late: ClassVar[bool] = True

    def __call__(self, *masks: Any) -> bool:
        """Return whether the masks together hide just that; they are broadcast against each other."""
        return all(self._hide_later_tokens(*rows) for rows in different_rows(masks))

    def _hide_later_tokens(self, *masks: torch.Tensor) -> bool:
        pair = self.tokens, self.tokens
        earlier = torch.ones(pair, dtype=torch.bool, device=masks[0].device).tril()
        shown = torch.ones((), dtype=torch.bool, device=masks[0].device)
        known = shown  # whether each number shows or hides
        for mask, hides in zip(masks, self.hides, strict=True):
            shown = shown & _shows(mask, hides=hides)
            if mask.dtype is not torch.bool:
                known = known & ((mask == 0) | (mask <= HIDES)).all()
        return bool((shown == earlier).all() & known)


def _shows(mask: torch.Tensor, *, hides: bool) -> torch.Tensor:
    """Return where a mask shows keys."""
    if mask.dtype is not torch.bool:
        return mask == 0
    return ~mask if hides else mask

"""Guesses of which inputs have rows: what they are, and which others there are, for messages."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from autopart.batch.batch import Batch

FLATTENED = (
    "say by rows_axis= on which axis each input has rows, None for none; in the collate_fn, reshape an input that "
    "joins rows and others on one axis"
)


def other_guesses(batch: Batch) -> Iterator[tuple[str, int | None, Batch]]:
    """Yield other guesses, as (input, axis of its rows, batch): an input that is cut by its size has no rows, or one
    that is not cut has as many on another axis."""
    for name, leaf, split, axis in zip(batch.names, batch.leaves, batch.splits, batch.axes, strict=True):
        if not isinstance(leaf, torch.Tensor):
            continue
        places: list[int | None] = (
            [at for at in range(1, leaf.dim()) if leaf.shape[at] == batch.rows] if not split else []
        )
        if split and not axis:
            places.append(None)
        for place in places:
            guess = batch.stated(name, place)
            if any(guess.splits):
                yield name, place, guess


def in_words(batch: Batch) -> str:
    """Say which inputs are cut, and why."""
    cut, whole = (
        ", ".join(
            f"{name} {list(leaf.movedim(0, axis).shape)}"
            for name, leaf, split, axis in zip(batch.names, batch.leaves, batch.splits, batch.axes, strict=True)
            if isinstance(leaf, torch.Tensor) and split == wanted
        )
        for wanted in (True, False)
    )
    others = f"; {whole} whole for every micro-batch" if whole else ""
    return f"cut by {batch.rows} entries on axis 0, or by rows_axis=: {cut}{others}"

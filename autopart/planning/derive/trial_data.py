"""Random rows and weights on which captured programs are tried, by turn; turn 0 has the user's."""

from __future__ import annotations

import itertools
from collections.abc import Set
from typing import TYPE_CHECKING

import torch

from autopart.batch.batch import Batch

if TYPE_CHECKING:
    from autopart.capture import Captured

Weights = dict[int, torch.Tensor]
"""Values to use instead of those of the model, by the identity of its tensors."""
SIZES = (1.0, 1.0, 1.0, 30.0)
"""Sizes of random numbers, by turn, over and over."""


def data_of_turn(captured: Captured, batch: Batch, turn: int) -> Batch:
    """Return as many rows as a program was captured for, on its device: at turn 0 the user's, then random ones."""
    rows = captured.graph.rows
    asked_about = captured.questions.inputs if captured.questions is not None else frozenset[int]()
    data = batch.with_rows(rows) if turn == 0 else resampled(batch, rows, turn, asked_about)
    return data.to(next((tensor.device for tensor in captured.tensors.values()), torch.device("cpu")))


def weights_of_turn(captured: Captured, turn: int) -> Weights:
    """Return other values for the parameters and buffers of a model, by the identity of each: none at turn 0, then
    random ones that depend on the turn alone.

    Parameters get numbers of a usual size, whatever they are now: a gate that is 0 at first is open.  Those that are
    positive stay so.  Numbers of buffers keep their sign, and zeros become positive; what is infinite stays.
    """
    if turn == 0:
        return {}
    generator, found = torch.Generator().manual_seed(turn), Weights()
    kinds = captured.names.kinds
    for name, tensor in captured.tensors.items():
        if not tensor.is_floating_point() or kinds.get(name) not in ("param", "buffer"):
            continue
        drawn = torch.randn(tensor.shape, generator=generator).to(tensor)
        with torch.no_grad():
            if kinds[name] == "buffer":
                drawn = torch.where(tensor == 0, 0.3 * drawn.abs(), tensor * (0.3 * drawn).exp())
            else:
                drawn = drawn * SIZES[turn % len(SIZES)] / (max(1, tensor.shape[-1]) ** 0.5 if tensor.dim() > 1 else 1)
                drawn = drawn.abs() + 0.1 if bool((tensor > 0).all()) else drawn
        found[id(tensor)] = drawn.requires_grad_(tensor.requires_grad)
    return found


def rows_of(batch: Batch, place: int, rows: int) -> list[torch.Tensor]:
    """Return copies of `rows` rows from `place` on; tensors without rows whole."""
    return [t.narrow(0, place, rows).clone() if split else t for t, split in batch.tensors_and_splits()]


def resampled(batch: Batch, rows: int, seed: int, in_whole_rows: Set[int] = frozenset()) -> Batch:
    """Return random data like a batch's.

    Floats get noise within the tensor's range; integers, and floats that are all 0 or 1, are drawn from the tensor.
    Masks (tensors of two values) and the tensors `in_whole_rows`, by index, keep their rows whole: a random mask would
    hide everything, and the program only fits the answers to what the model's Python asks.
    """
    generator = torch.Generator().manual_seed(seed)
    places = itertools.count()

    def change(leaf: torch.Tensor, split: bool) -> torch.Tensor:
        place = next(places)
        if not split:
            return leaf
        picked = leaf[torch.randint(len(leaf), (rows,), generator=generator).to(leaf.device)]
        if place in in_whole_rows:
            return picked
        constant = bool(leaf.amin() == leaf.amax())
        if leaf.is_floating_point() and (constant or not bool(((leaf == 0) | (leaf == 1)).all())):
            noise = torch.randn(picked.shape, generator=generator).to(picked)
            noisy = picked + 0.2 * noise * leaf.abs().mean()
            return noisy if constant else noisy.clamp(leaf.amin(), leaf.amax())
        if leaf.dim() > 1 and bool(((leaf == leaf.amin()) | (leaf == leaf.amax())).all()):
            return picked
        pool = leaf.reshape(-1)
        return pool[torch.randint(len(pool), picked.shape, generator=generator).to(leaf.device)]

    return batch.changed(change, rows)

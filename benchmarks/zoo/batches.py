"""Random batches for each kind of model, with rows of varying length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

VOCAB, SEQ, CLASSES = 96, 16, 5
Batch = dict[str, Any]
Make = Callable[[int], Any]
"""Returns the model's input for a number of rows; with a loss function, (inputs, target)."""


def source(seed: int = 1) -> torch.Generator:
    """Return a generator with a fixed seed."""
    return torch.Generator().manual_seed(seed)


def tokens(rows: int, length: int = SEQ, seed: int = 1, low: int = 4) -> torch.Tensor:
    """Return ids without special tokens."""
    return torch.randint(low, VOCAB, (rows, length), generator=source(seed))


def text(rows: int) -> Batch:
    """Return ids, and a mask that is 0 at the end of most rows."""
    ids, mask = tokens(rows), torch.ones(rows, SEQ, dtype=torch.long)
    for row in range(rows):
        mask[row, SEQ - (5 * row) % (SEQ // 2) :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def numbers(rows: int, *shape: int, high: int = CLASSES, seed: int = 2) -> torch.Tensor:
    """Return class numbers."""
    return torch.randint(0, high, (rows, *shape), generator=source(seed))


def floats(rows: int, *shape: int, seed: int = 3) -> torch.Tensor:
    """Return normally distributed numbers."""
    return torch.randn(rows, *shape, generator=source(seed))


def language(rows: int) -> Batch:
    """Return a batch of causal language modelling in which padding is not a label."""
    batch = text(rows)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def masked_language(rows: int) -> Batch:
    """Return a batch in which every third token is a label."""
    batch = language(rows)
    hidden = (torch.arange(SEQ)[None, :] + torch.arange(rows)[:, None]) % 3 == 0
    return {**batch, "labels": batch["labels"].where(hidden, -100)}


def classes(rows: int) -> Batch:
    """Return text with a class for each row."""
    return {**text(rows), "labels": numbers(rows)}


def ended(rows: int) -> Batch:
    """Return text with a class for each row, read at its end token."""
    batch = classes(rows)
    last = batch["attention_mask"].sum(1, keepdim=True) - 1
    return {**batch, "input_ids": batch["input_ids"].scatter(1, last, 3)}


def tags(rows: int) -> Batch:
    """Return text with a class for each token except padding."""
    batch = text(rows)
    return {**batch, "labels": numbers(rows, SEQ).masked_fill(batch["attention_mask"] == 0, -100)}


def spans(rows: int) -> Batch:
    """Return text with the first and the last token of an answer; the last row's answer is outside the text."""
    first, last = numbers(rows, high=SEQ // 2), numbers(rows, high=SEQ // 2, seed=5)
    first[-1] = last[-1] = SEQ
    return {**text(rows), "start_positions": first, "end_positions": last}


def choices(rows: int) -> Batch:
    """Return three continuations per row, one of which is right."""
    flat = text(3 * rows)
    return {**{k: v.view(rows, 3, SEQ) for k, v in flat.items()}, "labels": numbers(rows, high=3)}


def sentences(rows: int) -> Batch:
    """Return two sentences per row, and whether the second follows the first."""
    kinds = (torch.arange(SEQ) >= SEQ // 2).long().repeat(rows, 1)
    return {**text(rows), "token_type_ids": kinds, "labels": numbers(rows, high=2)}


def translation(rows: int) -> Batch:
    """Return text with a target text, both of varying length."""
    return {**text(rows), "labels": language(rows)["labels"].roll(1, 0)}


def boxes(rows: int) -> torch.Tensor:
    """Return a box (x0, y0, x1, y1) for each token, in thousandths of the page."""
    corner = numbers(rows, SEQ, 2, high=500)
    return torch.cat([corner, corner + numbers(rows, SEQ, 2, high=400, seed=7)], -1)


def layout_tags(rows: int) -> Batch:
    """Return tokens of a page with their boxes and classes."""
    return {**tags(rows), "bbox": boxes(rows)}


def pixels(size: int, rows: int, channels: int = 3) -> torch.Tensor:
    """Return images."""
    return floats(rows, channels, size, size)


def images(size: int) -> Make:
    """Return a function that makes images with a class."""
    return lambda rows: {"pixel_values": pixels(size, rows), "labels": numbers(rows)}


def segments(size: int) -> Make:
    """Return a function that makes images with a class per pixel; 255 is ignored."""

    def make(rows: int) -> Batch:
        labels = numbers(rows, size, size)
        for row in range(rows):
            labels[row, : row % 3] = 255
        return {"pixel_values": pixels(size, rows), "labels": labels}

    return make


def hidden_patches(size: int, patches: int) -> Make:
    """Return a function that makes images with hidden patches, a different number in each row."""

    def make(rows: int) -> Batch:
        place = torch.arange(patches)[None, :] * 7 + torch.arange(rows)[:, None]
        return {
            "pixel_values": pixels(size, rows),
            "bool_masked_pos": place % (3 + torch.arange(rows)[:, None] % 2) == 0,
        }

    return make


def videos(size: int, frames: int) -> Make:
    """Return a function that makes sequences of images with a class."""
    return lambda rows: {"pixel_values": floats(rows, frames, 3, size, size), "labels": numbers(rows)}


def waves(samples: int) -> Make:
    """Return a function that makes sound with a class, without a mask, for models with group-normalised input."""
    return lambda rows: {"input_values": floats(rows, samples), "labels": numbers(rows)}


def spelled(samples: int) -> Make:
    """Return a function that makes sound of varying length with letters."""

    def make(rows: int) -> Batch:
        mask, labels = torch.ones(rows, samples, dtype=torch.long), 1 + numbers(rows, 4, high=20)
        for row in range(rows):
            mask[row, samples - 100 * (row % 3) :] = 0
            labels[row, 4 - row % 2 :] = -100
        return {"input_values": floats(rows, samples), "attention_mask": mask, "labels": labels}

    return make


def spoken(name: str, *shape: int) -> Make:
    """Return a function that makes features of sound with a text."""
    return lambda rows: {name: floats(rows, *shape), "labels": language(rows)["labels"]}


def described(size: int) -> Make:
    """Return a function that makes images with a text each."""
    return lambda rows: {**text(rows), "pixel_values": pixels(size, rows)}


def captions(size: int) -> Make:
    """Return a function that makes images with a text to learn."""
    return lambda rows: {**language(rows), "pixel_values": pixels(size, rows)}


def contrasted(size: int) -> Make:
    """Return a function that makes images and texts, all of which are compared with each other."""
    return lambda rows: {**described(size)(rows), "return_loss": True}


def mixed(size: int, image_tokens: int, image_id: int, **more: Callable[[int], Any]) -> Make:
    """Return a function that makes texts with image placeholders, as a processor does."""

    def make(rows: int) -> Batch:
        batch = language(rows)
        for key, value in (("input_ids", image_id), ("attention_mask", 1), ("labels", -100)):
            picture = torch.full((rows, image_tokens), value)
            batch[key] = torch.cat([batch[key][:, :1], picture, batch[key][:, 1:]], 1)
        return {**batch, "pixel_values": pixels(size, rows), **{key: value(rows) for key, value in more.items()}}

    return make


def series(past: int, future: int) -> Make:
    """Return a function that makes time series with missing values, their times, and future values."""

    def make(rows: int) -> Batch:
        observed = torch.ones(rows, past)
        for row in range(rows):
            observed[row, : row % 4] = 0
        return {
            "past_values": floats(rows, past).abs() + 1.0,
            "past_time_features": floats(rows, past, 1, seed=4),
            "past_observed_mask": observed,
            "future_values": floats(rows, future, seed=5).abs() + 1.0,
            "future_time_features": floats(rows, future, 1, seed=6),
        }

    return make


def channels(past: int, count: int, target: Callable[[int], torch.Tensor], name: str) -> Make:
    """Return a function that makes time series of several channels, with a target."""
    return lambda rows: {"past_values": floats(rows, past, count), name: target(rows)}

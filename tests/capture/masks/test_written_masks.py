"""Attention masks that are written to through views, before, between and after attentions: what was found of a mask
holds as long as nothing is written to it, and every drawn model trains as it does in plain torch."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopart
from autopart.batch.batch import flatten
from autopart.capture import capture

ROWS, TOKENS, WIDTH = 4, 4, 4
LOWEST = torch.finfo(torch.float64).min
Step = tuple[str, int, int, int, float]
"""What is done, places of two masks among those there are, a token, and a number that is shown or hidden."""

BUILD = ("view", "clone", "and", "or", "twice", "fill", "fill_", "sum", "where")
KINDS = (*BUILD, *("write",) * 6, "iand", *("attend",) * 6)


class Drawn(nn.Module):
    """Makes masks of those that it has, writes to some, and attends with some, in a random order."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.steps = nn.Linear(WIDTH, 3 * WIDTH).double(), steps

    def attend(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = self.layer(x)[:, None].chunk(3, -1)
        return x + F.scaled_dot_product_attention(query, key, value, attn_mask=mask)[:, 0]

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch."""
        own = keep.clone()
        tri = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        masks = [own[:, None, None, :], own[:, None, None, :].expand(-1, 1, TOKENS, -1), tri, own[:, None, None] & tri]
        for kind, first, second, token, shown in self.steps:
            a = masks[first % len(masks)]
            if kind == "attend":
                x = self.attend(x, a)
                continue
            same = [mask for mask in masks if mask.dtype is a.dtype]
            made = made_of(kind, a, same[second % len(same)], token, shown)
            if made is not None:
                masks.append(made)
        return self.attend(x, masks[-1]).square().mean()


def made_of(kind: str, a: torch.Tensor, b: torch.Tensor, token: int, shown: float) -> torch.Tensor | None:
    """Return a new mask of one or two others, None if one was written to.  Every query sees key 0."""
    flags = a.dtype is torch.bool
    if kind == "view":
        return a[None] if a.dim() < 4 else a[:, :, :, :]
    if kind == "clone":
        return a.clone()
    if kind == "sum" and not flags:
        return a + b
    if kind in ("and", "or", "twice") and flags:
        return {"and": a & b, "or": a | b, "twice": ~~a}[kind]
    if kind == "fill" and flags:
        return torch.zeros_like(a, dtype=torch.float64).masked_fill(~a, LOWEST)
    if kind == "fill_" and flags:
        return torch.zeros_like(a, dtype=torch.float64).masked_fill_(~a, LOWEST)
    if kind == "where" and flags:
        return torch.where(a, torch.zeros(TOKENS, TOKENS, dtype=torch.float64), LOWEST)
    if kind == "iand" and flags and torch.broadcast_shapes(a.shape, b.shape) == a.shape and 0 not in a.stride():
        a &= b
    if kind == "write" and 0 not in a.stride():
        a[..., token] = shown > 0 if flags else 0.0 if shown > 0 else LOWEST
    return None


def drawn(seed: int) -> tuple[list[Step], torch.Tensor]:
    """Return random steps, and which keys a batch shows."""
    draw = random.Random(seed)
    steps: list[Step] = []
    last = 0
    for _ in range(draw.randint(4, 14)):
        kind, first = draw.choice(KINDS), draw.randrange(12)
        if kind == "attend":  # more often than not as before
            last = first = last if draw.random() < 0.6 else first
        steps.append((kind, first, draw.randrange(12), draw.randrange(1, TOKENS), draw.choice((-1.0, 1.0))))
    keep = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    if draw.random() < 0.2:
        keep[draw.randrange(ROWS), draw.randrange(1, TOKENS)] = False
    return steps, keep


def check(seed: int) -> None:
    steps, keep = drawn(seed)
    batch = torch.randn(ROWS, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)), keep
    plain, model = Drawn(steps), Drawn(steps)
    loss = plain(*batch)
    try:
        loss.backward()
    except RuntimeError as error:  # of a mask of numbers that was written to when attention had saved it
        assert "modified by an inplace operation" in str(error)
        return
    with autopart.compile(model, "cpu:1", sample=batch, micro_batches=2, costs="analytic", cache=False) as pipe:
        for _ in range(2):  # the second asks the batch again
            model.zero_grad()
            torch.testing.assert_close(pipe.step(batch), loss.detach(), rtol=1e-12, atol=1e-12, msg=f"seed {seed}")
        for mine, own in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, own.grad, rtol=1e-9, atol=1e-12, msg=f"seed {seed}")


@pytest.mark.parametrize("seed", [7, 38])
def test_masks_that_are_written_to_are_judged_as_attention_meets_them(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 300, 30))
def test_many_masks_that_are_written_to_are_judged_as_attention_meets_them(first: int) -> None:
    for seed in range(first, first + 30):
        check(seed)


def below(keep: torch.Tensor, attend: Callable[[torch.Tensor], None]) -> None:
    """Write to what the mask is a view of, between two attentions."""
    own = keep.clone()
    mask = own[:, None, None, :].expand(-1, 1, TOKENS, -1)
    attend(mask)
    own[:, 2] = False
    attend(mask)


def above(keep: torch.Tensor, attend: Callable[[torch.Tensor], None]) -> None:
    """Write to a view of the mask, between two attentions."""
    mask = keep[:, None, None, :] & torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    attend(mask)
    mask[..., 0, 3] = True
    attend(mask)


def operand(keep: torch.Tensor, attend: Callable[[torch.Tensor], None]) -> None:
    """Write to what the mask was made of, which it does not see any more."""
    own = keep.clone()
    own[:, 2] = False
    mask = own[:, None, None, :] & torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    own[:, 2] = True
    attend(mask)


def filled(keep: torch.Tensor, attend: Callable[[torch.Tensor], None]) -> None:
    """Hide a token of a mask of numbers after it was filled."""
    mask = torch.zeros(1, 1, TOKENS, TOKENS, dtype=torch.float64).masked_fill(~keep[:, None, None, :], LOWEST)
    mask[..., 2] = LOWEST
    attend(mask)


def copied(keep: torch.Tensor, attend: Callable[[torch.Tensor], None]) -> None:
    """Attend, after a write, with a copy that was made before it."""
    own = keep.clone()
    before = own.clone()
    own[:, 2] = False
    attend(own[:, None, None, :].expand(-1, 1, TOKENS, -1))
    attend(before[:, None, None, :].expand(-1, 1, TOKENS, -1))


class Written(nn.Module):
    """Attends as `body` says."""

    def __init__(self, body: Callable[..., None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.body = nn.Linear(WIDTH, 3 * WIDTH).double(), body

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch."""
        hidden = [x]

        def attend(mask: torch.Tensor) -> None:
            query, key, value = self.layer(hidden[-1])[:, None].chunk(3, -1)
            hidden.append(hidden[-1] + F.scaled_dot_product_attention(query, key, value, attn_mask=mask)[:, 0])

        self.body(keep, attend)
        return hidden[-1].square().mean()


@pytest.mark.parametrize(
    ("body", "effects"),
    [
        (below, ("hides nothing", "stays")),
        (above, ("hides later tokens", "stays")),
        (operand, ("stays",)),
        (filled, ("stays",)),
        (copied, ("stays", "hides nothing")),
    ],
)
def test_what_was_found_of_a_mask_holds_until_it_is_written_to(
    body: Callable[..., None], effects: tuple[str, ...]
) -> None:
    batch = torch.randn(ROWS, TOKENS, WIDTH, dtype=torch.float64), torch.ones(ROWS, TOKENS, dtype=torch.bool)
    assert capture(Written(body), flatten(batch)).masks == effects
    plain = Written(body)(*batch).detach()
    with autopart.compile(Written(body), "cpu:1", sample=batch, micro_batches=2, costs="analytic", cache=False) as pipe:
        torch.testing.assert_close(pipe.step(batch), plain)

"""Tensors with the same shape and any layout: permuted, with offsets and gaps, expanded, parts of others."""

from __future__ import annotations

import random

import torch

LAYOUTS = ("dense", "permuted", "offset", "gaps", "expanded", "narrow", "step")


def drawn_tensor(shape: list[int], draw: random.Random, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return random numbers of this shape in a drawn layout; no part of its memory that it does not show is zero."""
    generator, kind = torch.Generator().manual_seed(draw.randrange(1 << 30)), draw.choice(LAYOUTS)
    axis, sizes = draw.randrange(len(shape)), list(shape)

    def numbers(of: list[int]) -> torch.Tensor:
        return torch.randn(of, generator=generator).to(dtype)

    if kind == "permuted":
        order = draw.sample(range(len(shape)), len(shape))
        return numbers([shape[place] for place in order]).permute([order.index(place) for place in range(len(shape))])
    if kind == "offset":
        start, count = draw.choice((1, 3, 4)), torch.Size(shape).numel()
        return numbers([count + 4])[start : start + count].view(shape)
    if kind == "gaps":
        return numbers([*shape[:-1], shape[-1] + 5])[..., 2 : 2 + shape[-1]]
    if kind == "expanded":
        sizes[axis] = 1
        return numbers(sizes).expand(shape)
    if kind == "narrow":
        sizes[axis] += 4
        return numbers(sizes).narrow(axis, 2, shape[axis])
    if kind == "step":
        sizes[axis] *= 2
        return numbers(sizes)[(slice(None),) * axis + (slice(None, None, 2),)]
    return numbers(sizes)

"""Orders of axes in memory."""

from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from autopart.rng import in_order, memory_order

sizes = st.lists(st.integers(1, 3), min_size=1, max_size=4)


def laid(shape: list[int], draw: random.Random) -> torch.Tensor:
    """Return a tensor whose axes lie in a drawn order."""
    return torch.empty_permuted(shape, draw.sample(range(len(shape)), len(shape)))


@given(sizes, st.randoms())
def test_axes_lie_as_torch_lays_them_in_a_tensor_like_it(shape: list[int], draw: random.Random) -> None:
    axis, size = draw.randrange(len(shape)), draw.randint(1, 3)
    tensor = laid(shape, draw)
    found = draw.choice(
        [tensor, tensor.narrow(axis, 0, 1), tensor.narrow(axis, 0, 1).expand(*shape[:axis], size, *shape[axis + 1 :])]
    )
    assert torch.empty_like(found).permute(memory_order(found)).is_contiguous()


@given(sizes, st.randoms())
def test_a_laid_part_shows_how_all_rows_lie(shape: list[int], draw: random.Random) -> None:
    order, axis = draw.sample(range(len(shape)), len(shape)), draw.randrange(len(shape))
    shape[axis] = 1
    part = in_order(laid(shape, draw), order)
    assert list(part.shape) == shape and part.permute(order).is_contiguous()
    shape[axis] = 5
    assert torch.empty_permuted(shape, memory_order(part)).permute(order).is_contiguous()

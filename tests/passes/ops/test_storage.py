"""Which values share storage: strides of reshapes as torch finds them."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from autopart.passes.ops.storage import in_order, reshaped


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[torch.Tensor, tuple[int, ...]]:
    """A tensor with axes in any order, some of them cut or expanded, and another shape with as many elements."""
    sizes = draw(st.lists(st.sampled_from((1, 2, 3, 4)), min_size=1, max_size=4))
    tensor = torch.empty(sizes).permute(draw(st.permutations(range(len(sizes)))))
    if draw(st.booleans()):
        tensor = tensor[..., : draw(st.integers(1, tensor.shape[-1]))]
    if draw(st.booleans()):
        tensor = tensor[None].expand(2, *tensor.shape)
    left, shape = tensor.numel(), []
    while left > 1:
        shape.append(draw(st.sampled_from([d for d in range(2, left + 1) if left % d == 0])))
        left //= shape[-1]
    shape += [1] * draw(st.integers(0, 2))
    return tensor, tuple(draw(st.permutations(shape)))


@given(reshapes())
def test_a_reshape_is_a_view_where_torchs_is(case: tuple[torch.Tensor, tuple[int, ...]]) -> None:
    tensor, shape = case
    assert math.prod(shape) == tensor.numel()
    found = reshaped(tuple(tensor.shape), tensor.stride(), shape)
    try:
        viewed = tensor.view(shape)
    except RuntimeError:
        assert found is None
    else:
        assert found is not None
        wide = [axis for axis, size in enumerate(shape) if size > 1]
        assert [found[axis] for axis in wide] == [viewed.stride()[axis] for axis in wide]


@given(st.lists(st.integers(1, 5), max_size=4))
def test_elements_in_order_have_torchs_strides(shape: list[int]) -> None:
    assert in_order(tuple(shape)) == torch.empty(shape).stride()


def test_a_tensor_without_elements_and_another_dtype() -> None:
    assert reshaped((0, 3), (3, 1), (3, 0)) == (0, 1)
    assert reshaped((4,), (1,), (8,)) is None

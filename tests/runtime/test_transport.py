"""Messages: packing, and channels between two processes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.jobs.message_jobs import COUNT, taken_in_order
from support.workers import Workers

from autopart.runtime.messages.transport import offsets, pack, unpack

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@given(st.lists(st.tuples(shapes, st.sampled_from(DTYPES), st.booleans()), min_size=1, max_size=5))
def test_what_is_packed_is_unpacked_bit_by_bit(parts: list[tuple[tuple[int, ...], torch.dtype, bool]]) -> None:
    tensors = [torch.randint(0, 2, shape).to(dtype) for shape, dtype, _ in parts]
    tensors = [
        t.transpose(0, -1) if turned and t.dim() > 1 else t for t, (_, _, turned) in zip(tensors, parts, strict=True)
    ]
    specs = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors]
    buffer = pack(tensors)
    assert buffer.dtype == torch.uint8 and buffer.numel() == offsets(specs)[1]
    for sent, found in zip(tensors, unpack(buffer, specs), strict=True):
        assert found.dtype == sent.dtype and torch.equal(found, sent)


def test_a_single_contiguous_tensor_is_not_copied() -> None:
    tensor = torch.arange(6.0)
    assert pack([tensor]).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("keys", [tuple(range(COUNT)), (3, 0, 5, 1, 2, 4), tuple(reversed(range(COUNT)))])
def test_messages_are_taken_by_key_in_any_order(pair: Workers, keys: tuple[int, ...]) -> None:
    _, found = pair.run(taken_in_order, keys)
    assert found == [[float(key)] * 3 for key in keys]

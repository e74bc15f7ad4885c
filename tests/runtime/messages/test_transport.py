"""Messages: packing, and channels between two processes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.workers import Workers

from autopart.runtime.group.world import World
from autopart.runtime.messages.transport import Inbox, Outbox, offsets, pack, unpack

COUNT = 6
SPECS = tuple(
    torch.empty(shape, dtype=dtype, device="meta")
    for shape, dtype in (((2, 3), torch.float32), ((5,), torch.int64), ((), torch.float64))
)


def message(number: int) -> list[torch.Tensor]:
    """Return tensors that identify the message by its number."""
    return [torch.full_like(spec, number, device="cpu") for spec in SPECS]


def taken_in_order(keys: Sequence[int]) -> list[list[float]]:
    """Send `COUNT` messages from rank 0 and receive them on rank 1 in the order of `keys`; return their contents."""
    world = World("cpu", 2)
    channel = world.group((0, 1))
    found = []
    if world.rank == 0:
        outbox = Outbox(1, channel)
        for number in range(COUNT):
            outbox.send(message(number), SPECS, number)
        outbox.flush()
    else:
        inbox = Inbox(0, channel, world.device)
        inbox.expect([(number, SPECS, offsets(SPECS)[1]) for number in range(COUNT)])
        found = [[float(tensor.flatten()[0]) for tensor in inbox.receive(key)] for key in keys]
    world.close()
    return found


# -- tests -----------------------------------------------------------------------------------------------------------


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@given(st.lists(st.tuples(shapes, st.sampled_from(DTYPES), st.booleans(), st.randoms()), min_size=1, max_size=5))
def test_what_is_packed_is_unpacked_bit_by_bit_and_lies_as_announced(
    parts: list[tuple[tuple[int, ...], torch.dtype, bool, random.Random]],
) -> None:
    tensors, specs = [], []
    for shape, dtype, turned, drawn in parts:
        tensor = torch.randint(0, 2, shape).to(dtype)
        tensors.append(tensor.transpose(0, -1) if turned and tensor.dim() > 1 else tensor)
        order = drawn.sample(range(len(shape)), len(shape))
        specs.append(torch.empty_permuted(tensors[-1].shape, order, dtype=dtype, device="meta"))
    buffer = pack(tensors, specs)
    assert buffer.dtype == torch.uint8 and buffer.numel() == offsets(specs)[1]
    for sent, found, spec in zip(tensors, unpack(buffer, specs), specs, strict=True):
        assert found.dtype == sent.dtype and torch.equal(found, sent) and found.stride() == spec.stride()


def test_a_single_tensor_that_lies_as_announced_is_not_copied() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    turned = torch.empty_permuted((3, 2), (1, 0), device="meta")
    assert pack([tensor], [tensor.to("meta")]).data_ptr() == tensor.data_ptr()
    assert pack([tensor.t()], [turned]).data_ptr() == tensor.data_ptr()
    assert pack([tensor], [torch.empty_permuted((2, 3), (1, 0), device="meta")]).data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("keys", [tuple(range(COUNT)), (3, 0, 5, 1, 2, 4), tuple(reversed(range(COUNT)))])
def test_messages_are_taken_by_key_in_any_order(pair: Workers, keys: tuple[int, ...]) -> None:
    _, found = pair.run(taken_in_order, keys)
    assert found == [[float(key)] * 3 for key in keys]

"""Messages: packing, and channels between two processes."""

from __future__ import annotations

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
            outbox.send(message(number), number)
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

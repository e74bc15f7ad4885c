"""Random numbers that do not depend on where an op runs.

Every random op of a captured graph is called through `keyed`: the default generator of the device is seeded from
(seed, step, micro-batch, number of the op in the graph) for this one call and restored afterwards.  So a mask does not
depend on stages, schedule or recomputation; some ops draw in the order of their operand in memory, which stays that of
the captured program (`in_order`).  A replica that has some rows of a micro-batch draws for all rows and takes
its own (`keyed_rows`): the op runs on all rows, and keeps what its backward needs of them.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx.node import map_aggregate

from autopart.ir.shares import RowLayout, Window

Key = tuple[int, int, int, Window | None]
"""(seed, step, micro-batch, rows of the micro-batch on this rank; None for all)."""

_key: contextvars.ContextVar[Key] = contextvars.ContextVar("autopart_rng_key", default=(0, 0, 0, None))


@contextlib.contextmanager
def micro_key(seed: int, step: int, micro: int, window: Window | None = None) -> Iterator[None]:
    """Let random ops called inside draw the numbers of this step and micro-batch, for these rows of it."""
    token = _key.set((seed, step, micro, window))
    try:
        yield
    finally:
        _key.reset(token)


def current_key() -> Key:
    """Return the (seed, step, micro-batch, rows) whose numbers are drawn now."""
    return _key.get()


def derive(*parts: int) -> int:
    """Return a 63-bit seed made from integers, equal on every machine."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def keyed(op: Callable[..., Any], number: int, /, *args: Any, **kwargs: Any) -> Any:
    """Call random op `op`, which is the graph's random op `number`, under the current key."""
    seed = derive(*_key.get()[:3], number)
    given = (arg.device for arg in args if isinstance(arg, torch.Tensor))
    device = next(given, None) or torch.device(kwargs.get("device") or "cpu")
    if device.type == "cuda":
        with torch.random.fork_rng(devices=[device]):
            torch.cuda.manual_seed(seed)
            return op(*args, **kwargs)
    state = torch.get_rng_state()
    try:
        torch.default_generator.manual_seed(seed)
        return op(*args, **kwargs)
    finally:
        torch.set_rng_state(state)


def keyed_rows(
    op: Callable[..., Any],
    number: int,
    given: Sequence[tuple[int, int] | None],
    made: Sequence[tuple[int, int] | None],
    size_at: int | None,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call random op `op` for the rows of a replica: on all rows of the micro-batch, with ones for the rows of others.

    given, made: (axis, stride) of the rows in each tensor argument and in each result, None for one without rows
    (`RowLayout`).  size_at: index of the argument that is the size of the result, if there is one.
    """
    window = _key.get()[3]
    if window is None or window.is_all:
        return keyed(op, number, *args, **kwargs)
    layouts = iter(given)

    def whole(arg: Any) -> Any:
        layout = next(layouts) if isinstance(arg, torch.Tensor) else None
        return arg if layout is None else _among_all(arg, RowLayout(*layout), window)

    args, kwargs = map_aggregate((args, kwargs), whole)
    if size_at is not None and made[0] is not None:
        size, axis = list(args[size_at]), made[0][0]
        size[axis] = size[axis] // window.own * window.whole
        args = (*args[:size_at], size, *args[size_at + 1 :])
    found = keyed(op, number, *args, **kwargs)
    if isinstance(found, torch.Tensor):
        return _own(found, made[0], window)
    return tuple(_own(result, layout, window) for result, layout in zip(found, made, strict=True))


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the axes of a tensor in the order in which they lie in memory, as torch lays a tensor that it makes like
    it (`infer_dense_strides`): an expanded axis stays where it is, and one of a single entry lies inside of another.
    O(axes^2)."""
    sizes, strides = tensor.shape, tensor.stride()
    inner = list(reversed(range(tensor.dim())))
    for end in range(1, len(inner)):
        at = end
        for before in reversed(range(end)):
            one, other = inner[before], inner[at]
            if not (strides[one] and strides[other]):
                continue
            if strides[one] < strides[other]:
                break
            if (strides[one], sizes[one]) > (strides[other], sizes[other]):
                inner[before], inner[at], at = other, one, before
    return tuple(reversed(inner))


def in_order(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return a tensor whose axes lie in this order in memory, in which some random ops draw: here it may lie otherwise
    than in the captured program, or an axis of a single row does not show where it lies among all rows."""
    if memory_order(tensor) == tuple(order):
        return tensor
    laid = tensor.permute(tuple(order)).contiguous()
    laid = laid.reshape(-1).view(laid.shape)  # whose strides show the order, also of axes of a single entry
    return laid.permute(sorted(range(tensor.dim()), key=order.__getitem__))


def _among_all(tensor: torch.Tensor, layout: RowLayout, window: Window) -> torch.Tensor:
    """Return a tensor of all rows that holds this one, in the same memory order, since some ops draw in that order."""
    size = list(tensor.shape)
    size[layout.axis] = size[layout.axis] // window.own * window.whole
    filled = torch.empty_permuted(size, memory_order(tensor), dtype=tensor.dtype, device=tensor.device).fill_(1)
    place = torch.unflatten(filled, layout.axis, (layout.stride, window.whole, -1))
    place = place.narrow(layout.axis + 1, window.first, window.own)
    place.copy_(torch.unflatten(tensor, layout.axis, (layout.stride, window.own, -1)))
    return filled


def _own(result: Any, layout: tuple[int, int] | None, window: Window) -> Any:
    if layout is None or not isinstance(result, torch.Tensor):
        return result
    axis, stride = layout
    parts = torch.unflatten(result, axis, (stride, window.whole, -1)).narrow(axis + 1, window.first, window.own)
    return parts.flatten(axis, axis + 2)

"""Random numbers that do not depend on where an op runs.

Every random op of a captured graph is called through `keyed`: the default generator of the device is seeded from
(seed, step, micro-batch, number of the op in the graph) for this one call and put back afterwards.  A mask is then a
function of that key alone: it is the same for any number of stages, any schedule and any recomputation.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

_key: contextvars.ContextVar[tuple[int, int, int]] = contextvars.ContextVar("autopart_rng_key", default=(0, 0, 0))


@contextlib.contextmanager
def micro_key(seed: int, step: int, micro: int) -> Iterator[None]:
    """Random ops called inside draw the numbers of this step and micro-batch."""
    token = _key.set((seed, step, micro))
    try:
        yield
    finally:
        _key.reset(token)


def current_key() -> tuple[int, int, int]:
    """(seed, step, micro-batch) whose numbers are drawn now."""
    return _key.get()


def derive(*parts: int) -> int:
    """A 63-bit seed from integers; the same on every machine."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def keyed(op: Callable[..., Any], number: int, /, *args: Any, **kwargs: Any) -> Any:
    """Call random op `op`, which is the graph's random op `number`, under the current key."""
    seed = derive(*_key.get(), number)
    device = _device(args, kwargs)
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


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return arg.device
    return torch.device(kwargs.get("device") or "cpu")

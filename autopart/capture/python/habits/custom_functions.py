"""A custom autograd.Function as an op with its own backward: torch.export keeps its forward and drops its backward.

The op's backward applies the function once more, with gradients enabled, and lets autograd call the function's own
backward, so `ctx` is filled again at the price of one more forward.  Functions that this cannot repeat are refused:
random numbers, arguments changed in place, tensors in containers, results of which only some have a derivative.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._python_dispatch import TorchDispatchMode

from autopart.capture.source_location import is_library_file, user_line
from autopart.ir.errors import RefusedError

_base: Any = torch._C._FunctionBase.__dict__["apply"]
_SCALARS = {bool: "bool", int: "int", float: "float", str: "str", torch.dtype: "ScalarType", torch.device: "Device"}
_ops: dict[tuple[type, str, int], Callable[..., Any]] = {}
_names: dict[str, int] = {}
_FIX = (
    "register it as an op: torch.library.custom_op(...) with register_autograd(...), which is kept exactly; or write "
    "it with torch's own ops"
)

_LIBRARY_FIX = (
    "choose an implementation of this layer that does without it, if the library offers one; this model cannot be cut"
)


def _apply(cls: Any, *args: Any) -> Any:
    """Apply a function as torch does."""
    return _base.__get__(None, cls)(*args)


def apply(original: Any, cls: Any, *args: Any) -> Any:
    """Apply a function in forward(): by an op that keeps its backward.  It is called by `Function.apply`, which may
    have been taken before the trace (`square = Square.apply`), with all arguments by place.  Raises RefusedError."""
    if cls.__module__.startswith("torch._"):  # how torch.library carries an op's own backward
        return original(cls, *args)
    schema = ", ".join(f"{_type(cls, value)} a{place}" for place, value in enumerate(args))
    count, single = _results(cls, args)
    key = (cls, schema, count)
    if key not in _ops:
        _ops[key] = _registered(cls, schema, count)
    found = _ops[key](*args)
    return found if single or count > 1 else (found,)


def _refusal(cls: Any, why: str) -> RefusedError:
    library = is_library_file(getattr(sys.modules.get(cls.__module__), "__file__", None) or "<")
    return RefusedError(
        f"custom autograd.Function {cls.__module__}.{cls.__qualname__} is used in forward()",
        where=user_line(),
        why=why,
        fix=_LIBRARY_FIX if library else _FIX,
    )


def _type(cls: Any, value: Any) -> str:
    """Return the type of an argument in a schema."""
    if value is None or isinstance(value, torch.Tensor):
        return "Tensor?"
    if isinstance(value, (tuple, list)) and value and all(type(item) in (int, float) for item in value):
        return f"{_SCALARS[type(value[0])]}[]" if len({type(item) for item in value}) == 1 else "float[]"
    if type(value) in _SCALARS:
        return _SCALARS[type(value)]
    raise _refusal(cls, f"one of its arguments is a {type(value).__name__}; tensors, numbers and texts can be kept")


def _results(cls: Any, args: Sequence[Any]) -> tuple[int, bool]:
    """Return how many tensors it returns, and whether it returns a tensor and not a tuple.

    Raises RefusedError if applying the function a second time would give other results.
    """
    with disable_proxy_modes_tracing(), torch.enable_grad(), _RandomOps() as noted:  # type: ignore[no-untyped-call]
        leaves = list(map(_leaf, args))
        versions = [leaf._version for leaf in leaves if isinstance(leaf, torch.Tensor)]
        found = _apply(cls, *leaves)
    results = (found,) if isinstance(found, torch.Tensor) else found
    if not isinstance(results, tuple) or not all(isinstance(result, torch.Tensor) for result in results):
        raise _refusal(cls, "it returns something else than tensors")
    floating = [result.requires_grad for result in results if result.is_floating_point()]
    if any(floating) and not all(floating):
        raise _refusal(cls, "some of its results have no derivative (mark_non_differentiable)")
    if noted.drawn:
        raise _refusal(cls, f"its forward draws random numbers ({noted.drawn}), and the backward would run it again")
    if versions != [leaf._version for leaf in leaves if isinstance(leaf, torch.Tensor)]:
        raise _refusal(cls, "its forward changes an argument in place")
    return len(results), isinstance(found, torch.Tensor)


def _registered(cls: Any, schema: str, count: int) -> Callable[..., Any]:
    """Register an op for this function and arguments of these types.  Its name is the same on every rank."""

    def forward(*args: Any) -> Any:
        with torch.no_grad():
            results = _owned(args, _tuple(_apply(cls, *args)))
        return results if count > 1 else results[0]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.places = [place for place, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
        ctx.others = [None if isinstance(value, torch.Tensor) else value for value in inputs]
        ctx.save_for_backward(*(inputs[place] for place in ctx.places))

    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        args, back = list(ctx.others), [None] * len(ctx.others)
        for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            args[place] = tensor.detach().requires_grad_(ctx.needs_input_grad[place])
        with torch.enable_grad():
            results = _tuple(_apply(cls, *args))
        pairs = [(r, g) for r, g in zip(results, grads, strict=True) if r.requires_grad and g is not None]
        wanted = [place for place in ctx.places if ctx.needs_input_grad[place]]
        if pairs and wanted:
            outputs, seeds = zip(*pairs, strict=True)
            found = torch.autograd.grad(outputs, [args[place] for place in wanted], seeds, allow_unused=True)
            for place, grad in zip(wanted, found, strict=True):
                back[place] = grad
        return tuple(back)

    text = f"{cls.__module__}.{cls.__qualname__}({schema}) {count}"
    number = _names[text] = _names.get(text, 0) + 1
    digest = hashlib.blake2b(f"{text} {number}".encode(), digest_size=4).hexdigest()
    name = f"autopart_functions::{re.sub(r'[^0-9A-Za-z]+', '_', cls.__qualname__).strip('_')}_{digest}"
    returns = ", ".join(["Tensor"] * count)
    op = torch.library.custom_op(name, forward, mutates_args=(), schema=f"({schema}) -> ({returns})")
    op.register_fake(forward)
    op.register_autograd(backward, setup_context=keep)
    return op


def _tuple(found: Any) -> tuple[torch.Tensor, ...]:
    return (found,) if isinstance(found, torch.Tensor) else tuple(found)


def _owned(args: Sequence[Any], results: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the results, cloned where they share memory with an argument or each other, which an op may not."""
    seen = {a.untyped_storage()._cdata for a in args if isinstance(a, torch.Tensor)}
    owned = []
    for result in results:
        shared = result.untyped_storage()._cdata in seen
        owned.append(result.clone() if shared else result)
        seen.add(owned[-1].untyped_storage()._cdata)
    return tuple(owned)


class _RandomOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the first random op."""

    drawn = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not self.drawn:
            self.drawn = str(func)
        return func(*args, **(kwargs or {}))


def _leaf(value: Any) -> Any:
    """Return a copy that requires a gradient if its dtype allows one."""
    if not isinstance(value, torch.Tensor):
        return value
    copy = value.detach().clone()
    return copy.requires_grad_() * 1 if copy.is_floating_point() else copy

"""Parameters and buffers in forward(): what torch.export loses silently, or stops at with a misleading error.

A buffer that is assigned instead of changed in place: export puts a module's attributes back after tracing, so the new
value is written into the old buffer, which export carries over.  Refused are a parameter that belongs to neither the
model nor the loss function, a change of a parameter's values through `.data`, and gradients taken with torch.func.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopart.capture.source_location import user_line
from autopart.ir.errors import RefusedError

_DATA: Any = torch.Tensor.data
_CHANGES = frozenset({
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ifloordiv__", "__imod__",
    "__ipow__", "__iand__", "__ior__", "__ixor__",
})  # fmt: skip
_HARMLESS = {"__get__", "detach"}
"""Reading a shape or a dtype, and taking the values without their gradient."""


@contextlib.contextmanager
def assigned_buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Carry over what the body, a traced forward(), assigns to buffers of these modules."""
    buffers = [
        (part, ".".join(filter(None, (path, name))), name, tensor)
        for module in modules
        for path, part in module.named_modules()
        for name, tensor in part._buffers.items()
        if tensor is not None
    ]
    yield
    for part, full, name, old in buffers:
        new = part._buffers.get(name)
        if new is old:
            continue
        if new is None or new.shape != old.shape or new.dtype != old.dtype:
            raise RefusedError(
                f"forward() replaces buffer {full} by another kind of tensor",
                why=f"{_kind(old)} becomes {_kind(new)}, and every micro-batch runs the same program",
                fix="keep its shape and dtype, or compute it where it is used",
            )
        old.copy_(new.detach())
        part._buffers[name] = old


def _kind(tensor: torch.Tensor | None) -> str:
    return "nothing" if tensor is None else f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


class OwnParametersOnly(TorchFunctionMode):
    """Refuses, while a model is traced and its own parameters are fake, a real one that is used with gradients."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """modules: the traced ones, which hold fake parameters by now."""
        super().__init__()
        self._own = {id(p): name for module in modules for name, p in module.named_parameters()}
        self._numbers: dict[int, tuple[torch.Tensor, str]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if args and isinstance(args[0], torch.Tensor):
            self._refuse_change(func, name, id(args[0]))
        if torch.is_grad_enabled() and name not in _HARMLESS:
            for leaf in pytree.tree_iter((args, kwargs)):
                # a real leaf that requires a gradient, or one that a transform such as torch.func.grad made
                if type(leaf) in (nn.Parameter, torch.Tensor) and leaf.requires_grad and leaf.is_leaf:
                    raise _refusal(leaf)
        if func == _DATA.__get__ and id(args[0]) in self._own:  # which torch.export would lose track of
            numbers = args[0].detach()
            self._numbers[id(numbers)] = numbers, self._own[id(args[0])]
            return numbers
        return func(*args, **kwargs)

    def _refuse_change(self, func: Callable[..., Any], name: str, changed: int) -> None:
        """Raise RefusedError if a function changes the values of one of the model's parameters."""
        parameter = None
        if func == _DATA.__set__:
            parameter = self._own.get(changed)
        elif name in _CHANGES or (name.endswith("_") and not name.endswith("__")):
            _, parameter = self._numbers.get(changed, (None, None))
        if parameter is not None:
            raise RefusedError(
                f"forward() changes parameter {parameter} in place, through .data",
                where=user_line(),
                why="every micro-batch would change it once more, unseen by autograd",
                fix="compute with the changed tensor (weight * mask, weight.clamp(...)) and leave the parameter as it "
                "is; or change it between steps, under torch.no_grad()",
            )


def _refusal(tensor: torch.Tensor) -> RefusedError:
    if is_functorch_wrapped_tensor(tensor):
        return RefusedError(
            "forward() takes a gradient with torch.func (grad, vjp, jacrev or hessian)",
            where=user_line(),
            why="torch.export cannot trace a backward of torch.func",
            fix="write the derivative out, or use forward-mode derivatives (torch.func.jvp) where the function "
            "consists of linear layers and elementary ops (tanh, GELU, exp; not softmax, SiLU or norms)",
        )
    return RefusedError(
        f"a parameter that belongs to neither the model nor the loss function is used, of shape {tuple(tensor.shape)}",
        where=user_line(),
        why="no stage would train it",
        fix="make it, or its module, a part of the model; of a loss, pass the module itself as loss_fn, not a function "
        "that calls it; what is not to be trained needs requires_grad_(False)",
    )

"""Autocast as part of the program: which region forward() runs in, and what becomes of the ops inside.

torch.export keeps an autocast region as a call of its own, without casts.  Decomposing such a region makes them
explicit, each as an op (`_to_copy`): that is how the program is made functional.  Afterwards nothing of it depends on
the autocast state of whoever runs it.

Which op runs in which precision is the policy of a device type: on CUDA, layer_norm and softmax run in fp32, on CPUs
in the precision of their input.  So a program is captured for one type of device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from autopart.ir.plan import Precision

_DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Autocast:
    """The region that forward() and the loss run in: ops of tensors on devices of this type, in this dtype."""

    device_type: str
    dtype: torch.dtype

    def region(self) -> AbstractContextManager[Any]:
        """The region, without torch's cache of casts: each use of a weight has a cast of its own, so that gradients of
        several uses are summed in the parameter's precision.  Casts are shared where they run (`runtime.casts`)."""
        return torch.autocast(self.device_type, self.dtype, cache_enabled=False)


def autocast_for(precision: Precision, device_type: str) -> Autocast | None:
    """The region of a precision on devices of a type; None where the model runs as it is.

    A torch that was built without CUDA can only plan for it, with the policy of CPUs (`is_stand_in`)."""
    kind = "cpu" if is_stand_in(precision, device_type) else device_type
    return Autocast(kind, _DTYPES[precision]) if precision in _DTYPES else None


def is_stand_in(precision: Precision, device_type: str) -> bool:
    """Whether CPUs' autocast stands for that of another type of device, which this torch cannot trace."""
    return precision in _DTYPES and device_type == "cuda" and not torch._C._has_cuda


def inner_autocast(outer: Autocast | None, device_type: Any, dtype: Any, enabled: Any) -> Autocast | None:
    """What holds inside a region that stands in another one.  Raises NotImplementedError for two types of devices."""
    if outer is not None and outer.device_type != device_type:
        raise NotImplementedError
    return Autocast(device_type, dtype or torch.get_autocast_dtype(device_type)) if enabled else None


def _qualified(target: Any) -> str:
    """The name that torch's dispatcher knows an op by, "aten::add.Tensor"."""
    return str(target.name())


def has_kernel(target: torch._ops.OpOverload, state: Autocast) -> bool:
    """Whether autocast casts for this op."""
    key = f"Autocast{state.device_type.upper()}"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(_qualified(target), key))


def decomposed_under(
    state: Autocast, target: torch._ops.OpOverload, args: Any, kwargs: Any, operands: Sequence[torch.Tensor]
) -> fx.Graph | None:
    """What a composite op becomes that autocast does not know by itself, though it knows the ops that it is made of
    (einsum, an LSTM): kept whole, it would lose the casts inside.  None where nothing is lost.

    args, kwargs: with fx nodes as tensors, for which `operands` stand, in order of their first use; fakes.
    """
    if has_kernel(target, state) or not _is_composite(target):
        return None
    nodes = list(dict.fromkeys(a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, fx.Node)))

    def call(*tensors: torch.Tensor) -> Any:
        given = dict(zip(nodes, tensors, strict=True))
        return target(*fx.map_arg(args, given.__getitem__), **fx.map_arg(kwargs, given.__getitem__))

    cast = _traced(call, operands, state)
    try:
        plain = _traced(call, operands, None)
    except RuntimeError:  # without casts the operands do not fit each other
        return cast
    return cast if _targets(plain) != _targets(cast) else None


def _is_composite(target: torch._ops.OpOverload) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(_qualified(target), "CompositeImplicitAutograd"))


def _traced(call: Callable[..., Any], operands: Sequence[torch.Tensor], state: Autocast | None) -> fx.Graph:
    mode = detect_fake_mode(list(operands))
    with mode or contextlib.nullcontext(), state.region() if state else contextlib.nullcontext():
        traced: fx.GraphModule = make_fx(call)(*operands)
    return traced.graph


def _targets(graph: fx.Graph) -> list[Any]:
    return [node.target for node in graph.nodes if node.op == "call_function"]

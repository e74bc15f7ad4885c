"""A model traced as if it were on another type of device: autocast only casts tensors on devices of its own type.

While the model is traced, its parameters and buffers are fake tensors on that device.  Then the program is moved to the
device of the model.  This needs a torch that was built for that type of device, but no such device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from autopart.batch.batch import Batch


@contextlib.contextmanager
def moved(module: nn.Module, sample: Batch, device: torch.device) -> Iterator[Batch]:
    """Put fake parameters and buffers of `module` on `device` inside; yield the sample there."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    known: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            data = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return nn.Parameter(data, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data

    registries = [r for part in module.modules() for r in (part._parameters, part._buffers)]
    before: list[tuple[dict[str, Any], str, torch.Tensor]] = [
        (registry, name, tensor) for registry in registries for name, tensor in registry.items() if tensor is not None
    ]
    for registry, name, tensor in before:
        registry[name] = known.setdefault(id(tensor), fake(tensor))
    try:
        yield sample.changed(lambda tensor, _: fake(tensor), sample.rows)
    finally:
        for registry, name, tensor in before:
            registry[name] = tensor


def brought_back(module: fx.GraphModule, device: torch.device) -> None:
    """Move a flat program that was traced for another device to `device`, in place.  O(nodes)."""
    mode = detect_fake_mode([node.meta.get("val") for node in module.graph.nodes])

    def here(value: Any) -> Any:
        if isinstance(value, torch.device):
            return device
        if not isinstance(value, FakeTensor) or mode is None:
            return value
        with mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)

    for node in module.graph.nodes:
        node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), here)
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map(here, node.meta["val"])

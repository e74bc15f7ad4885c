"""State that a model keeps on its modules: what forward() assigns instead of changing in place.

torch.export puts a module's attributes back after tracing, so an assignment would be lost without a word.  A buffer
that is assigned anew is written into the old one, which export carries over.  A plain tensor attribute that is read
and then replaced is state that export cannot carry: refused.  One that is only written is a by-product: warned of.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopart.capture.guards import CaptureWarning
from autopart.ir.errors import RefusedError


@contextlib.contextmanager
def assignments(model: nn.Module, replaced: dict[str, torch.Tensor | None]) -> Iterator[None]:
    """While a model's forward is traced: carry over what it assigns to buffers, and note in `replaced` which plain
    tensor attributes it assigns, with what they were before."""
    buffers = [
        (module, path, name, tensor)
        for path, module in model.named_modules()
        for name, tensor in module._buffers.items()
        if tensor is not None
    ]
    plain = _plain_tensors(model)
    yield
    for module, path, name, tensor in buffers:
        _carry_over(module, ".".join(filter(None, (path, name))), name, tensor)
    for place, tensor in _plain_tensors(model).items():
        if plain.get(place) is not tensor:
            replaced[place] = plain.get(place)


def _carry_over(module: nn.Module, full: str, name: str, old: torch.Tensor) -> None:
    new = module._buffers.get(name)
    if new is old:
        return
    if new is None or new.shape != old.shape or new.dtype != old.dtype:
        raise RefusedError(
            f"forward() replaces buffer {full} by another kind of tensor",
            why=f"{_kind(old)} becomes {_kind(new)}, and every micro-batch runs the same program",
            fix="keep its shape and dtype, or compute it where it is used",
        )
    old.copy_(new.detach())
    module._buffers[name] = old


def _kind(tensor: torch.Tensor | None) -> str:
    return "nothing" if tensor is None else f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


def _plain_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors in attributes that are neither parameters nor buffers, also inside lists and dicts, by place."""
    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in _OWN or not isinstance(value, (torch.Tensor, list, tuple, dict)):
                continue
            for key, leaf in pytree.tree_leaves_with_path(value):
                if isinstance(leaf, torch.Tensor):
                    found[".".join(filter(None, (path, name))) + pytree.keystr(key)] = leaf
    return found


_OWN = frozenset(vars(nn.Module()))


def check_replaced(replaced: Mapping[str, torch.Tensor | None], read: Iterable[torch.Tensor]) -> None:
    """Refuse attributes that were replaced and are among the constants that the program reads; warn of the others."""
    constants = {id(tensor) for tensor in read}
    for place, old in replaced.items():
        if id(old) in constants:
            raise RefusedError(
                f"forward() replaces the tensor in attribute {place}",
                why="state that is neither a parameter nor a buffer would stay as it was while the model was captured",
                fix="make it a buffer (register_buffer), which is carried from step to step",
            )
        warnings.warn(
            f"forward() keeps a tensor in attribute {place}: a pipeline does not keep it", CaptureWarning, stacklevel=2
        )

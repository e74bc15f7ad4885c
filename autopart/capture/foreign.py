"""Parameters that belong to neither the model nor the loss function: export would freeze them without a word."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopart.capture.source_location import user_line
from autopart.ir.errors import RefusedError

_HARMLESS = {"__get__", "detach"}
"""Reading a shape or a dtype, and taking the values alone."""


class OwnParametersOnly(TorchFunctionMode):
    """Inside, which is while a model is traced and its own parameters are fake, a real one is refused where it is used
    as something to train."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_grad_enabled() and getattr(func, "__name__", "") not in _HARMLESS:
            for leaf in pytree.tree_iter((args, kwargs)):
                if type(leaf) in (nn.Parameter, torch.Tensor) and leaf.requires_grad and leaf.is_leaf:
                    raise _refusal(leaf)
        return func(*args, **kwargs)


def _refusal(tensor: torch.Tensor) -> RefusedError:
    return RefusedError(
        f"a parameter that belongs to neither the model nor the loss function is used, of shape {tuple(tensor.shape)}",
        where=user_line(traceback.extract_stack()),
        why="no stage would train it",
        fix="make it, or its module, a part of the model; of a loss, pass the module itself as loss_fn, not a function "
        "that calls it; what is not to be trained needs requires_grad_(False)",
    )

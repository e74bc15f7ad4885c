"""Everything of torch that is replaced while a model is traced: one list, entered once.

A habit (`custom_functions`, `checkpointing`, `no_effect`, `asking`, ...) gives its replacements by the names of this
list; `replaced` puts them in place.  They act on the thread that traces alone: other threads find torch as it is.
Entered elsewhere, for as long as one call of torch lasts: `composite_ops`, `autocast`, `randomness` (Python's and
numpy's draws), `observed` (attribute reads of modules and of the user's objects).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import _trace
from torch.fx.experimental import proxy_tensor
from torch.utils import checkpoint


@dataclass(frozen=True, slots=True)
class Patch:
    """One thing of torch that is replaced.  reason: why; private: whether torch may rename it without notice."""

    home: Any
    name: str
    reason: str
    private: bool = False


PATCHES = {
    "Function.apply": Patch(torch.autograd.Function, "apply", "export drops the backward of a custom function"),
    "inference_mode.__enter__": Patch(torch.inference_mode, "__enter__", "export sees no_grad and not inference mode"),
    "inference_mode.__exit__": Patch(torch.inference_mode, "__exit__", "export sees no_grad and not inference mode"),
    "autograd.backward": Patch(torch.autograd, "backward", "gradients made in forward() would be lost"),
    "Tensor.backward": Patch(torch.Tensor, "backward", "gradients made in forward() would be lost"),
    "Tensor.register_hook": Patch(torch.Tensor, "register_hook", "a hook would run once and never again"),
    "transformer._detect_is_causal_mask": Patch(
        nn.modules.transformer,
        "_detect_is_causal_mask",
        "torch's transformers look into a mask's numbers",
        private=True,
    ),
    "Module._apply": Patch(nn.Module, "_apply", "a conversion to what is there already makes other parameters", True),
    "Distribution._validate_args": Patch(
        torch.distributions.Distribution, "_validate_args", "checks of arguments branch on their numbers", private=True
    ),
    "CheckpointFunction.apply": Patch(checkpoint.CheckpointFunction, "apply", "it would detach what it computes"),
    "checkpoint.generator": Patch(
        checkpoint, "_checkpoint_without_reentrant_generator", "ops that are checkpointed are marked", private=True
    ),
    "GraphModule.recompile": Patch(fx.GraphModule, "recompile", "export writes dozens of codes that never run"),
    "export.print": Patch(_trace, "print", "export prints the half-made graph of what it cannot trace", private=True),
    "proxy_call": Patch(proxy_tensor, "proxy_call", "questions about numbers of the batch are answered", private=True),
    "FakeTensor.tolist": Patch(FakeTensor, "tolist", "questions about numbers of the batch are answered"),
    "torch.tensor": Patch(torch, "tensor", "lists that hold traced tensors become lists of numbers"),
}
"""What is replaced, by the name that a habit gives its replacement under."""


@contextlib.contextmanager
def replaced(replacements: Mapping[str, Any]) -> Iterator[None]:
    """Inside, these patches are in place: a function on this thread alone, any other value on all.  One thread at a
    time."""
    tracer = threading.get_ident()
    with contextlib.ExitStack() as entered:
        for key, replacement in replacements.items():
            patch = PATCHES[key]
            here = replacement
            if callable(replacement):
                here = _on_thread(tracer, replacement, getattr(patch.home, patch.name, print))
            entered.enter_context(mock.patch.object(patch.home, patch.name, here, create=key == "export.print"))
        yield


def _on_thread(tracer: int, replacement: Callable[..., Any], otherwise: Callable[..., Any]) -> Any:
    plain: Any = getattr(otherwise, "__func__", otherwise)

    def call(*args: Any, **kwargs: Any) -> Any:
        return (replacement if threading.get_ident() == tracer else plain)(*args, **kwargs)

    return classmethod(call) if plain is not otherwise else call

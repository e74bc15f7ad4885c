"""Checks of a model before it is traced: refused is what torch.export would lose silently.

Hooks, an autocast entered around the call, parameters and changed buffers that share memory without being one object,
lazy modules, and models whose trained values stayed on another rank.
"""

from __future__ import annotations

import sys
import sysconfig
import types
from collections.abc import Set

import torch
from torch import nn

from autopart.capture.trained import Trained
from autopart.ir.errors import RefusedError, UsageError


class CaptureWarning(UserWarning):
    """Something of the model is not carried over; results stay exact."""


EMPTIED = "_autopart_emptied"
"""Attribute of a tensor whose trained values stayed on another rank."""

_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}


def check_model(model: object) -> nn.Module:
    """The model, when it is one that can be captured without silent loss.

    Raises UsageError when it is no module, RefusedError for hooks and for aliased storage.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the model is a {type(model).__name__}, not a torch.nn.Module",
            fix="pass an instance of the model, not its class or its output",
        )
    _check_emptied(model)
    _check_lazy(model)
    check_hooks(model)
    _check_shared_storage(model)
    return model


def _check_emptied(model: nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if getattr(tensor, EMPTIED, False) and tensor.numel() == 0:
            raise UsageError(
                f"{name} is empty: its trained values stayed on another rank when a pipe was closed",
                why="the pipe was closed with sync=False, or after a failure",
                fix="build the model anew, and load a state that was saved before",
            )


def _check_lazy(model: nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise UsageError(
                f"{name} has no shape yet",
                why="a lazy module gets its parameters when it is called first",
                fix="call the model once on a batch before compile, and make the optimizer after that",
            )


def check_hooks(model: nn.Module) -> None:
    """Raises RefusedError for a hook on a module or a parameter that would run at capture alone."""
    for path, module in model.named_modules():
        for attribute, kind in _HOOKS.items():
            for hook in getattr(module, attribute).values():
                if _of_its_library(hook, module) or _only_asks_for_gradients(hook):
                    continue
                raise RefusedError(
                    f"a {kind} is registered: {getattr(hook, '__qualname__', repr(hook))}",
                    where=f"module {path or '(the model itself)'} ({type(module).__name__})",
                    why="hooks would run once while the model is captured and never again",
                    fix="remove it (handle.remove()) before compile, or do its work in forward()",
                )
    _check_global_hooks()
    _check_parameter_hooks(model)


def _only_asks_for_gradients(hook: object) -> bool:
    """Whether the only call that a hook makes is `requires_grad_`, as the hook on the embeddings does that reentrant
    checkpointing needs (`enable_input_require_grads`).  Which gradients flow is read of the captured program."""
    if not isinstance(hook, types.FunctionType) or hook.__closure__:
        return False
    return hook.__code__.co_names == ("requires_grad_",)


def _check_global_hooks() -> None:
    for attribute, kind in _HOOKS.items():
        for hook in getattr(nn.modules.module, f"_global{attribute}").values():
            raise RefusedError(
                f"a {kind} for all modules is registered: {getattr(hook, '__qualname__', repr(hook))}",
                why="hooks would run once while the model is captured and never again",
                fix="remove it (handle.remove()) before compile, or do its work in forward()",
            )


def _of_its_library(hook: object, module: nn.Module) -> bool:
    """True for a hook that an installed library put on a module of its own: part of how that module computes (weight
    norm, the output recorders of transformers), and captured with it."""
    home = getattr(hook, "__module__", None) or type(hook).__module__
    library = home.split(".")[0]
    if library != type(module).__module__.split(".")[0]:
        return False
    file = getattr(sys.modules.get(library), "__file__", None) or ""
    return file.startswith(tuple(sysconfig.get_path(name) for name in ("purelib", "platlib")))


def _check_parameter_hooks(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if getattr(param, "_backward_hooks", None) or getattr(param, "_post_accumulate_grad_hooks", None):
            raise RefusedError(
                f"a gradient hook is registered on parameter {name}",
                why="it would see the gradient of one micro-batch on one stage instead of the whole gradient",
                fix="remove it and change the gradient after step(), before optimizer.step()",
            )


def _check_shared_storage(model: nn.Module) -> None:
    seen: dict[int, tuple[str, torch.Tensor]] = {}
    for kind, pairs in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in pairs:
            if tensor.numel() == 0 or tensor.is_meta or tensor.layout != torch.strided:
                continue
            key = tensor.untyped_storage()._cdata
            first, other = seen.get(key, (name, tensor))
            if kind == "parameter":
                seen.setdefault(key, (name, tensor))
            if other is not tensor and not _apart(other, tensor):
                raise RefusedError(
                    f"parameter {first} and {kind} {name} share memory but are different objects",
                    why="an update of one would change the other only when both are on the same stage",
                    fix=f"tie them properly: assign the same nn.Parameter object to {first} and {name}",
                )


def check_aliased_buffers(model: nn.Module, changed: Set[str] | None = None) -> None:
    """Refuse buffers that share memory, under two names or as views, when one of them is changed.

    changed: names of the buffers that are; None when that is not known.
    """
    seen: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in model.named_buffers(remove_duplicate=False):
        if tensor.numel() == 0 or tensor.is_meta or tensor.layout != torch.strided:
            continue
        others = seen.setdefault(tensor.untyped_storage()._cdata, [])
        for first, other in others:
            one = other is tensor and changed is not None  # two names of one tensor: captured as one
            if not one and (changed is None or not changed.isdisjoint((first, name))) and not _apart(other, tensor):
                raise RefusedError(
                    f"buffers {first} and {name} share memory, and forward() changes one of them",
                    why="the other would keep its old values on another stage",
                    fix="keep one of them, or give each its own memory (tensor.clone())",
                )
        others.append((name, tensor))


def _apart(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not (a.is_contiguous() and b.is_contiguous()):
        return False
    a0, b0 = a.storage_offset() * a.element_size(), b.storage_offset() * b.element_size()
    return a0 + a.nbytes <= b0 or b0 + b.nbytes <= a0


def check_autocast(device_type: str) -> None:
    """Refuse an autocast region that is active outside the model: it would not be recorded."""
    for kind in {"cpu", device_type}:
        if torch.is_autocast_enabled(kind):
            raise RefusedError(
                f"autocast is enabled around the call for {kind!r}",
                why="what happens outside forward() is not captured, so the step would run in another precision",
                fix='leave it out, and pass precision="bf16" (or "fp16") to compile, or enter torch.autocast inside '
                "forward(), or convert the model (model.to(torch.bfloat16))",
            )


def tied_names(model: nn.Module | Trained) -> dict[str, str]:
    """For every name of a parameter or buffer that is not its first name, the first name.  By identity, so that it
    works on the meta device too."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        owner = first.setdefault(id(tensor), name)
        if owner != name:
            tied[name] = owner
    return tied

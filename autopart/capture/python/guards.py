"""Checks of a model before it is traced: refused is what torch.export would lose silently.

Hooks, an autocast entered around the call, parameters and changed buffers that share memory without being one object,
lazy modules, and models whose trained values stayed on another rank.
"""

from __future__ import annotations

import itertools
import sys
import types
import warnings
from collections.abc import Iterator, Set

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autopart.capture.source_location import INSTALLED
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
    """Return the model if it can be captured.

    Raises UsageError if it is not a module or has no values, RefusedError for hooks and for aliased storage.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the model is a {type(model).__name__}, not a torch.nn.Module",
            fix="pass an instance of the model, not its class or its output",
        )
    for path, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            continue
        raise UsageError(
            f"module {path} is a TorchScript module" if path else "the model is a TorchScript module",
            why="it has no Python code to capture",
            fix="pass the module that torch.jit.script or torch.jit.trace was given",
        )
    for path, module in model.named_modules():
        homes = [kind.__module__ for kind in type(module).__mro__]
        for where, name, fix in _WRAPPERS:
            if any(home.startswith(where) for home in homes):
                place = f"module {path}" if path else ""
                raise UsageError(
                    f"the model is wrapped in {name}", where=place, why="it is distributed already", fix=fix
                )
    _check_forward(model)
    _check_values(model)
    check_hooks(model)
    _check_shared_storage(model)
    return model


_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "pass model.module; replicas= is data parallelism"),
    ("torch.distributed.fsdp", "FSDP", "pass the model before it is sharded; zero=1 shares the optimizer's state"),
)
"""Wrappers by where their class is, their names, and what to do instead."""
_LIGHTNING = ("lightning.", "pytorch_lightning.")


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the model that `torch.compile` wrapped, with a warning, or this one: stages are compiled by the plan."""
    inner = getattr(model, "_orig_mod", None)
    called = model._compiled_call_impl if isinstance(model, nn.Module) else None
    if isinstance(inner, nn.Module) or (called is not None and not getattr(called, "of_a_pipe", False)):
        warnings.warn(
            'the model was given to torch.compile, which has no effect on a pipeline: backend="inductor" compiles the '
            "stages, and names of parameters are those of the model itself",
            CaptureWarning,
            stacklevel=5,
        )
    return inner if isinstance(inner, nn.Module) else model


def _check_forward(model: nn.Module) -> None:
    """Raise UsageError for a LightningModule that has a training_step alone."""
    home = next((kind for kind in type(model).__mro__ if "forward" in vars(kind)), nn.Module)
    if any(kind.__module__.startswith(_LIGHTNING) for kind in type(model).__mro__) and (
        home is nn.Module or home.__module__.startswith(_LIGHTNING)
    ):
        inner = next((name for name, _ in model.named_children()), "net")
        raise UsageError(
            f"{type(model).__name__} is a LightningModule without a forward",
            why="a pipeline captures forward() and a loss; training_step, its logging and its optimizers stay outside",
            fix=f"autopart.compile(module.{inner}, sample=(inputs, target), loss_fn=...), then pipe.step(batch) in "
            "place of training_step and backward (docs/lightning.md)",
        )


def _check_values(model: nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise UsageError(
                f"{name} has no shape yet",
                why="a lazy module gets its parameters when it is called first",
                fix="call the model once on a batch before compile, and make the optimizer after that",
            )
        # numbers that are codes: of torchao's kind, or of a foreign class as in bitsandbytes
        codes = not (tensor.is_floating_point() or tensor.is_complex()) or hasattr(tensor, "quant_state")
        foreign = type(tensor).__module__.split(".")[0] != "torch"
        if foreign and (codes or is_traceable_wrapper_subclass(tensor)):
            raise RefusedError(
                f"{name} is quantized: a {type(tensor).__module__}.{type(tensor).__qualname__}",
                why="its scales and its way to compute belong to its class, and a captured program holds plain tensors",
                fix="load the base model without quantization_config, in torch.bfloat16: frozen, it has neither "
                "gradients nor optimizer state, and each rank holds its stages alone (docs/lora.md)",
            )
        if getattr(tensor, EMPTIED, False) and tensor.numel() == 0:
            raise UsageError(
                f"{name} is empty: its trained values stayed on another rank when a pipe was closed",
                why="the pipe was closed with sync=False, or after a failure",
                fix="build the model again, and load a state that was saved before",
            )


def check_hooks(model: nn.Module) -> None:
    """Raise RefusedError for a hook on a module or a parameter that would only run during the capture."""
    found = [
        (kind, hook, f"module {path or '(the model itself)'} ({type(module).__name__})")
        for path, module in model.named_modules()
        for attribute, kind in _HOOKS.items()
        for hook in getattr(module, attribute).values()
        if not _is_captured_with(hook, module)
    ]
    for attribute, kind in _HOOKS.items():
        for hook in getattr(nn.modules.module, f"_global{attribute}").values():
            found.append((f"{kind} for all modules", hook, ""))
    for kind, hook, where in found:
        raise RefusedError(
            f"a {kind} is registered: {getattr(hook, '__qualname__', repr(hook))}",
            where=where,
            why="hooks would run once while the model is captured and never again",
            fix="remove it (handle.remove()) before compile, or do its work in forward()",
        )
    for name, param in model.named_parameters():
        if getattr(param, "_backward_hooks", None) or getattr(param, "_post_accumulate_grad_hooks", None):
            raise RefusedError(
                f"a gradient hook is registered on parameter {name}",
                why="it would see the gradient of one micro-batch on one stage instead of the whole gradient",
                fix="remove it and change the gradient after step(), before optimizer.step()",
            )


def _is_captured_with(hook: object, module: nn.Module) -> bool:
    """Return whether a hook is part of how a module computes, or changes nothing of that.

    An installed library put the first on a module of its own, as weight norm does.  The second makes no call but
    `requires_grad_`, as in `enable_input_require_grads`, which reentrant checkpointing needs; which gradients flow is
    read from the captured program.
    """
    if isinstance(hook, types.FunctionType) and not hook.__closure__ and hook.__code__.co_names == ("requires_grad_",):
        return True
    library = (getattr(hook, "__module__", None) or type(hook).__module__).split(".")[0]
    file = getattr(sys.modules.get(library), "__file__", None) or ""
    return library == type(module).__module__.split(".")[0] and file.startswith(INSTALLED)


def _check_shared_storage(model: nn.Module) -> None:
    parameters = dict(model.named_parameters())
    for first, name in _sharing(model):
        if first in parameters:
            raise RefusedError(
                f"parameter {first} and {'parameter' if name in parameters else 'buffer'} {name} share memory but are "
                "different objects",
                why="an update of one would change the other only when both are on the same stage",
                fix=f"tie them properly: assign the same nn.Parameter object to {first} and {name}",
            )


def check_aliased_buffers(model: nn.Module, changed: Set[str] | None = None) -> None:
    """Raise RefusedError if buffers share memory and one of them is changed.

    changed: names of the changed buffers; None if unknown, then two names of one buffer count too.
    """
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for first, name in _sharing(model, same_too=changed is None):
        if first in buffers and name in buffers and (changed is None or not changed.isdisjoint((first, name))):
            raise RefusedError(
                f"buffers {first} and {name} share memory, and forward() changes one of them",
                why="the other would keep its old values on another stage",
                fix="keep one of them, or give each its own memory (tensor.clone())",
            )


def _sharing(model: nn.Module, *, same_too: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the names of each two parameters or buffers whose memory overlaps, the parameter first.

    same_too: also of two names of one tensor.
    """
    seen: dict[int, list[tuple[str, torch.Tensor]]] = {}
    named = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for name, tensor in itertools.chain(*named):
        if tensor.numel() == 0 or tensor.is_meta or tensor.layout != torch.strided:
            continue
        others = seen.setdefault(tensor.untyped_storage()._cdata, [])
        for first, other in others:
            if same_too if other is tensor else not _apart(other, tensor):
                yield first, name
        others.append((name, tensor))


def _apart(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not (a.is_contiguous() and b.is_contiguous()):
        return False
    a0, b0 = a.storage_offset() * a.element_size(), b.storage_offset() * b.element_size()
    return a0 + a.nbytes <= b0 or b0 + b.nbytes <= a0


def check_autocast(device_type: str) -> None:
    """Raise RefusedError for an autocast region that is active outside the model: it would not be recorded."""
    for kind in {"cpu", device_type}:
        if torch.is_autocast_enabled(kind):
            raise RefusedError(
                f"autocast is enabled around the call for {kind!r}",
                why="nothing outside forward() is captured, so the step would run in another precision",
                fix='leave it out, and pass precision="bf16" (or "fp16") to compile, or enter torch.autocast inside '
                "forward(), or convert the model (model.to(torch.bfloat16))",
            )


def tied_names(model: nn.Module | Trained) -> dict[str, str]:
    """Return, for every further name of a parameter or buffer, its first name.  Works on the meta device too."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        owner = first.setdefault(id(tensor), name)
        if owner != name:
            tied[name] = owner
    return tied

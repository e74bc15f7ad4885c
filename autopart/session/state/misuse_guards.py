"""What scripts for plain torch do with a pipe, a loss and an optimizer, where a pipeline needs something else.

A step has done the backward already, so its loss refuses one.  An optimizer that needs a closure looks at all
parameters at once, of which a rank holds a part: it is refused when it steps.  Attributes of modules and of
DistributedDataParallel that a pipe lacks raise an error that says what to use instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopart.costs.optimizer_state import needs_closure
from autopart.ir.errors import UsageError, short_errors
from autopart.runtime.tensors import LocalTensors

C = TypeVar("C", bound=type)
_CONVERTED = (
    "convert the model before compile (model.to(torch.bfloat16)), and name the devices there: "
    'autopart.compile(model, "cuda:4")'
)
_TRAINS = "pipe.step(batch) trains, pipe.eval_loss(batch) and pipe.predict(inputs) evaluate"
_INSTEAD = {
    **dict.fromkeys(("to", "cuda", "cpu", "half", "float", "double", "bfloat16", "to_empty"), _CONVERTED),
    **dict.fromkeys(("forward", "backward", "train_batch", "generate"), _TRAINS),
    "no_sync": "leave it out: step() only adds to .grad; to accumulate, call optimizer.step() every n-th time",
    "module": "pipe.model is the model that was compiled; call pipe.sync_model() before you read its parameters",
    "save_pretrained": "pipe.sync_model() on every rank, then pipe.model.save_pretrained(folder) on rank 0",
    "buffers": "pipe.named_buffers() yields this rank's",
    "size": "pipe.world_size",
    "device": "pipe.cluster.devices[pipe.rank] describes this rank's device",
}
"""By the name of what torch's modules, wrappers and engines have: what to use instead."""


class MissingError(UsageError, AttributeError):
    """An attribute that other wrappers of models have, and a pipe lacks."""


def unknown(name: str, captures: Any) -> AttributeError:
    """The error for an attribute that a pipe lacks.  captures: of its model, None while the pipe is being made."""
    if name.startswith("_") or captures is None:
        return AttributeError(f"'Pipe' object has no attribute {name!r}")
    fix = _INSTEAD.get(name, "")
    if not fix and hasattr(captures.model, name):
        fix = f"pipe.model.{name} is the model's own"
    return MissingError(f"a pipe has no attribute {name!r}", fix=fix or "docs/pipe.md lists what it has")


class NotAModule:
    """What a pipe answers where it is used as a module."""

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Raises UsageError: calling the model says neither whether to train nor what comes back."""
        raise UsageError(
            "a pipe is not called like a model",
            why="forward and backward of all micro-batches run together, so there is no output to call backward() on",
            fix=_TRAINS,
        )

    def __getattr__(self, name: str) -> NoReturn:
        """Raises an AttributeError that says what to use instead."""
        raise unknown(name, self.__dict__.get("_captures"))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raises UsageError: a pipe is neither copied nor saved."""
        raise UsageError(
            "a pipe can be neither copied nor saved",
            why="it holds connections to other ranks, and one stage of the model",
            fix="save pipe.state_dict(), or pipe.sync_model() and then copy or save pipe.model",
        )


def short_tracebacks(cls: C) -> C:
    """Let public methods and properties of a class raise our own errors without the frames in between.

    Bugs of ours keep theirs, and so do causes; the logger "autopart" has all frames at the level DEBUG.
    """
    for name, value in list(vars(cls).items()):
        if name.startswith("_") and name != "__init__":
            continue
        if inspect.isfunction(value):
            setattr(cls, name, short_errors(value))
        elif isinstance(value, property) and value.fget is not None:
            setattr(
                cls,
                name,
                property(short_errors(value.fget), value.fset and short_errors(value.fset), doc=value.__doc__),
            )
    return cls


class Loss(torch.Tensor):
    """A loss that a pipeline returned, and what is computed of it: a tensor without a backward."""

    def backward(self, *_: Any, **__: Any) -> NoReturn:
        """Raises UsageError."""
        raise UsageError(
            "backward() is called on a loss that a pipeline returned",
            why="pipe.step(batch) runs forward and backward of all micro-batches and has added the gradients to .grad; "
            "eval_loss computes none",
            fix="leave backward() out: optimizer.zero_grad(); loss = pipe.step(batch); optimizer.step().  To weigh the "
            "loss, do so in the model or in loss_fn",
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self.as_subclass(torch.Tensor)
        return plain.__reduce_ex__(protocol)  # a file needs nothing of ours to be read


def without_backward(loss: torch.Tensor) -> torch.Tensor:
    """The same tensor, which says what to do instead of backward()."""
    return loss.as_subclass(Loss)


def refuse_target(model: torch.nn.Module, batch: Any) -> None:
    """Raises UsageError for a pair given to `predict`, where the model takes one argument: the second is a target."""
    if not isinstance(batch, tuple) or len(batch) != 2 or isinstance(batch[1], Mapping):
        return
    try:
        inspect.signature(model.forward).bind(*batch)
    except TypeError as error:
        raise UsageError(
            "predict was given a pair that the model does not take",
            why=f"{error}; pairs of inputs and target are for step and eval_loss",
            fix="leave the target out: pipe.predict(inputs)",
        ) from None


def watch_optimizers(world_size: int, tensors: Callable[[], LocalTensors]) -> Callable[[], None]:
    """From now on a step of an optimizer that cannot train what it was made for raises UsageError: one that needs a
    closure, over several ranks, and one that drives parameters of the model in the place of their masters.

    tensors: what this rank holds, which changes with the plan.  Returns what ends it.
    """
    known: dict[type, bool] = {}

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        kind = type(optimizer)
        if kind not in known:
            known[kind] = world_size > 1 and needs_closure(kind)
        held = tensors()
        rounded = held.masters.rounded
        if not known[kind] and not rounded:
            return
        driven = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        mastered = next((rounded[one] for one in driven if one in rounded), None)
        if mastered is not None:
            raise UsageError(
                f"an optimizer drives {mastered} of the model, which has a master",
                why="with master_weights=True gradients go to masters in fp32, and the model gets their values rounded",
                fix="make the optimizer from pipe.parameters(), or pipe.named_parameters(), after the pipe is planned",
            )
        if known[kind] and {id(tensor) for tensor in held.driven.values()}.intersection(driven):
            raise UsageError(
                f"{kind.__name__} cannot drive the parameters of a pipeline over several ranks",
                why="it looks at all parameters at once, and each rank holds its own part of them",
                fix="use an optimizer that takes each parameter by itself, such as torch.optim.AdamW",
            )

    handle = register_optimizer_step_pre_hook(before_step)
    return handle.remove

"""Errors for uses of a pipe, its loss and its optimizer that work with plain torch modules, but not with a pipeline.

What torch does without asking the pipe is noticed by `torch_calls`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopart.costs.optimizer_state import needs_closure
from autopart.ir.errors import UsageError, short_errors
from autopart.ir.plan import Plan
from autopart.passes.program.schedules import find, streams
from autopart.runtime.tensors import LocalTensors

C = TypeVar("C", bound=type)
Stepped = Callable[[torch.optim.Optimizer], None]
_CONVERTED = (
    "convert the model before compile (model.to(torch.bfloat16)), and name the devices there: "
    'autopart.compile(model, "cuda:4")'
)
TRAINS = "pipe.step(batch) trains, pipe.eval_loss(batch) and pipe.predict(inputs) evaluate"
_INSTEAD = {
    **dict.fromkeys(("to", "cuda", "cpu", "half", "float", "double", "bfloat16", "to_empty"), _CONVERTED),
    **dict.fromkeys(("forward", "backward", "train_batch", "eval_batch", "compute_loss", "generate"), TRAINS),
    **dict.fromkeys(("save_checkpoint", "save_state", "save_model"), "pipe.save(folder, optimizer), on every rank"),
    **dict.fromkeys(("load_checkpoint", "load_state", "from_pretrained"), "pipe.load(folder, optimizer)"),
    **dict.fromkeys(("local_rank", "global_rank", "process_index"), "pipe.rank"),
    "no_sync": "leave it out: step() only adds to .grad; to accumulate, give n steps scale=1 / n, and call "
    "optimizer.step() every n-th time",
    "module": "pipe.model is the model that was compiled; call pipe.sync_model() before you read its parameters",
    **dict.fromkeys(("evaluate", "validate", "test", "fit", "loss", "train_step", "training_step"), TRAINS),
    **dict.fromkeys(("size", "num_processes"), "pipe.world_size"),
    "gradient_checkpointing_enable": 'call it on the model before compile, or pass recompute="all" to compile',
    "device": "pipe.cluster.devices[pipe.rank] describes this rank's device",
}
"""What to use instead, by name of an attribute that torch's modules, wrappers and other engines have."""
_OF_MODULES = frozenset(vars(torch.nn.Module()))
"""Attributes of every module: what asks for one of them was given a pipe for a module."""


class MissingError(UsageError, AttributeError):
    """An attribute that other wrappers of models have, and a pipe lacks."""


def unknown(name: str, core: Any) -> Exception:
    """Return what to raise for an attribute that a pipe lacks.  core: of the pipe, None in its constructor."""
    if name == "_torchdynamo_orig_callable":  # an AttributeError would let torch.compile go on, and fail at a call
        return UsageError(
            "a pipe is given to torch.compile",
            why="a pipe compiles the stages of its plan itself",
            fix='use the pipe as it is, with backend="inductor" in autopart.compile',
        )
    if name == "_ddp_params_and_buffers_to_ignore":  # an AttributeError would let DDP go on, and end the process
        return UsageError(
            "a pipe is wrapped in DistributedDataParallel",
            why="a pipe sums gradients over its replicas itself",
            fix="use the pipe as it is, with replicas= in compile for data parallelism",
        )
    if core is None or (name.startswith("_") and name not in _OF_MODULES):
        return AttributeError(f"'Pipe' object has no attribute {name!r}")
    if name in _OF_MODULES:
        return MissingError(
            f"a pipe has no attribute {name!r}",
            why="it is not a torch.nn.Module, and was passed where one is needed, such as Accelerate's unwrap_model",
            fix="pass pipe.model, the model that was compiled, after pipe.sync_model(); docs/trainer.md has what "
            "replaces calls of Accelerate",
        )
    fix = _INSTEAD.get(name, "")
    if not fix and hasattr(core.model, name):
        fix = f"pipe.model.{name} is the model's own"
    return MissingError(f"a pipe has no attribute {name!r}", fix=fix or "docs/pipe.md lists what it has")


def short_tracebacks(cls: C) -> C:
    """Let public methods and properties of a class raise an AutopartError without the frames in between.

    GraphError and ProgramError, which are bugs, keep their frames; the logger "autopart" has all at the level DEBUG.
    """
    for name, value in list(vars(cls).items()):
        if name.startswith("_") and name not in ("__init__", "__call__"):
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


def refuse_backward() -> NoReturn:
    """Raise UsageError for a backward of a loss that a pipe returned."""
    raise UsageError(
        "backward() is called on a loss that a pipeline returned",
        why="pipe.step(batch) runs forward and backward of all micro-batches and has added the gradients to .grad; "
        "eval_loss computes none",
        fix="leave backward() out: optimizer.zero_grad(); loss = pipe.step(batch); optimizer.step().  To weigh the "
        "loss: pipe.step(batch, scale=0.5)",
    )


class Loss(torch.Tensor):
    """A loss that a pipeline returned, and tensors computed from it: `backward` is refused."""

    def backward(self, *_: Any, **__: Any) -> NoReturn:
        """Raise UsageError."""
        refuse_backward()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.as_subclass(torch.Tensor))

    def __format__(self, spec: str) -> str:
        return format(self.as_subclass(torch.Tensor), spec)  # torch formats no subclass: f"{loss:.3f}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self.as_subclass(torch.Tensor)
        return plain.__reduce_ex__(protocol)  # a file needs nothing of ours to be read


def without_backward(loss: torch.Tensor) -> torch.Tensor:
    """Return the same tensor, whose backward() raises UsageError."""
    return loss.as_subclass(Loss)


def refuse_without_gradients() -> None:
    """Raise UsageError for a training step inside torch.no_grad, where the plain model would only be evaluated."""
    if not torch.is_grad_enabled():
        raise UsageError(
            "pipe.step is called where gradients are turned off (torch.no_grad or torch.inference_mode)",
            why="a step trains: it runs the backward and adds to .grad",
            fix="pipe.eval_loss(batch) evaluates; to train, call step outside of that block",
        )


def refuse_in_training(plan: Plan, doing: str) -> None:
    """Raise UsageError for a call that needs the gradients of a whole step, under an asynchronous schedule."""
    if streams(find(plan.schedule)):
        raise UsageError(
            f"{doing} has no meaning under schedule {plan.schedule}",
            why="each stage updates its weights by itself, as soon as a batch has come back to it: there is no moment "
            "at which all gradients of a step are there",
            fix="use pipe.train(batches, optimizer=...), whose optimizers may clip what each rank holds; or a "
            "synchronous schedule, such as schedule='1f1b'",
        )


def outside_inference_mode() -> AbstractContextManager[None]:
    """Return a context that leaves torch.inference_mode: a program cannot be captured inside."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def refuse_clipping(reader: FrameType) -> None:
    """Raise UsageError if torch's clip_grad_norm_ reads this rank's parameters: it would clip by their norm alone."""
    if reader.f_code.co_name == "clip_grad_norm_" and reader.f_code.co_filename == torch.nn.utils.clip_grad.__file__:
        raise UsageError(
            "torch.nn.utils.clip_grad_norm_ is called on the parameters of one rank",
            why="each rank keeps its own part of the parameters, and would clip by the norm of these alone",
            fix="use pipe.clip_grad_norm_(max_norm)",
        )


def watch_optimizers(
    world_size: int, tensors: Callable[[], LocalTensors], kept: Callable[[], set[int]], stepped: Stepped
) -> Callable[[], None]:
    """Let steps of optimizers raise UsageError if they read all parameters at once (over several ranks), or update
    parameters that have an fp32 master weight, or were made for the parameters of an earlier plan, or may look at whole
    tensors where this rank holds pieces.  tensors: returns what this rank holds, which changes with the plan.  kept:
    returns the identities of the parameters that this rank updates.  stepped: is told of every step.  Returns a
    function that removes the check."""

    needing: dict[type, bool] = {}
    seen: WeakKeyDictionary[torch.optim.Optimizer, tuple[LocalTensors | None, set[int], set[int]]] = WeakKeyDictionary()

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        kind = type(optimizer)
        if kind.__name__ == "ZeroRedundancyOptimizer" and world_size > 1:
            raise UsageError(
                "torch's ZeroRedundancyOptimizer updates the parameters of a pipe",
                why="it divides them among all ranks, as if each had the whole model",
                fix="use the optimizer itself, with zero=1 in autopart.compile",
            )
        stepped(optimizer)
        if kind not in needing:
            needing[kind] = needs_closure(kind)
        held, together = tensors(), world_size > 1 and needing[kind]
        rounded = held.masters.rounded
        driven = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        earlier, was, drove = seen.get(optimizer, (None, set(), set()))
        mine = was if earlier is held else kept()  # looked at once a plan: this is before every step
        left = drove & was if was != mine and drove == set(driven) else set()
        if left - mine or (left and _unled(held, seen, mine - was)):
            raise UsageError(
                "the optimizer was made before the plan was changed, for parameters that this rank no longer has",
                why="it would not update the parameters that this rank received",
                fix="pipe.adopt(plan, optimizer), which keeps its state; or make a new one from pipe.parameters()",
            )
        if earlier is not held:
            _require_elementwise(optimizer, held, set(driven))
        seen[optimizer] = held, mine, set(driven)
        if not together and not rounded:
            return
        mastered = next((rounded[one] for one in driven if one in rounded), None)
        if mastered is not None:
            raise UsageError(
                f"an optimizer updates {mastered} of the model, which has a master",
                why="with master_weights=True gradients go to masters in fp32, and the model gets their values rounded",
                fix="make the optimizer from pipe.parameters(), or pipe.named_parameters(), after the pipe is planned",
            )
        if together and {id(tensor) for tensor in held.driven.values()}.intersection(driven):
            raise UsageError(
                f"{type(optimizer).__name__} cannot update the parameters of a pipeline over several ranks",
                why="it needs all parameters at once, and each rank holds only its own",
                fix="use an optimizer that updates each parameter separately, such as torch.optim.AdamW",
            )

    handle = register_optimizer_step_pre_hook(before_step)
    return handle.remove


ELEMENTWISE = frozenset(
    ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop")
)
"""Optimizers of torch that update each element of a parameter by itself."""


def _require_elementwise(optimizer: torch.optim.Optimizer, held: LocalTensors, driven: set[int]) -> None:
    """Raise UsageError for an optimizer that may look at whole tensors, and is given pieces of them."""
    kind = type(optimizer)
    known = kind.__name__ in ELEMENTWISE and kind.__module__.startswith("torch.optim.")
    if known or getattr(optimizer, "elementwise", False):
        return
    cut = next((n for n, t in held.driven.items() if id(t) in driven and not held.piece(n).is_whole), None)
    if cut is not None:
        raise UsageError(
            f"{kind.__name__} may look at whole tensors, and this rank holds a part of {cut}",
            why="norms, factors or blocks of a part are not those of the whole tensor: it would train another model",
            fix="use an optimizer of torch.optim that updates each element by itself, such as AdamW; or set "
            "optimizer.elementwise = True if this one does; or use tensor_parallel=1",
        )


def _unled(held: LocalTensors, optimizers: Iterable[torch.optim.Optimizer], new: set[int]) -> bool:
    """Return whether no optimizer has some of the new parameters, by identity, that this rank trains."""
    driven = {id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
    return bool({id(tensor) for tensor in held.driven.values() if tensor.requires_grad} & new - driven)

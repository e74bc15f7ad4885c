"""An unmodified model and one batch become a flat, functional torch.fx graph, by torch.export.

The model is traced inside a thin wrapper that takes the batch's tensors and returns only what is wanted (the loss,
or for `predict` the outputs): caches and large unused outputs are then never part of the program.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.fx.graph import _PyTreeCodeGen
from torch.utils import _pytree as pytree

from autopart.capture import guards
from autopart.capture.batch.batch import Batch, unflatten
from autopart.capture.batch.questions import WholeBatchAsked
from autopart.capture.habits import checkpointing
from autopart.capture.habits import noop_conversions as no_effect
from autopart.capture.habits.autocast import Autocast
from autopart.capture.habits.foreign import OwnParametersOnly
from autopart.capture.habits.module_state import assignments
from autopart.capture.habits.randomness import no_random_numbers
from autopart.capture.reads import host_reads as asking
from autopart.capture.reads.data_dependent_errors import is_data_dependent, size_fix
from autopart.capture.reads.host_reads import Asker
from autopart.capture.source_location import user_place
from autopart.capture.trace.patches import replaced
from autopart.capture.trace.untraceable import untraceable
from autopart.capture.watch.observed import Observed, check_kept, observing
from autopart.ir.errors import AutopartError, CaptureError

LossFn = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class OutputSpec:
    """How the flat outputs of a `predict` program become what the model returns."""

    spec: Any
    kind: type | None  # a mapping class such as transformers' ModelOutput, or None
    constants: tuple[Any, ...]  # one per leaf: the leaf when it is no tensor, else _TENSOR


_TENSOR = object()


class _Sink:
    """Where a traced forward leaves what it saw: torch.export puts a module's own attributes back."""

    outputs: OutputSpec | None = None
    asker: Asker | None = None

    def __init__(self) -> None:
        self.observed = Observed()


class Wrapper(nn.Module):
    """Takes the tensor leaves of a batch; returns the loss, or the outputs when `wants_outputs`."""

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        loss_fn: LossFn | None,
        wants_outputs: bool,
        autocast: Autocast | None = None,
    ) -> None:
        """autocast: that model and loss function run in."""
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self._batch = batch
        self._wants_outputs = wants_outputs
        self._autocast = autocast
        self._sink = _Sink()
        self._watched = [model, *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]

    @property
    def outputs(self) -> OutputSpec | None:
        """What the model returned while it was traced, or None for a loss."""
        return self._sink.outputs

    def answered_by(self, asker: Asker) -> None:
        """Let it answer what forward() asks about the numbers of the batch."""
        self._sink.asker = asker

    @property
    def observed(self) -> Observed:
        """What forward() and the loss function read of their modules' attributes while they were traced."""
        return self._sink.observed

    def forward(self, *tensors: torch.Tensor) -> Any:
        queue = iter(tensors)
        leaves = tuple(next(queue) if isinstance(x, torch.Tensor) else x for x in self._batch.leaves)
        args, kwargs, target = unflatten(leaves, self._batch.spec)
        functions = [self.loss_fn] if self.loss_fn is not None else []
        if self._sink.asker is not None:
            self._sink.asker.begin()
        with (
            no_random_numbers(),
            observing(self._watched, functions, self._sink.observed, self._constants_asked) as noted,
            OwnParametersOnly(self._watched),
            self._autocast.region() if self._autocast is not None else contextlib.nullcontext(),
        ):
            with assignments(self.model), noted():
                result = self.model(*args, **kwargs)
            if self._wants_outputs:
                return self._outputs_of(result)
            if isinstance(self.loss_fn, nn.Module):
                with assignments(self.loss_fn), noted():
                    return self._wide(scalar(self.loss_fn(result, target), "loss_fn"))
            with noted():
                found = loss_of(result) if self.loss_fn is None else scalar(self.loss_fn(result, target), "loss_fn")
                return self._wide(found)

    def _constants_asked(self) -> bool:
        return self._sink.asker is not None and self._sink.asker.constants_asked

    def _wide(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, under fp16 in fp32: its scaled gradient would be infinite."""
        scaled = self._autocast is not None and self._autocast.dtype is torch.float16
        return loss.float() if scaled and loss.dtype is torch.float16 else loss

    def _outputs_of(self, result: Any) -> tuple[torch.Tensor, ...]:
        kind = None
        if isinstance(result, Mapping):
            kind = type(result)
            result = {k: v for k, v in result.items() if _is_data(v)}
        leaves, spec = pytree.tree_flatten(result)
        self._sink.outputs = OutputSpec(
            spec, kind, tuple(_TENSOR if isinstance(x, torch.Tensor) else x for x in leaves)
        )
        return tuple(x for x in leaves if isinstance(x, torch.Tensor))


def rebuild_outputs(spec: OutputSpec, tensors: tuple[torch.Tensor, ...]) -> Any:
    """What the model returns, from the tensors that a `predict` program returns."""
    queue = iter(tensors)
    leaves = [next(queue) if constant is _TENSOR else constant for constant in spec.constants]
    tree = pytree.tree_unflatten(leaves, spec.spec)
    return tree if spec.kind is None else spec.kind(**tree)


def _is_data(value: Any) -> bool:
    """True for tensors, numbers and containers of them: what can be sent (a cache object cannot)."""
    leaves = pytree.tree_leaves(value)
    return all(x is None or isinstance(x, (torch.Tensor, bool, int, float, str)) for x in leaves)


def loss_of(result: Any) -> torch.Tensor:
    """The scalar loss in what a model returned: the tensor itself, `.loss`, ["loss"], the first of a tuple where that
    is one number, else the only entry that is one floating point number.  Raises CaptureError."""
    if isinstance(result, torch.Tensor):
        return scalar(result, "the model")
    entries: dict[Any, Any] = {}
    if isinstance(result, Mapping):
        entries = dict(result)
    elif isinstance(result, (tuple, list)):
        entries = dict(enumerate(result))
    own = entries.get("loss", getattr(result, "loss", None))
    if isinstance(own, torch.Tensor):
        return scalar(own, "the model")
    if isinstance(entries.get(0), torch.Tensor) and entries[0].numel() == 1 and entries[0].is_floating_point():
        return scalar(entries[0], "the model")
    numbers = {
        name: entry
        for name, entry in entries.items()
        if isinstance(entry, torch.Tensor) and entry.dim() == 0 and entry.is_floating_point()
    }
    if len(numbers) == 1 and not ("loss" in entries or hasattr(result, "loss")):
        return scalar(next(iter(numbers.values())), "the model")
    several = f": {', '.join(map(repr, numbers))} are one number each" if len(numbers) > 1 else ""
    raise CaptureError(
        f"the model returned {type(result).__name__} without a loss{several}",
        fix='return the loss first or as "loss"; or pass labels in the batch, if the model computes its own loss, or '
        "loss_fn=... to compile",
    )


def scalar(loss: Any, source: str) -> torch.Tensor:
    """The loss as a 0-dim floating tensor; raises CaptureError when it is none."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss.reshape(())
    what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise CaptureError(
        f"{source} returned {what} where a scalar loss is needed",
        fix="return one number (a mean or a sum), or pass loss_fn=... to compile",
    )


def export(wrapper: Wrapper, batch: Batch, asker: Asker) -> ExportedProgram:
    """Trace the wrapper with the tensors of `batch`; `asker` answers what it asks about their numbers.

    Raises CaptureError for control flow on tensor data and for whatever else torch.export cannot trace;
    both name the module path and the user's line.  Raises WholeBatchAsked where the answers are those of a whole batch
    that was not traced yet.
    """
    if not batch.tensors:
        raise CaptureError("the batch holds no tensor", fix="pass the model's inputs as tensors")
    wrapper.answered_by(asker)
    try:
        habits = (guards, no_effect, checkpointing)
        patches = {key: patch for habit in habits for key, patch in habit.replacements().items()}
        with replaced({**patches, **asking.replacements(asker)}), uncompiled():
            program = torch.export.export(wrapper, batch.tensors, strict=False)
        asker.end()
        check_kept(wrapper.observed, program.constants)
        return program
    except AutopartError as error:
        raise error.with_traceback(None) from None  # a stack through torch.export helps nobody
    except Exception as error:
        if asker.wants_whole:
            raise WholeBatchAsked from None
        raise asker.explained(error) or explained(error, wrapper.model) from error


def explained(error: Exception, model: nn.Module) -> CaptureError:
    """An error of torch.export as ours, with module path and user's line."""
    where = user_place(model, error.__traceback__)
    if is_data_dependent(error):
        return CaptureError(
            "the model's Python control flow depends on the data of a tensor",
            where=where,
            why="which way it goes depends on sizes that the data decides, as those of x[mask] or nonzero()",
            fix=size_fix(model),
        )
    return untraceable(error, where)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """torch.export's own warnings concern its internals, not the user; its errors are told once, as ours."""
    logger = logging.getLogger("torch")
    level = logger.level
    with warnings.catch_warnings():
        for module in ("torch", "copyreg"):
            warnings.filterwarnings("ignore", module=rf"{module}(\.|$)")
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", message="The tensor attribute")  # `state` says it, or refuses
        logger.setLevel(logging.CRITICAL)
        try:
            with replaced({"export.print": lambda *_, **__: None}):
                yield
        finally:
            logger.setLevel(level)


def uncompiled() -> contextlib.AbstractContextManager[None]:
    """Inside, graph modules are not compiled before they are called."""
    return replaced({"GraphModule.recompile": _recompiled_later})


_recompile = fx.GraphModule.recompile


def _recompiled_later(module: fx.GraphModule) -> None:
    """A graph module becomes Python code only if it is called; export makes dozens that never are."""

    def first_call(self: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        _recompile(self)
        return self(*args, **kwargs)

    if isinstance(codegen := module._graph._codegen, _PyTreeCodeGen):
        module._in_spec, module._out_spec = codegen.pytree_info.in_spec, codegen.pytree_info.out_spec
    type(module).forward = first_call

"""An unmodified model and one batch become a torch.fx program, by torch.export.

The model is traced inside a thin wrapper that takes the batch's tensors and returns only what is wanted (the loss,
or for `predict` the outputs): caches and large unused outputs are then never part of the program.
"""

from __future__ import annotations

import contextlib
import logging
import re
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from autopart.batch.batch import Batch
from autopart.capture.python.habits.habits import HABITS
from autopart.capture.python.reads.host_reads import Asker
from autopart.capture.python.reads.sizes import is_data_dependent, size_fix
from autopart.capture.python.watch.observed import Observed, Observer, check_kept
from autopart.capture.python.watch.values import ValueUsed, standing
from autopart.capture.source_location import user_place
from autopart.capture.trace.autocast import Autocast
from autopart.ir.errors import AutopartError, CaptureError

LossFn = Callable[[Any, Any], torch.Tensor]


_TENSOR = object()


class Wrapper(nn.Module):
    """Takes the tensor leaves of a batch; returns the loss, or the outputs if `wants_outputs`.

    seen.outputs: makes of the results of the program what the model returns; None for a loss.  observed: what forward()
    and the loss function read of Python.  asker: answers what they ask about the numbers of the batch.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        whole: Batch,
        loss_fn: LossFn | None,
        wants_outputs: bool,
        autocast: Autocast | None,
    ) -> None:
        """batch: what is traced, a part of `whole`; autocast: the region that model and loss function run in."""
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.observed = Observed()
        self._batch = batch
        self._wants_outputs = wants_outputs
        self._autocast = autocast
        self.seen = types.SimpleNamespace(outputs=None)  # torch.export puts back the attributes of a module
        self._watched = [model, *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.asker = Asker(self, model, whole, batch.rows, torch.device("cpu") if device.type == "meta" else device)

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Run the model, and the loss function if there is one, in everything that sees what they do."""
        queue = iter(tensors)
        leaves = tuple(next(queue) if isinstance(x, torch.Tensor) else x for x in self._batch.leaves)
        used: list[int] = []
        args, kwargs, target = self._batch.arguments(standing(self._batch, leaves, used))
        self.asker.begin()
        with contextlib.ExitStack() as around:
            for habit in HABITS:
                if habit.around is not None:
                    around.enter_context(habit.around(self._watched))
            observer = Observer(self._watched, self.loss_fn, self.observed)
            if self._autocast is not None:
                around.enter_context(self._autocast.region())
            with observer.noting():
                result = self.model(*args, **kwargs)
            if self._wants_outputs:
                found: Any = self._outputs_of(result)
            else:
                with observer.noting():
                    found = loss_of(result) if self.loss_fn is None else scalar(self.loss_fn(result, target), "loss_fn")
                if self._autocast is not None and found.dtype is self._autocast.dtype is torch.float16:
                    found = found.float()  # the scaled gradient of an fp16 loss would be infinite
            observer.end(constants_asked=self.asker.constants_asked)
            if used:
                raise ValueUsed(used[0])
            return found

    def _outputs_of(self, result: Any) -> tuple[torch.Tensor, ...]:
        kind: type | None = None  # a mapping class such as transformers' ModelOutput
        if isinstance(result, Mapping):
            kind = type(result)
            # only tensors, numbers and texts can be sent: a cache object cannot
            sent = (torch.Tensor, bool, int, float, str, type(None))
            result = {k: v for k, v in result.items() if all(isinstance(x, sent) for x in pytree.tree_leaves(v))}
        leaves, spec = pytree.tree_flatten(result)
        constants = [_TENSOR if isinstance(x, torch.Tensor) else x for x in leaves]

        def rebuilt(tensors: Sequence[torch.Tensor]) -> Any:
            queue = iter(tensors)
            tree = pytree.tree_unflatten([next(queue) if x is _TENSOR else x for x in constants], spec)
            return tree if kind is None else kind(**tree)

        self.seen.outputs = rebuilt
        return tuple(x for x in leaves if isinstance(x, torch.Tensor))


def loss_of(result: Any) -> torch.Tensor:
    """Return the scalar loss in what a model returned.

    That is the tensor itself, `.loss`, ["loss"], the first of a tuple if that is one number, else the only entry that
    is one floating point number.  Raises CaptureError.
    """
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
    """Return a loss as a 0-dim floating point tensor.  Raises CaptureError if it is not one number."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss.reshape(())
    what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise CaptureError(
        f"{source} returned {what} where a scalar loss is needed",
        fix="return one number (a mean or a sum), or pass loss_fn=... to compile",
    )


def export(wrapper: Wrapper, batch: Batch) -> ExportedProgram:
    """Trace the wrapper with the tensors of `batch`.

    Raises CaptureError for control flow on tensor data, CaptureError for whatever else torch.export cannot trace;
    both name the module path and the user's line.  Raises what `Asker.answering` raises.
    """
    if not batch.tensors:
        raise CaptureError("the batch holds no tensor", fix="pass the model's inputs as tensors")
    try:
        with wrapper.asker.answering():
            program = torch.export.export(wrapper, batch.tensors, strict=False)
        check_kept(wrapper.observed, program.constants)
        return program
    except AutopartError as error:
        raise error.with_traceback(None) from None  # a stack through torch.export helps nobody
    except Exception as error:
        raise wrapper.asker.explained(error) or explained(error, wrapper.model) from error


def explained(error: Exception, model: nn.Module) -> CaptureError:
    """Return an error of torch.export as ours, with module path and the user's line."""
    where = user_place(model, error.__traceback__)
    text = str(error).strip() or type(error).__name__
    first = text.splitlines()[0]
    if is_data_dependent(error):
        return CaptureError(
            "the model's Python control flow depends on the data of a tensor",
            where=where,
            why="the branch depends on sizes that the data decides, such as those of x[mask] or nonzero()",
            fix=size_fix(model),
        )
    if any(frame.f_code.co_name == "_jvp_with_argnums" for frame, _ in traceback.walk_tb(error.__traceback__)):
        return CaptureError(
            "torch.func.jvp cannot be captured through an op of this function",
            where=where,
            why=first,
            fix=JVP_FIX,
        )
    for says, what, why, fix in _KNOWN:
        if re.search(says, text):
            return CaptureError(what, where=where, why=why or first, fix=fix)
    return CaptureError(
        f"the model cannot be captured: {type(error).__name__}",
        where=where,
        why=first,
        fix="call the model once on one micro-batch without autopart; if that fails too, the model or the batch is the "
        "cause; if it works, rewrite the line named above with tensor operations (a model that asks "
        "torch.compiler.is_exporting() takes another branch here)",
    )


JVP_FIX = (
    "write the derivative out; or write the op by elementary ones, through which torch.func.jvp can be captured: x * x "
    "for square, x * x.sigmoid() for SiLU, softmax as e / e.sum(-1, keepdim=True) with e = x.exp(), norms by mean and "
    "rsqrt"
)
_KNOWN = (  # what torch's message says, as a regular expression; what, why, fix of ours
    (
        r"\.numpy\(\) is not supported|Unable to get .* numpy|numpy\.ndarray",
        "forward() leaves torch for numpy",
        "what numpy computes cannot be captured",
        "compute it with torch; or before the step, and pass it with the batch",
    ),
    (
        r"mutated in the forward method",
        "forward() changes in place a tensor that is neither a parameter nor a buffer",
        "",
        "make it a buffer: register_buffer(name, tensor)",
    ),
    (
        r"fake tensor in the exported program constant's list",
        "a tensor made while the model was traced is kept where tracing does not see it",
        "it stands in a container, a global or a closure, or is a gradient with regard to a parameter or an input",
        "pass it on as an argument or a result; a derivative write out, or take it forwards "
        "(torch.func.jvp, through elementary ops such as tanh and linear)",
    ),
)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence torch.export inside: its warnings concern its internals, and its errors are reported once, as ours."""
    logger = logging.getLogger("torch")
    level = logger.level
    with warnings.catch_warnings():
        for module in ("torch", "copyreg"):
            warnings.filterwarnings("ignore", module=rf"{module}(\.|$)")
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", message="The tensor attribute")  # `observed` tells it, or refuses
        logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            logger.setLevel(level)

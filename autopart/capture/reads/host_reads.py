"""Questions about the numbers of a batch, answered while torch.export traces.

Tracing knows shapes and no numbers, so it stops at `if mask.all():`.  Where the answer depends on the inputs alone, it
is computed from the real batch, and noted (`questions`); where it depends on parameters or activations, tracing stops.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from autopart.capture.batch.batch import Batch
from autopart.capture.batch.questions import Operand, Question, Questions, Reader, Step, WholeBatchAsked
from autopart.capture.habits.by_rows import mark_by_rows, scatters_by_rows
from autopart.capture.habits.ctc import Selections
from autopart.capture.reads.data_dependent_errors import Unanswered, is_data_dependent
from autopart.capture.reads.provenance import Elsewhere, Provenance
from autopart.capture.reads.sizes import MADE_OF_SIZED, Sizes
from autopart.capture.source_location import place_of_caller
from autopart.ir.errors import BatchError, CaptureError, RefusedError

_aten = torch.ops.aten
_MOST = 512
"""Numbers that a model may read from one batch: each is kept, and read again from every batch."""


class Asker:
    """Answers what one forward() asks, from the whole batch or as the whole batch answered."""

    def __init__(
        self, wrapper: nn.Module, model: nn.Module, batch: Batch, rows: int | None, device: torch.device
    ) -> None:
        """batch: of real numbers; rows: how many of it are traced; device: where its numbers are asked for."""
        named = (wrapper.named_parameters(remove_duplicate=False), wrapper.named_buffers(remove_duplicate=False))
        self._names = [name.removeprefix("model.") for pairs in named for name, _ in pairs]
        self._model, self._batch, self._rows, self._device = model, batch, rows, device
        self._whole = rows == batch.rows
        self._asked: list[Question] = []
        self._values: list[Any] = []
        self._reader = Reader(batch.tensors, device)
        self._provenance: Provenance | None = None
        self._unanswered: Unanswered | None = None
        self.wants_whole = False
        self.constants_asked = False
        self._selections = Selections()
        self.sizes = Sizes(self._ask_tensor, rows, lambda: place_of_caller(model), whole=self._whole)

    def begin(self) -> None:
        """forward() begins."""
        self._asked, self._values, self._provenance = [], [], None
        self._selections = Selections()

    def end(self) -> None:
        """forward() is over.  Raises WholeBatchAsked, and RefusedError when it asked less than of the whole batch."""
        if self.wants_whole:
            raise WholeBatchAsked
        expected = self._batch.answers or ()
        if not self._whole and len(self._values) < len(expected):
            raise self._other_questions(expected[len(self._values)][1])

    def explained(self, error: Exception) -> CaptureError | RefusedError | None:
        """An error of torch.export that comes from what was asked and not answered, or answered for another size."""
        if is_data_dependent(error):
            return self.refusal
        if self._whole or not self.numbers:
            return None
        return RefusedError(
            "a number that forward() reads from the whole batch does not fit a micro-batch",
            where=self.numbers[-1],
            why=(str(error).strip() or type(error).__name__).splitlines()[0],
            fix="use micro_batches=1, or compute with the tensor instead of .item() or .tolist()",
        )

    @property
    def refusal(self) -> CaptureError | None:
        """For the question that could not be answered, None where there was none."""
        return self._unanswered.refusal(self._model) if self._unanswered is not None else None

    @property
    def questions(self) -> Questions | None:
        """All that was asked, None when nothing was."""
        return Questions(tuple(self._asked), tuple(self._values), self._device) if self._asked else None

    @property
    def numbers(self) -> list[str]:
        """Places that read numbers, rather than yes or no."""
        pairs = zip(self._asked, self._values, strict=True)
        return [question.where for question, value in pairs if not isinstance(value, bool)]

    # -- what tracing tells ----------------------------------------------------------------------------------------

    def traced(self, mode: Any, func: Any, args: Any, kwargs: Any, trace: Callable[[Any, Any], Any]) -> Any:
        """The result of an op: an answer, what stands for the op, or what `trace` makes of its arguments."""
        if _asks(func):
            answer = self._asked_for(mode.tracer, func, args, kwargs)
            if answer is not None:
                return answer[0]
        if torch.Tag.dynamic_output_shape in func.tags or func in MADE_OF_SIZED:
            sized = self.sizes.traced(mode, func, args, kwargs)
            if sized is not None:
                return sized
        if func is _aten.ctc_loss.Tensor:
            losses = self._selections.ctc_loss(mode, args, kwargs)
            if losses is not None:
                return losses
        by_rows = func is _aten.masked_scatter.default and self._scatters_by_rows(mode.tracer, args)
        result = trace(args, kwargs)
        if by_rows:
            mark_by_rows(mode.tracer)
        elif func is _aten.masked_select.default:
            self._selections.note(result, args)
        elif func._schema.is_mutable:
            self._wrote(mode.tracer)
        return result

    def _wrote(self, tracer: Any) -> None:
        node = next(iter(reversed(tracer.graph.nodes)))
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            self._of(tracer).wrote(node)

    def _asked_for(self, tracer: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any] | None:
        """The answer to an op that makes a Python value of tensors, None where it is not for us to answer."""
        nodes = _nodes(tracer, (args, kwargs))
        if nodes is None or all(proxy.constant is not None for proxy in nodes.values()):
            return None  # torch knows
        where = place_of_caller(self._model)
        try:
            steps = self._of(tracer).steps([proxy.proxy.node for proxy in nodes.values()])
        except Elsewhere as source:
            self._unanswered = Unanswered(str(func), where, str(source), _is_flag(func, args))
            return None
        number = self._of(tracer).number
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda t: Operand(number(nodes[id(t)].proxy.node)), (args, kwargs)
        )
        return (self._ask(steps, partial(func, **kwargs) if kwargs else func, args, str(func), where),)

    def _scatters_by_rows(self, tracer: Any, args: Any) -> bool:
        """Whether a masked_scatter fills each row with the elements of that row, in this batch."""
        where = place_of_caller(self._model)
        ask = partial(self._ask, where=where)
        return scatters_by_rows(tracer, self._of(tracer), self._rows, args, ask)

    def _ask_tensor(self, mode: Any, tensor: torch.Tensor, read: Callable[[torch.Tensor], Any], op: str) -> Any:
        """What is read of a tensor, None where it depends on more than the inputs."""
        proxy = proxy_tensor.get_proxy_slot(tensor, mode.tracer, None)
        if proxy is None:
            return None
        provenance = self._of(mode.tracer)
        try:
            steps = provenance.steps([proxy.proxy.node])
        except Elsewhere:
            return None
        where = place_of_caller(self._model)
        return self._ask(steps, read, (Operand(provenance.number(proxy.proxy.node)),), op, where)

    def _ask(self, steps: tuple[Step, ...], read: Callable[..., Any], args: Any, op: str, where: str) -> Any:
        """The answer to a question.  Raises WholeBatchAsked, RefusedError, BatchError."""
        question = Question(steps, read, tuple(args), op, where)
        if not question.inputs:
            self.constants_asked = True
            with _really():
                return self._reader.answer(question)  # constants: no batch changes them
        place = len(self._asked)
        if place >= _MOST:
            raise RefusedError(
                f"forward() reads more than {_MOST} numbers from the batch",
                where=where,
                why="the captured program would hold for batches with the same numbers alone",
                fix="compute with the tensor: no .tolist(), .item() or int() on large inputs",
            )
        value = self._answer(question, place)
        self._asked.append(question)
        self._values.append(value)
        return value

    def _answer(self, question: Question, place: int) -> Any:
        if not self._whole or self._batch.stands_in:
            if self._batch.answers is None:
                self.wants_whole = True
                raise WholeBatchAsked
            known = self._batch.answers
            if place >= len(known) or known[place][:2] != (question.op, question.where):
                raise self._other_questions(question.where)
            return known[place][2]
        if any(self._batch.tensors[i].is_meta for i in question.inputs):
            raise BatchError(
                "the model's Python asks for numbers of the batch, and the batch is on the meta device",
                where=question.where,
                fix="pass a batch with values",
            )
        with _really():
            return self._reader.answer(question)

    def _other_questions(self, where: str) -> RefusedError:
        return RefusedError(
            "what forward() asks about the numbers of its batch depends on how many rows there are",
            where=where,
            why="the whole batch and its micro-batches would take different ways through the model's Python",
            fix="use micro_batches=1, or write that loop over rows with tensor operations",
        )

    def _of(self, tracer: Any) -> Provenance:
        if self._provenance is None:
            self._provenance = Provenance(tracer, self._names, len(self._batch.tensors))
        return self._provenance


def _nodes(tracer: Any, given: Any) -> dict[int, Any] | None:
    """What stands for each tensor, by identity, in the graph that is traced; None where one is not of it."""
    tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    found = {id(tensor): proxy_tensor.get_proxy_slot(tensor, tracer, None) for tensor in tensors}
    return found if found and None not in found.values() else None


@contextlib.contextmanager
def _really() -> Iterator[None]:
    """Inside, ops compute: no mode of tracing sees them."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), no_python_dispatcher():
        yield


def _asks(func: Any) -> bool:
    """Whether an op makes a Python value of tensors."""
    return torch.Tag.data_dependent_output in func.tags or func is _aten.is_nonzero.default


def _is_flag(func: Any, args: Any) -> bool:
    """Whether its answer is yes or no."""
    asked = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    return func not in (_aten.item.default, _aten._local_scalar_dense.default) or asked[0].dtype is torch.bool


def replacements(asker: Asker) -> dict[str, Any]:
    """Patches for a trace: what the model asks is answered."""
    plain_call, plain_list, plain_tensor = proxy_tensor.proxy_call, FakeTensor.tolist, torch.tensor

    def call(mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        return asker.traced(mode, func, args, kwargs, partial(plain_call, mode, func, pre_dispatch))

    def tolist(self: FakeTensor) -> Any:
        mode = proxy_tensor.get_proxy_mode()
        numbers = asker.sizes.numbers(mode, self) if mode is not None else None
        return plain_list(self) if numbers is None else numbers

    def tensor(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(data, (list, tuple)):
            data = pytree.tree_map_only(FakeTensor, tolist, data)  # what torch does with real ones
        return plain_tensor(data, *args, **kwargs)

    return {"proxy_call": call, "FakeTensor.tolist": tolist, "torch.tensor": tensor}

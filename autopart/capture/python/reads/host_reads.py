"""Questions about the numbers of a batch, answered while torch.export traces.

Tracing knows shapes and no numbers, so it stops at `if mask.all():`.  Where the answer depends on the inputs alone, it
is computed from the real batch and noted (`questions`); where it depends on parameters or activations, tracing stops.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from autopart.batch.batch import Batch
from autopart.capture.python.reads.ctc import Selections
from autopart.capture.python.reads.masks import ASKED, Masks
from autopart.capture.python.reads.questions import Origins, Question, Reader
from autopart.capture.python.reads.sizes import BY_ROWS, MADE_OF_SIZED, Sizes, experts_fix, is_data_dependent
from autopart.capture.source_location import user_place
from autopart.ir.errors import BatchError, CaptureError, RefusedError

_aten = torch.ops.aten
_MOST = 512
"""Numbers that a model may read from one batch: each is kept, and read again from every batch."""


class WholeBatchAsked(Exception):
    """Raised while a part of a batch is traced whose answers have to come from a capture of the whole batch."""


@dataclass(frozen=True)
class Questions:
    """What was asked while a whole batch was traced, in order, and its answers.  device: where they are computed."""

    asked: tuple[Question, ...]
    values: tuple[Any, ...]
    device: torch.device

    @property
    def answers(self) -> tuple[tuple[str, str, Any], ...]:
        """The op, the user's line and the answer of each question."""
        return tuple((q.op, q.where, value) for q, value in zip(self.asked, self.values, strict=True))

    @property
    def asked_by_python(self) -> tuple[Question, ...]:
        """The questions of the model's Python, without those about attention masks."""
        return tuple(question for question in self.asked if question.op != ASKED)

    @property
    def inputs(self) -> frozenset[int]:
        """The indices, among the tensors of a batch, of those that are asked about."""
        return frozenset().union(*(question.inputs for question in self.asked))

    def hold(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether a batch of as many rows gives the same answers.  Stops at the first one that differs."""
        reader = Reader(tensors, self.device)
        pairs = ((value, reader.answer(q)) for q, value in zip(self.asked, self.values, strict=True))
        # NaN equals NaN, 1 differs from True, and -0.0 from 0.0
        return all(type(known) is type(now) and repr(known) == repr(now) for known, now in pairs)


class Asker:
    """Answers what one forward() asks, from the whole batch or as the whole batch answered."""

    def __init__(
        self, wrapper: nn.Module, model: nn.Module, batch: Batch, rows: int | None, device: torch.device
    ) -> None:
        """batch: the whole batch, with numbers; rows: how many of its rows are traced; device: where its numbers are
        computed."""
        named = (wrapper.named_parameters(remove_duplicate=False), wrapper.named_buffers(remove_duplicate=False))
        self._names = [name.removeprefix("model.") for pairs in named for name, _ in pairs]
        self._model, self._batch, self._rows, self._device = model, batch, rows, device
        self._whole = rows == batch.rows
        self._reader = Reader(batch.tensors, device)
        self._wants_whole = False
        self.refusal: CaptureError | None = None
        """The error for a question that could not be answered, None if there was none."""
        self.constants_asked = False
        self.sizes = Sizes(self._ask_tensor, rows, lambda: user_place(model), whole=self._whole)
        self.begin()

    def begin(self) -> None:
        """Start to trace forward()."""
        self._asked: list[Question] = []
        self._values: list[Any] = []
        self._origins: Origins | None = None
        self._selections = Selections()
        self.masks = Masks(self._batch.masks)
        self._about_masks: dict[str, bool] = {}

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Answer questions inside.

        Raises WholeBatchAsked where the whole batch has to be traced first, RefusedError when a micro-batch asked
        fewer questions than the whole batch did.
        """
        token = _answering.set(self)
        try:
            yield
        finally:
            _answering.reset(token)
        if self._wants_whole:
            raise WholeBatchAsked
        expected = self._batch.answers or ()
        if not self._whole and len(self._values) < len(expected):
            raise self._other_questions(expected[len(self._values)][1])

    def explained(self, error: Exception) -> Exception | None:
        """Return what to raise for an error of torch.export that comes from a question; None for any other error."""
        if self._wants_whole:
            return WholeBatchAsked()
        if is_data_dependent(error):
            return self.refusal
        pairs = zip(self._asked, self._values, strict=True)
        numbers = [question.where for question, value in pairs if not isinstance(value, bool)]
        if self._whole or not numbers:
            return None
        return RefusedError(
            "a number that forward() reads from the whole batch does not fit a micro-batch",
            where=numbers[-1],
            why=(str(error).strip() or type(error).__name__).splitlines()[0],
            fix="use micro_batches=1, or compute with the tensor instead of .item() or .tolist()",
        )

    @property
    def questions(self) -> Questions | None:
        """All questions and answers, None when there were none."""
        return Questions(tuple(self._asked), tuple(self._values), self._device) if self._asked else None

    def traced(self, mode: Any, func: Any, args: Any, kwargs: Any, trace: Callable[[Any, Any], Any]) -> Any:
        """Return the result of an op: an answer, what stands for the op, or what `trace` makes of its arguments."""
        if torch.Tag.data_dependent_output in func.tags or func is _aten.is_nonzero.default:
            answer = self._asked_for(mode.tracer, func, args, kwargs)
            if answer is not None:
                return answer[0]
        if func is _aten.scaled_dot_product_attention.default:
            args, kwargs = self._without_mask(mode.tracer, args, kwargs)
        if torch.Tag.dynamic_output_shape in func.tags or func in MADE_OF_SIZED:
            sized = self.sizes.traced(mode, func, args, kwargs)
            if sized is not None:
                return sized
        if func is _aten.ctc_loss.Tensor:
            losses = self._selections.ctc_loss(mode, args, kwargs)
            if losses is not None:
                return losses
        by_rows = func is _aten.masked_scatter.default and self.sizes.scatters_by_rows(mode, args)
        result = trace(args, kwargs)
        node = next(iter(reversed(mode.tracer.graph.nodes)))
        if by_rows:
            node.meta["custom"] = {**node.meta.get("custom", {}), BY_ROWS: True}
        elif func is _aten.masked_select.default:
            self._selections.note(result, args)
        elif func is _aten.where.ScalarOther and node.target is func:
            self.masks.note(node, args)
        elif func._schema.is_mutable and node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            self._of(mode.tracer).wrote(node)
        return result

    def _asked_for(self, tracer: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any] | None:
        """Return the answer to an op that makes a Python value of tensors, None where torch has to answer."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        nodes: dict[int, Any] = {id(tensor): proxy_tensor.get_proxy_slot(tensor, tracer, None) for tensor in tensors}
        if None in nodes.values() or all(proxy.constant is not None for proxy in nodes.values()):
            return None
        where = user_place(self._model)
        given = pytree.tree_map_only(torch.Tensor, lambda tensor: nodes[id(tensor)].proxy.node, args)
        read = partial(func, **kwargs) if kwargs else func
        question = self._of(tracer).question(read, given, str(func), where)
        if isinstance(question, str):
            number = func in (_aten.item.default, _aten._local_scalar_dense.default)
            flag = not number or tensors[0].dtype is torch.bool
            self.refusal = self._unanswered(str(func), where, question, flag=flag)
            return None
        return (self._answer(question),)

    def _unanswered(self, op: str, where: str, source: str, *, flag: bool) -> CaptureError:
        """Return the error for a question whose answer does not depend on the inputs alone.

        op: what asked; where: the user's line; source: what else it depends on; flag: whether it is a yes or no
        question.
        """
        if flag:
            random = source.startswith("random numbers")
            also = "; for layer drop set its probability to 0" if random else experts_fix(self._model)
            return CaptureError(
                "the model's Python control flow depends on the data of a tensor",
                where=where,
                why=f"the branch depends on {source}, which every step changes",
                fix="use torch.where instead of `if`" + also,
            )
        return CaptureError(
            f"forward() reads a number out of a tensor ({op.removeprefix('aten.').split('.')[0]})",
            where=where,
            why=f"it depends on {source}; the captured program would keep the value that it had during the capture",
            fix="keep it a tensor: no .item(), .tolist(), int() or float(); what is only logged can be returned as an "
            "output, or taken from the result of step()",
        )

    def _ask_tensor(self, mode: Any, tensor: torch.Tensor, read: Callable[[torch.Tensor], Any], op: str) -> Any:
        """Return what `read` makes of a tensor, None where that depends on more than the inputs."""
        proxy = proxy_tensor.get_proxy_slot(tensor, mode.tracer, None)
        if proxy is None:
            return None
        where = user_place(self._model)
        question = self._of(mode.tracer).question(read, (proxy.proxy.node,), op, where)
        return None if isinstance(question, str) else self._answer(question)

    def _without_mask(self, tracer: Any, args: Any, kwargs: Any) -> Any:
        """Return the arguments of attention, without a mask that inputs and constants show to be unnecessary."""
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        proxy = proxy_tensor.get_proxy_slot(mask, tracer, None) if isinstance(mask, torch.Tensor) else None
        if proxy is None:
            return args, kwargs
        origins = self._of(tracer)

        def ask(read: Callable[..., bool], nodes: Sequence[torch.fx.Node]) -> bool | None:
            question = origins.question(read, tuple(nodes), ASKED, user_place(self._model))
            if isinstance(question, str) or (self._batch.masks is not None and question.inputs):
                return None  # it depends on parameters, or another capture has asked the whole batch
            if any(t.is_meta for t in (*question.constants, *(self._batch.tensors[i] for i in question.inputs))):
                return None
            form = question.form
            if form not in self._about_masks:
                self._about_masks[form] = bool(self._answer(question))
            return self._about_masks[form]

        return self.masks.without(proxy.proxy.node, args, kwargs, ask, origins.is_written)

    def _answer(self, question: Question) -> Any:
        """Return the answer to a question.  Raises WholeBatchAsked, RefusedError, BatchError."""
        if not question.inputs:  # of constants, which no batch changes
            self.constants_asked |= bool(question.constants)
            return self._read(question)
        place, known = len(self._asked), self._batch.answers
        if place >= _MOST:
            raise RefusedError(
                f"forward() reads more than {_MOST} numbers from the batch",
                where=question.where,
                why="the captured program would only fit batches with the same numbers",
                fix="compute with tensors: no .tolist(), .item() or int() on large inputs",
            )
        if self._whole and not self._batch.stands_in:
            if any(self._batch.tensors[i].is_meta for i in question.inputs):
                raise BatchError(
                    "forward() reads values of the batch, and the batch is on the meta device",
                    where=question.where,
                    fix="pass a batch with values",
                )
            value = self._read(question)
        elif known is None:
            self._wants_whole = True
            raise WholeBatchAsked
        elif place >= len(known) or known[place][:2] != (question.op, question.where):
            raise self._other_questions(question.where)
        else:
            value = known[place][2]
        self._asked.append(question)
        self._values.append(value)
        return value

    def _read(self, question: Question) -> Any:
        """Compute an answer.  No mode of tracing sees the ops."""
        with torch._C.DisableTorchFunction(), _disable_current_modes(), no_python_dispatcher():
            return self._reader.answer(question)

    def _other_questions(self, where: str) -> RefusedError:
        return RefusedError(
            "what forward() reads from the values of its batch depends on the number of rows",
            where=where,
            why="the whole batch and its micro-batches would take different branches in forward()",
            fix="use micro_batches=1, or write that loop over rows with tensor operations",
        )

    def _of(self, tracer: Any) -> Origins:
        if self._origins is None:
            self._origins = Origins(tracer, self._names, len(self._batch.tensors))
        return self._origins


# -- what replaces parts of torch while a model is traced (`habits.habits`) --------------------------------------------

_answering: ContextVar[Asker | None] = ContextVar("autopart_answering", default=None)


def proxy_call(original: Any, mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
    """Trace an op; answer it if it asks about the batch."""
    asker = _answering.get()
    trace = partial(original, mode, func, pre_dispatch)
    return asker.traced(mode, func, args, kwargs, trace) if asker is not None else trace(args, kwargs)


def tolist(original: Any, tensor: FakeTensor) -> Any:
    """Return the numbers of a traced tensor, if the batch determines them."""
    mode, asker = proxy_tensor.get_proxy_mode(), _answering.get()
    numbers = asker.sizes.numbers(mode, tensor) if mode is not None and asker is not None else None
    return original(tensor) if numbers is None else numbers


def tensor(original: Any, data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Make a tensor of a list that may hold traced tensors, as torch does with real ones."""
    if isinstance(data, (list, tuple)):
        data = pytree.tree_map_only(FakeTensor, FakeTensor.tolist, data)
    found: torch.Tensor = original(data, *args, **kwargs)
    return found

"""What a model's Python asks about the numbers in its batch, and the answers of one batch.

`if labels.max() >= self.vocab_size: raise` asks for one bit of the batch.  A capture follows the answer of the batch
that it is made with, so it holds for batches that answer alike, and for no others.  A question is kept as the few ops
that lead to it from the inputs; before a step it is asked again.  The plain model asks the whole batch, so that is what
is asked here; a micro-batch goes the way of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

Answer = tuple[str, str, Any]
"""The op that asked, the user's place (module path and line) and the value."""


class WholeBatchAsked(Exception):
    """Raised while a part of a batch is traced: the model asks about numbers of the batch, whose answers have to come
    from a capture of the whole batch."""


@dataclass(frozen=True)
class Operand:
    """Stands for the result of an op, by the op's number."""

    number: int


@dataclass(frozen=True)
class Step:
    """An op on the way to a question.  call: None for an input of the batch, whose place is the only argument."""

    number: int
    call: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class Question:
    """steps: all ops that lead to it, in order; read: what makes a Python value of their results; op, where: what
    asked."""

    steps: tuple[Step, ...]
    read: Callable[..., Any]
    args: tuple[Any, ...]
    op: str
    where: str

    @property
    def inputs(self) -> frozenset[int]:
        """The places, among the tensors of a batch, of those that it reads."""
        return frozenset(step.args[0] for step in self.steps if step.call is None)


class Reader:
    """Answers questions about one batch, each op run once."""

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        self._tensors, self._device = tensors, device
        self._results: dict[int, Any] = {}

    def answer(self, question: Question) -> Any:
        """The Python value that was asked for.  Holds before: earlier questions were answered first."""
        with torch.no_grad():
            for step in question.steps:
                if step.number not in self._results:
                    self._results[step.number] = self._run(step)
            return question.read(*self._filled(question.args))

    def _run(self, step: Step) -> Any:
        if step.call is None:  # a copy, for an op may write to it
            return self._tensors[step.args[0]].detach().to(self._device, copy=True)
        return step.call(*self._filled(step.args), **self._filled(dict(step.kwargs)))

    def _filled(self, value: Any) -> Any:
        def fill(leaf: Any) -> Any:
            if isinstance(leaf, Operand):
                return self._results[leaf.number]
            return self._device if isinstance(leaf, torch.device) else leaf

        return pytree.tree_map(fill, value, is_leaf=lambda leaf: isinstance(leaf, Operand))


@dataclass(frozen=True)
class Questions:
    """What was asked while a whole batch was traced, in order, and its answers.  device: where they are computed."""

    asked: tuple[Question, ...]
    values: tuple[Any, ...]
    device: torch.device

    @property
    def answers(self) -> tuple[Answer, ...]:
        """Each question with its answer."""
        return tuple((q.op, q.where, value) for q, value in zip(self.asked, self.values, strict=True))

    @property
    def inputs(self) -> frozenset[int]:
        """The places, among the tensors of a batch, of those that are asked about."""
        return frozenset().union(*(question.inputs for question in self.asked))

    def hold(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether a batch with as many rows, whose tensors these are, answers alike.  Costs the ops asked for."""
        reader = Reader(tensors, self.device)
        return all(same_answer(value, found) for value, found in zip(self.values, self._found(reader), strict=True))

    def _found(self, reader: Reader) -> Iterator[Any]:
        return (reader.answer(question) for question in self.asked)  # one by one: the first other answer ends it


def same_answer(a: Any, b: Any) -> bool:
    """Whether two answers are one: NaN is NaN, 1 is not True, and -0.0 is not 0.0."""
    return type(a) is type(b) and repr(a) == repr(b)

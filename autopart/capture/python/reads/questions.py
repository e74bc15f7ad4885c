"""What a model's Python asks about the numbers in its batch, traced back to the inputs, and the answers of one batch.

`if labels.max() >= self.vocab_size: raise` asks for one bit of the batch.  A capture follows the answer of the batch
that it is made with, so it holds only for batches with the same answers.  A question is kept as the few ops that
compute it from the inputs, and every step asks it again of the whole batch, as the unpartitioned model would; the
micro-batches follow those answers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopart.capture.python.reads.late import late, whole

_HOST = torch.device("cpu")
_EXACT = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
"""Types whose arithmetic is the same on every device."""
_Results = dict[tuple[torch.device, int], Any]
"""Results of ops, by device and number of the op."""


@dataclass(frozen=True)
class Operand:
    """Stands for the result of an op, by the op's number."""

    number: int


@dataclass(frozen=True)
class _Step:
    """An op on the way to a question.  call: None for an input of the batch, whose place is the only argument."""

    number: int
    call: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class Question:
    """A Python value that forward() reads.

    steps: all ops that lead to it, in order; read: computes the value from `args`; op, where: what asked; exact:
    whether every device computes the same value, since no number on the way is a fraction.
    """

    steps: tuple[_Step, ...]
    read: Callable[..., Any]
    args: tuple[Any, ...]
    op: str
    where: str
    exact: bool = False

    @property
    def inputs(self) -> frozenset[int]:
        """The indices, among the tensors of a batch, of those that it reads."""
        return frozenset(step.args[0] for step in self.steps if step.call is None)

    @property
    def constants(self) -> tuple[torch.Tensor, ...]:
        """The tensors that it reads and that are neither inputs nor results."""
        return tuple(step.args[0] for step in self.steps if step.call is torch.clone and torch.is_tensor(step.args[0]))

    @property
    def form(self) -> str:
        """A text that is equal for questions with the same answer, such as those of layers that build equal masks."""
        numbers = {step.number: place for place, step in enumerate(self.steps)}

        def renumbered(value: Any) -> Any:
            return pytree.tree_map_only(Operand, lambda operand: Operand(numbers[operand.number]), value)

        constants = {id(arg): arg for step in self.steps for arg in step.args if isinstance(arg, torch.Tensor)}
        steps = [(step.call, renumbered((step.args, dict(step.kwargs)))) for step in self.steps]
        return repr((steps, renumbered(self.args), self.read, list(constants)))

    @property
    def writes(self) -> bool:
        """Whether an op on the way to it writes to memory in place."""
        calls = (step.call for step in self.steps)
        return any(isinstance(call, torch._ops.OpOverload) and call._schema.is_mutable for call in calls)


class Reader:
    """Answers questions about one batch and runs each op once.

    A question is answered on the device of the model, as the model would.  One that is exact, about inputs that lie in
    the host's memory, is answered there: then nothing waits for the device.  Where an op on the way writes in place,
    the question has results of its own, since another one may be about what was there before.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        self._tensors, self._device = tensors, device
        self._shared: _Results = {}

    def place(self, question: Question) -> torch.device:
        """Return the device on which a question is answered."""
        at_hand = question.exact and all(self._tensors[i].device.type == _HOST.type for i in question.inputs)
        return _HOST if at_hand else self._device

    def answer(self, question: Question) -> Any:
        """Return the Python value that was asked for."""
        place = self.place(question)
        found: _Results = {} if question.writes else self._shared
        with torch.no_grad():
            for step in question.steps:
                if (place, step.number) not in found:
                    found[place, step.number] = self._run(step, place, question, found)
            args = _filled(question.args, place, found)
            if not getattr(question.read, "takes_late", False):
                args = pytree.tree_map(whole, args)
            return question.read(*args)

    def _run(self, step: _Step, place: torch.device, question: Question, found: _Results) -> Any:
        if step.call is None:
            return self._tensors[step.args[0]].detach().to(place, copy=question.writes)
        if step.call is torch.clone:
            return step.args[0].to(place, copy=True)
        args, kwargs = _filled((step.args, dict(step.kwargs)), place, found)
        made = late(step.call, args, kwargs) if question.exact and not question.writes else None
        if made is not None:
            return made
        args, kwargs = pytree.tree_map(whole, (args, kwargs))
        return step.call(*args, **kwargs)


def _filled(value: Any, place: torch.device, found: _Results) -> Any:
    def fill(leaf: Any) -> Any:
        if isinstance(leaf, Operand):
            return found[place, leaf.number]
        return place if isinstance(leaf, torch.device) else leaf

    return pytree.tree_map(fill, value)


class Origins:
    """Finds, while a program is traced, which of its values depend on the inputs of the batch alone.

    names: names of the parameters and buffers, in the order of their placeholders; count: number of the inputs, whose
    placeholders come last.
    """

    def __init__(self, tracer: Any, names: Sequence[str], count: int) -> None:
        self._root = tracer.root
        places = [node for node in tracer.graph.nodes if node.op == "placeholder"]
        first = len(places) - count
        self._inputs = {node: place for place, node in enumerate(places[first:])}
        known = names if len(names) == first else ["a parameter or buffer"] * first
        self._held = dict(zip(places[:first], known, strict=True))
        self._writers: list[tuple[fx.Node, frozenset[int]]] = []
        self._numbers: dict[fx.Node, int] = {}

    def wrote(self, node: fx.Node) -> None:
        """Note an op that changes its arguments in place."""
        target: Any = node.target
        operands = zip(target._schema.arguments, node.args, strict=False)
        named = ((a, node.kwargs[a.name]) for a in target._schema.arguments if a.name in node.kwargs)
        written = [value for a, value in (*operands, *named) if a.alias_info is not None and a.alias_info.is_write]
        nodes = [value for value in pytree.tree_leaves(written) if isinstance(value, fx.Node)]
        self._writers.append((node, frozenset().union(*map(_memory, nodes))))

    def is_written(self, node: fx.Node, without: fx.Node | None = None, since: fx.Node | None = None) -> bool:
        """Return whether ops change the memory of a node's results in place: others than `without`, behind `since`."""
        own = _memory(node)
        writers = (pair for pair in self._writers if pair[0] is not without and (since is None or since < pair[0]))
        return any(written & own for _, written in writers)

    def question(self, read: Callable[..., Any], args: Any, op: str, where: str) -> Question | str:
        """Return the question that `read` asks of the values of nodes in `args`.

        Where it depends on more than the inputs, return a text that says on what.  O(ops on the way).
        """
        found: set[fx.Node] = set()
        memory: set[int] = set()
        queue = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, fx.Node)]
        while queue:
            node = queue.pop()
            if node in found:
                continue
            if source := self._other_source(node):
                return source
            found.add(node)
            queue.extend(node.all_input_nodes)
            fresh = _memory(node) - memory
            memory |= fresh
            queue.extend(writer for writer, written in self._writers if written & fresh)
        exact = all(map(self._is_exact, found))
        return Question(tuple(map(self._step, sorted(found))), read, tuple(self._operands(args)), op, where, exact)

    def _is_exact(self, node: fx.Node) -> bool:
        """Return whether the results of a node are tensors of whole numbers and bools."""
        held = getattr(self._root, str(node.target)) if node.op == "get_attr" else node.meta.get("val")
        leaves = pytree.tree_leaves(held)
        return bool(leaves) and all(isinstance(leaf, torch.Tensor) and leaf.dtype in _EXACT for leaf in leaves)

    def _other_source(self, node: fx.Node) -> str:
        """Return what a node takes from elsewhere than the inputs; "" if nothing."""
        if node in self._held:
            return str(self._held[node])
        if node.op == "get_attr":
            constant = getattr(self._root, str(node.target), None)
            if not isinstance(constant, torch.Tensor) or type(constant) is torch._subclasses.FakeTensor:
                return "a tensor of Python that has no values while the model is captured"
        elif node.op != "placeholder" and node.target is not operator.getitem:
            target = node.target
            if not isinstance(target, torch._ops.OpOverload):
                return f"the result of {getattr(target, '__name__', target)}"
            if torch.Tag.nondeterministic_seeded in target.tags:
                return f"random numbers ({target})"
        return ""

    def _step(self, node: fx.Node) -> _Step:
        number = self._operands(node).number
        if node.op == "placeholder":
            return _Step(number, None, (self._inputs[node],), {})
        if node.op == "get_attr":
            return _Step(number, torch.clone, (getattr(self._root, str(node.target)),), {})
        target: Any = node.target
        args, kwargs = self._operands((node.args, dict(node.kwargs)))
        return _Step(number, target, tuple(args), dict(kwargs))

    def _operands(self, value: Any) -> Any:
        operand: Any = lambda node: Operand(self._numbers.setdefault(node, len(self._numbers)))  # noqa: E731
        return fx.map_arg(value, operand)


def made_of(nodes: Iterable[fx.Node], given: Container[fx.Node] = ()) -> set[fx.Node]:
    """Return these nodes and all that they are made of, but for what is given and what only that is made of."""
    found, todo = set[fx.Node](), list(nodes)
    while todo:
        node = todo.pop()
        if node not in found and node not in given:
            found.add(node)
            todo.extend(node.all_input_nodes)
    return found


def _memory(node: fx.Node) -> set[int]:
    """Return the identities of the memory that the results of an op lie in."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided)
    return {tensor.untyped_storage()._cdata for tensor in tensors}

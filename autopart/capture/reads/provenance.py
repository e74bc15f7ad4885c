"""Where a value comes from, asked while torch.export traces: from the inputs of the batch alone, or from what else."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopart.capture.batch.questions import Operand, Step


class Elsewhere(Exception):
    """A value that depends on more than the inputs; the message says on what."""


class Provenance:
    """The ops of a program that is being traced.

    names: of the parameters and buffers, in the order of their placeholders; count: of the inputs, which stand behind.
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
        """An op that changes what it is given was traced."""
        target: Any = node.target
        operands = zip(target._schema.arguments, node.args, strict=False)
        named = ((a, node.kwargs[a.name]) for a in target._schema.arguments if a.name in node.kwargs)
        written = [value for a, value in (*operands, *named) if a.alias_info is not None and a.alias_info.is_write]
        nodes = [value for value in pytree.tree_leaves(written) if isinstance(value, fx.Node)]
        self._writers.append((node, frozenset().union(*map(_memory, nodes))))

    def steps(self, wanted: Sequence[fx.Node]) -> tuple[Step, ...]:
        """All ops that lead to some values from the inputs, in order, with those that changed what they read.
        O(ops on the way).  Raises Elsewhere."""
        found: set[fx.Node] = set()
        memory: set[int] = set()
        queue = list(wanted)
        while queue:
            node = queue.pop()
            if node in found:
                continue
            self._check(node)
            found.add(node)
            queue.extend(node.all_input_nodes)
            fresh = _memory(node) - memory
            memory |= fresh
            queue.extend(writer for writer, written in self._writers if written & fresh)
        return tuple(map(self._step, sorted(found)))

    def _check(self, node: fx.Node) -> None:
        if node in self._held:
            raise Elsewhere(self._held[node])
        if node.op == "get_attr":
            constant = getattr(self._root, str(node.target), None)
            if not isinstance(constant, torch.Tensor) or type(constant) is torch._subclasses.FakeTensor:
                raise Elsewhere("a tensor of Python that has no values while the model is captured")
        elif node.op != "placeholder" and node.target is not operator.getitem:
            target = node.target
            if not isinstance(target, torch._ops.OpOverload):
                raise Elsewhere(f"the result of {getattr(target, '__name__', target)}")
            if torch.Tag.nondeterministic_seeded in target.tags:
                raise Elsewhere(f"random numbers ({target})")

    def _step(self, node: fx.Node) -> Step:
        number = self.number(node)
        if node.op == "placeholder":
            return Step(number, None, (self._inputs[node],), {})
        if node.op == "get_attr":
            constant = getattr(self._root, str(node.target))
            return Step(number, torch.clone, (constant,), {})
        operand: Any = lambda node: Operand(self.number(node))  # noqa: E731
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), operand)
        target: Any = node.target
        return Step(number, target, tuple(args), dict(kwargs))

    def number(self, node: fx.Node) -> int:
        """Of an op, the same whenever it is asked for."""
        return self._numbers.setdefault(node, len(self._numbers))


def _memory(node: fx.Node) -> set[int]:
    """What tells the memory that the results of an op lie in."""
    return {tensor.untyped_storage()._cdata for tensor in _tensors(node)}


def _tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    for leaf in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            yield leaf

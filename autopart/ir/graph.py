"""What is computed: a sequence of ops over named values, at the size of one micro-batch, and what each op costs.

A captured op that returns several tensors and the calls that pick one of them are one op here, so that no cut can fall
between them.  `Op.parts` lists the captured ops that an op stands for, so coarsening gives a graph again.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields

from autopart.ir.errors import GraphError

Literal = None | bool | int | float | str | tuple["Literal", ...]


def alike(a: Literal, b: Literal) -> bool:
    """Return whether two arguments are the same.  NaN is the same as NaN, though not equal to it."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    return a == b or (a != a and b != b)


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a micro-batch.

    rows: entries along the batch axis, at least 1.  tokens: entries along the sequence axis; None: whole sequences of
    any length.
    """

    rows: int
    tokens: int | None = None

    def __str__(self) -> str:
        """Return a text such as "1 row" or "4 rows of 128 tokens"."""
        rows = many(self.rows, "row")
        return rows if self.tokens is None else f"{rows} of {many(self.tokens, 'token')}"


@dataclass(frozen=True, slots=True)
class Cost:
    """Time, work and memory of one op for one micro-batch.

    fwd_ns, bwd_ns: nanoseconds of the forward and of the whole backward (input and weight part).
    saved_bytes: bytes kept from forward to backward.  scratch_bytes: bytes needed only while it runs.
    flops: floating point operations of the forward.  tail_ns: nanoseconds at the end of the forward of a block of ops
    whose results its backward does not need; 0 for a single op.  weight_ns: the part of bwd_ns that only makes
    gradients of weights, and can wait.  weight_bytes: bytes kept until it runs, where the backward has two parts.
    hidden_ns: of exchanges that run beside it, by which the rest of the backward is then longer.
    """

    fwd_ns: int = 0
    bwd_ns: int = 0
    saved_bytes: int = 0
    scratch_bytes: int = 0
    flops: int = 0
    tail_ns: int = 0
    weight_ns: int = 0
    weight_bytes: int = 0
    hidden_ns: int = 0

    def __add__(self, other: Cost) -> Cost:
        """Return the cost of running both, one after the other."""
        return Cost(
            self.fwd_ns + other.fwd_ns,
            self.bwd_ns + other.bwd_ns,
            self.saved_bytes + other.saved_bytes,
            max(self.scratch_bytes, other.scratch_bytes),
            self.flops + other.flops,
            other.tail_ns,
            self.weight_ns + other.weight_ns,
            self.weight_bytes + other.weight_bytes,
            self.hidden_ns + other.hidden_ns,
        )

    @property
    def total_ns(self) -> int:
        """Nanoseconds of forward and backward."""
        return self.fwd_ns + self.bwd_ns


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor.

    dtype: torch's name without "torch.".  grad: whether a gradient flows back through it.  rows_axis: the axis that
    grows with the batch, None if the shape does not depend on the number of rows.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    grad: bool = False
    rows_axis: int | None = None


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter, buffer or lifted constant.

    name: its fully qualified name (FQN) in the model.  kind: "param", "buffer" or "constant".  same_as: the name that
    owns the storage, if this one is tied to it.  copy_bytes: bytes of copies in other dtypes that autocast reads and
    that are held during a step.  once_ns: once a step, to sum its gradient over ranks that hold pieces of others.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    trainable: bool = False
    kind: str = "param"
    same_as: str | None = None
    copy_bytes: int = 0
    once_ns: int = 0


@dataclass(frozen=True, slots=True)
class Op:
    """One op.  reads, writes: values; params: names of parameters, buffers and constants, tied names resolved.

    attrs: every argument by its name in the op's schema; "%name" stands for a value or parameter.  module: path of the
    module in the model.  where: file:line of the user's code.  random: whether it draws random numbers.  parts: names
    of the captured ops it stands for (its own name if it is a captured op).
    """

    name: str
    target: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    params: tuple[str, ...] = ()
    attrs: tuple[tuple[str, Literal], ...] = ()
    module: str = ""
    where: str = ""
    random: bool = False
    parts: tuple[str, ...] = ()
    cost: Cost = field(default=Cost())


@dataclass(frozen=True, slots=True)
class LossReduction:
    """How the losses of micro-batches combine to the loss of the whole batch.

    kind: "sum" (add them), "rows" (mean weighted by rows), "tokens" (mean weighted by a count that depends on inputs
    alone), "any" (the loss does not depend on the batch).  The count is the number of elements of `value` that differ
    from `ignore`, or the sum of `value` if ignore is None; with `classes`, a vector, each element counts as the entry
    of classes that it selects.  smoothed: whether the numerator may be nonzero when the count is 0.  adjusted: values
    that the program of a micro-batch must read differently from how it was captured: terms of a loss that is a sum,
    and numbers that stand for the whole batch.
    """

    kind: str
    value: str | None = None
    ignore: int | None = None
    classes: str | None = None
    smoothed: bool = False
    adjusted: tuple[Adjusted, ...] = ()

    def counted(self) -> Iterator[str]:
        """Yield the values that must be known of each micro-batch before the step."""
        yield from (name for name in (self.value, self.classes) if name is not None)
        for item in self.adjusted:
            yield from item.weight.counted()
            if item.reader is None:
                yield item.value


@dataclass(frozen=True, slots=True)
class Adjusted:
    """A value that the program of a micro-batch reads in another form than it computed it.

    weight: how the values of the micro-batches combine to that of the whole batch.  reader: the op that reads it times
    the weight of this micro-batch; None: every op reads the value of the whole batch, which depends on inputs alone.
    """

    value: str
    weight: LossReduction
    reader: str | None = None


@dataclass(frozen=True, slots=True)
class Graph:
    """Ops in topological order.

    size: of the micro-batch that the shapes are for.  inputs: tensor inputs in the order of the flattened batch.
    outputs: results, the loss first if there is one.  updates: (buffer name, value that replaces it) after each
    micro-batch, or once a step (`loss.analysis`).  before: frozen tensors that are used in front of this graph, if it
    begins behind frozen layers; the first stage holds them.
    """

    size: Size
    values: tuple[Value, ...]
    params: tuple[Param, ...]
    ops: tuple[Op, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    updates: tuple[tuple[str, str], ...] = ()
    before: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Rows of the micro-batch."""
        return self.size.rows

    def value_map(self) -> dict[str, Value]:
        """Return the values by name."""
        return {v.name: v for v in self.values}

    def param_map(self) -> dict[str, Param]:
        """Return parameters, buffers and constants by name."""
        return {p.name: p for p in self.params}

    def op_map(self) -> dict[str, Op]:
        """Return the ops by name."""
        return {op.name: op for op in self.ops}

    def writer(self) -> dict[str, str]:
        """Return the name of the op that writes each value; inputs have none."""
        return {w: op.name for op in self.ops for w in op.writes}

    def learning_ops(self) -> frozenset[str]:
        """Return the ops that have a backward: those that use a trainable parameter, or read or write a value with a
        gradient.  O(reads + uses)."""
        trained = {p.name for p in self.params if p.trainable}
        grads = {v.name for v in self.values if v.grad}
        return frozenset(
            op.name
            for op in self.ops
            if not (trained.isdisjoint(op.params) and grads.isdisjoint(op.reads) and grads.isdisjoint(op.writes))
        )

    def ops_between(self, starts: Collection[str], ends: Collection[str]) -> frozenset[str]:
        """Return the ops that compute the values `ends` from inputs, parameters and the values `starts`.  O(reads)."""
        known = {*starts, *self.inputs}
        needed, found = set(ends) - known, set[str]()
        for op in reversed(self.ops):
            if not needed.isdisjoint(op.writes):
                found.add(op.name)
                needed.update(set(op.reads) - known)
        return frozenset(found)

    def shape_digest(self) -> str:
        """Return a fingerprint of all but costs and source lines: equal for the same model at the same shapes."""
        size = self.rows if self.size.tokens is None else (self.rows, self.size.tokens)
        values = [(v.name, v.shape, v.dtype, v.grad) for v in self.values]
        ops = [(o.name, o.target, o.reads, o.writes, o.params, o.attrs) for o in self.ops]
        return _digest([size, values, self._params(), ops, self.inputs, self.outputs, self.updates])

    def structure_digest(self) -> str:
        """Return a fingerprint of names and connections: equal for the same model at any number of rows."""
        ops = [(o.name, o.target, o.reads, o.writes, o.params) for o in self.ops]
        return _digest([self._params(), ops, self.inputs, self.outputs, self.updates])

    def _params(self) -> list[tuple[object, ...]]:
        return [(p.name, p.shape, p.dtype, p.trainable, p.kind, p.same_as) for p in self.params]


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()[:16]


def check(graph: Graph) -> Graph:
    """Check the invariants of a graph and return it.

    1. Names of values, of parameters and of ops are unique.
    2. Every value is an input or written by exactly one op, before its first use.
    3. Every read, parameter, output and update exists.
    4. There is at least one row, and no value has negative bytes.
    Raises GraphError with the ops around the first violation.
    """
    _check_size(graph.size)
    _unique("value", (v.name for v in graph.values))
    _unique("parameter", (p.name for p in graph.params))
    _unique("op", (o.name for o in graph.ops))
    known = {v.name for v in graph.values}
    params = {p.name for p in graph.params}
    ready = set(graph.inputs)
    for place, op in enumerate(graph.ops):
        for problem in _op_problems(op, known, params, ready):
            near = graph.ops[max(0, place - 5) : place + 6]
            lines = [f"\n    {o.name} = {o.target}({', '.join(o.reads + o.params)})" for o in near]
            raise GraphError(f"op {op.name}: {problem}", where=op.where, why="".join(lines))
        ready.update(op.writes)
    for name in graph.outputs:
        if name not in ready:
            raise GraphError(f"output {name} is never written")
    for buffer, value in graph.updates:
        if buffer not in params or value not in ready:
            raise GraphError(f"update of buffer {buffer} by {value}: one of them does not exist")
    for value_ in graph.values:
        if value_.size_bytes < 0:
            raise GraphError(f"value {value_.name} has size {value_.size_bytes}")
    return graph


def check_cost(cost: Cost) -> Cost:
    """Check that every field is a non-negative integer, and return the cost.  Raises GraphError."""
    for each in fields(cost):
        amount = getattr(cost, each.name)
        if not isinstance(amount, int) or amount < 0:
            raise GraphError(f"cost field {each.name} is {amount!r}", why="costs are non-negative integers")
    return cost


def _check_size(size: Size) -> None:
    """Check that there is at least one row, and one token if tokens are counted.  Raises GraphError."""
    for name, count in (("rows", size.rows), ("tokens", size.tokens)):
        if count is not None and (type(count) is not int or count < 1):
            raise GraphError(f"a size has {count!r} {name}", why="it needs at least one")


def _op_problems(op: Op, known: set[str], params: set[str], ready: set[str]) -> Iterable[str]:
    for read in op.reads:
        if read not in ready:
            yield f"reads {read} before it is written"
    for write in op.writes:
        if write not in known:
            yield f"writes {write}, which is not a value"
        if write in ready:
            yield f"writes {write} a second time"
    for param in op.params:
        if param not in params:
            yield f"uses {param}, which is not a parameter"


def _unique(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise GraphError(f"{what} {name} is defined twice")
        seen.add(name)


def stage_modules(stages: Sequence[Sequence[str]], graph: Graph) -> tuple[tuple[str, ...], ...]:
    """Return the paths of the modules of each stage, in captured order.

    stages: the names of the ops of each.  A path ends at its first number, so that a layer is one module.  Ops that are
    in several stages are left out, unless the stage has no others.  O(ops).
    """
    copies = Counter(name for ops in stages for name in ops)
    known = graph.op_map()
    found = []
    for names in stages:
        ops = [known[name] for name in names if name in known]
        counted = [op for op in ops if copies[op.name] == 1] or ops
        found.append(tuple(dict.fromkeys(_layer(op) for op in counted if op.module)))
    return tuple(found)


def module_range(paths: Sequence[str]) -> str:
    """Return the first and the last of the modules of a stage, such as "transformer.h.0 … transformer.h.3"."""
    return ", ".join(paths) if len(paths) <= 2 else f"{paths[0]} … {paths[-1]}"


def _layer(op: Op) -> str:
    parts = op.module.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return op.module


def many(count: int, what: str) -> str:
    """Return a number of things: "1 row", "2 micro-batches"."""
    return f"{count} {what}{'' if count == 1 else 'es' if what.endswith('ch') else 's'}"

"""One model's program at every size of a micro-batch: what has to be captured for it, and what follows from that.

A program is captured at two sizes, the base and another one.  Every further size lies on the line through them
(`passes.ops.resize`); before it runs it is captured, and compared with the base.  For a model on the meta device one
capture may be enough: at a prime number of rows, from which the second program is inferred (`infer_other_size`).

Two captures also show the batch axis of each value, and every number in the program that depends on the rows (a loss
divided by `x.shape[0]`), which the loss analysis has to know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch._guards import detect_fake_mode
from torch.utils import _pytree as pytree

from autopart.batch.batch import Batch
from autopart.capture.cache import CaptureCache
from autopart.capture.capture import Captured
from autopart.capture.trace.functional import call_key, tensor_kind
from autopart.ir.errors import CaptureError, GraphError, OtherProgramError, RefusedError
from autopart.ir.graph import Graph, Size
from autopart.passes.ops.resize import resize
from autopart.rng import keyed

Captures = Callable[[Batch, Size], Captured]
"""Captures one model in one mode: a `CaptureCache`, or one with a mode bound to it."""
_FROM, _TO = 61, 400
"""The range of primes: above sizes that are common in models, small enough for every op."""
_NEAR = 2
"""A number this close to a multiple of the rows may be a shifted multiple."""
_HUGE = 1 << 40
"""Larger numbers are not sizes: `x[a:]` has the end 2**63 - 1."""


@dataclass(frozen=True, eq=False)
class ProgramFamily:
    """The programs of one model for micro-batches of batches like `batch`.

    base: captured at the size that is wanted first, or at a prime number of rows.  other: at another size; None when
    only the base is wanted, or when the capture was refused with `refusal`.
    """

    captures: Captures
    batch: Batch
    base: Captured
    other: Captured | None
    refusal: CaptureError | RefusedError | None = None

    @property
    def on_meta(self) -> bool:
        """Whether the model is on the meta device: its programs can be planned but not run."""
        return self.base.on_meta

    def captured(self, size: Size) -> Captured:
        """Return the program captured at this size.

        Raises CaptureError, RefusedError; the latter also when it differs from the program of the base.
        """
        found = self.captures(self.batch, size)
        require_same_program(self.base.graph, found.graph)
        return found

    def known(self, sizes: Iterable[Size]) -> bool:
        """Return whether `at` knows the program at each of these sizes.  O(ops + values)."""
        with suppress(GraphError):
            return all(self.at(size) for size in sizes)
        return False

    def at(self, size: Size) -> Graph:
        """Return the program at this size, captured or not.  O(ops + values).  Raises GraphError if it is not known."""
        return resize(self.base.graph, self.twin(self.base.graph), size)

    def twin(self, graph: Graph) -> Graph | None:
        """Return the other graph if it shows how a graph of the base's size grows with the rows (`resize`)."""
        if self.other is None or self.other.graph.structure_digest() != graph.structure_digest():
            return None
        return self.other.graph

    def alone(self, size: Size) -> ProgramFamily:
        """Return a family that knows the program at this size only."""
        return ProgramFamily(self.captures, self.batch, self.captures(self.batch, size), None)

    def based_at(self, size: Size) -> ProgramFamily:
        """Return this family with its base captured at this size.  Raises CaptureError, RefusedError."""
        return ProgramFamily(self.captures, self.batch, self.captured(size), self.base)


def capture_family(
    captures: CaptureCache, batch: Batch, base: Size, others: Sequence[Size] | None = None
) -> ProgramFamily:
    """Capture a model at the base size and at a second one.

    others: sizes that may be run, of which the first that differs from the base is captured; None when only the base is
    wanted.  Raises CaptureError, RefusedError.
    """
    if others is None:
        return ProgramFamily(captures, batch, captures(batch, base), None)
    on_meta = not captures.values_come and any(parameter.is_meta for parameter in captures.model.parameters())
    prime = prime_batch_size(captures.model, batch) if on_meta else None
    if prime is not None:
        with suppress(CaptureError, RefusedError):  # errors that do not come from the prime number are raised below
            first, second = captures(batch, Size(prime)), another_size(Size(prime), others)
            return ProgramFamily(captures, batch, first, infer_other_size(first, second) or captures(batch, second))
    first = captures(batch, base)
    try:
        return ProgramFamily(captures, batch, first, captures(batch, another_size(base, others)))
    except (CaptureError, RefusedError) as error:
        if base.rows != batch.rows:
            raise
        return ProgramFamily(captures, batch, first, None, error)  # the whole batch may still run


def another_size(size: Size, others: Sequence[Size]) -> Size:
    """Return a size to compare with: one of `others` if one differs, else one row more."""
    return next((other for other in others if other != size), Size(size.rows + 1, size.tokens))


def mark_rows(graph: Graph, other: Graph) -> Graph:
    """Return `graph` with `Value.rows_axis` set, by comparison with a capture at another number of rows.  O(values).

    A value whose two shapes differ in several axes (every row against every row) keeps None.  Raises
    OtherProgramError if the two captures are different programs.
    """
    require_same_program(graph, other)
    shapes = other.value_map()
    values = tuple(replace(v, rows_axis=differing_axis(v.shape, shapes[v.name].shape)) for v in graph.values)
    return replace(graph, values=values)


def differing_axis(shape: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the axis in which two shapes differ, if it is the only one."""
    differing = [axis for axis, (x, y) in enumerate(zip(shape, other, strict=True)) if x != y]
    return differing[0] if len(differing) == 1 else None


def require_same_program(graph: Graph, other: Graph) -> None:
    """Raise OtherProgramError if two captures of one model are not the same program at two sizes."""
    mine, theirs = graph.ops, other.ops
    if graph.structure_digest() == other.structure_digest():
        shapes = other.value_map()  # squeeze() drops an axis at one size only
        ranks = {v.name for v in graph.values if len(v.shape) != len(shapes[v.name].shape)}
        if not ranks:
            return
        place = next((i for i, op in enumerate(mine) if ranks.intersection(op.writes)), None)
    else:
        place = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a.target != b.target), None)
    op = mine[place] if place is not None and place < len(mine) else None
    raise OtherProgramError(
        f"the model runs different operations on {graph.rows} and on {other.rows} rows",
        where=f"{op.target} in module {op.module} at {op.where}" if op else f"{len(mine)} and {len(theirs)} ops",
        why="one plan has to fit micro-batches of both sizes",
        fix="choose a batch size that micro_batches divides, with at least 2 rows in each micro-batch",
    )


class _Ambiguous(Exception):
    """A number may or may not come from the rows."""


def prime_batch_size(model: nn.Module, batch: Batch) -> int | None:
    """A number of rows that no other size of the model and its inputs can be mistaken for, if there is one."""
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    for tensor, split in batch.tensors_and_splits():
        sizes.update(tensor.shape[1:] if split else tensor.shape)  # the first axis of what is split is the rows
    primes = (p for p in range(_FROM, _TO) if all(p % q for q in range(2, math.isqrt(p) + 1)))
    return next((p for p in primes if not any(_near(size, p) for size in sizes)), None)


def _near(number: int, rows: int) -> bool:
    """Whether a number is a multiple of the rows, or close to one."""
    return number >= rows - _NEAR and min(number % rows, -number % rows) <= _NEAR


def infer_other_size(captured: Captured, size: Size) -> Captured | None:
    """The capture as it would be at another size, None where that is unknown.  Its module stays the old one.

    The first capture is made at a prime number of rows that divides no size of the model or its inputs.  A size or
    argument that it divides can then only come from the rows, and is scaled to the other number.  torch computes the
    shapes that follow, once for equal calls, and they must be those that the same rule predicts.  If a number may
    depend on the rows in another way (near a multiple, a fraction such as 1/rows, rows times rows), the model has to be
    captured again.

    This cannot see Python code that takes another branch at another number of rows, so it serves plans that are not
    run; `compile` captures everything that it runs.

    Before: captured at `prime_batch_size` rows.  O(nodes), and one call on fake tensors for each kind of call.
    """
    change = _Change(captured.graph.rows, size.rows)
    try:
        shapes = _shapes(captured, change)
        graph = _resized(captured.graph, shapes, change)
    except Exception:  # an op may refuse the new sizes in any way of its own
        return None
    return replace(captured, graph=graph)


@dataclass(frozen=True)
class _Change:
    """From one number of rows to another."""

    old: int
    new: int

    def number(self, number: int) -> int:
        """A size or an argument after the change.  Raises _Ambiguous."""
        if abs(number) > _HUGE:
            return number
        share, rest = divmod(abs(number), self.old)
        if share and not rest:
            if not share % self.old:
                raise _Ambiguous  # rows against rows
            return share * self.new * (1 if number > 0 else -1)
        if _near(abs(number), self.old):
            raise _Ambiguous
        return number

    def share(self, number: float) -> float:
        """Return a float unchanged.  Raises _Ambiguous if it may be a multiple or a fraction of the rows."""
        whole = number * self.old
        if number and not number.is_integer() and math.isclose(whole, round(whole), rel_tol=1e-9):
            raise _Ambiguous
        if number.is_integer() and abs(number) < _HUGE and _near(abs(int(number)), self.old):
            raise _Ambiguous
        return number

    def literal(self, value: Any) -> Any:
        """An argument after the change, whatever it holds."""
        if isinstance(value, (tuple, list)):
            return type(value)(self.literal(item) for item in value)
        if type(value) is int:
            return self.number(value)
        return self.share(value) if type(value) is float and math.isfinite(value) else value

    def shape(self, sizes: Iterable[int]) -> tuple[int, ...]:
        """A shape after the change."""
        return tuple(self.number(size) for size in sizes)


def _shapes(captured: Captured, change: _Change) -> dict[str, tuple[int, ...]]:
    """The shape of every value after the change, as torch says.  Raises _Ambiguous when it is not the predicted one."""
    nodes = list(captured.module.graph.nodes)
    mode = detect_fake_mode([node.meta.get("val") for node in nodes])
    env: dict[fx.Node, Any] = {}
    known: dict[Hashable, Any] = {}
    found: dict[str, tuple[int, ...]] = {}
    assert mode is not None
    with mode, torch.no_grad():
        for node in nodes:
            if node.op == "placeholder":
                env[node] = _given(node, captured, change)
            elif node.op == "call_function":
                env[node] = _called(node, env, known, change)
            else:
                continue
            leaves = (pytree.tree_leaves(made) for made in (node.meta["val"], env[node]))
            for before, after in zip(*leaves, strict=True):
                if change.shape(before.shape) != tuple(after.shape) or before.dtype != after.dtype:
                    raise _Ambiguous
            if isinstance(env[node], torch.Tensor):
                found[captured.names.value(node)] = tuple(env[node].shape)
    return found


def _given(node: fx.Node, captured: Captured, change: _Change) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    shape = tuple(value.shape)
    if node.name in captured.names.inputs:
        shape = change.shape(shape)
    elif change.shape(shape) != shape:
        raise _Ambiguous  # a constant that was made of the rows
    return torch.empty(shape, dtype=value.dtype, device=value.device)


def _called(node: fx.Node, env: dict[fx.Node, Any], known: dict[Hashable, Any], change: _Change) -> Any:
    target: Any = node.target
    args, kwargs = node.args, dict(node.kwargs)
    if target is keyed:
        target, args = args[0], args[2:]
    args, kwargs = change.literal(args), {name: change.literal(value) for name, value in kwargs.items()}
    try:
        key, _ = call_key(target, args, kwargs, lambda operand: tensor_kind(env[operand]))
    except NotImplementedError:
        key = node
    if key not in known:
        args, kwargs = fx.map_arg((args, kwargs), env.__getitem__)
        known[key] = target(*args, **kwargs)
    return known[key]


def _resized(graph: Graph, shapes: dict[str, tuple[int, ...]], change: _Change) -> Graph:
    values = tuple(
        replace(v, shape=shapes[v.name], size_bytes=v.size_bytes // math.prod(v.shape) * math.prod(shapes[v.name]))
        if shapes[v.name] != v.shape
        else v
        for v in graph.values
    )
    ops = tuple(replace(op, attrs=tuple((name, change.literal(value)) for name, value in op.attrs)) for op in graph.ops)
    return replace(graph, size=Size(change.new), values=values, ops=ops)

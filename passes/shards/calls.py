"""One op as tensor parallelism sees it: which axes of its operands and results are one letter, and which are sections
of another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from autopart.ir.graph import Graph, Literal, Op
from autopart.passes.ops.flops import operands
from autopart.passes.ops.letters import Letters, Shape, bound, letters
from autopart.passes.ops.row import INDEXING, LOSS, VIEW, WINDOW, OpRow
from autopart.passes.ops.table import op_name, row_of

RESHAPES = ("reshape", "view", "_unsafe_view", "view_as", "flatten", "unflatten", "squeeze", "unsqueeze")
EXPANDS = ("expand", "expand_as", "broadcast_to")
SLICES = ("slice", "narrow", "split", "split_with_sizes", "chunk")
ATTENTION, ENTROPY, EMBEDDING = "scaled_dot_product_attention", "cross_entropy_loss", "embedding"
_NO_LETTERS = ("prelu", "repeat", "tile")
Place = tuple[str, int]
"""An axis of a value or parameter."""


@dataclass(frozen=True)
class Sections:
    """An axis that lies in an axis of another tensor as one of its equal parts.  major: whether it is the parts that
    are counted by the axis: attention heads of a key among those of the queries."""

    part: Place
    whole: Place
    major: bool = False


@dataclass(frozen=True)
class Call:
    """An op of a graph.  reads: names of its tensor arguments in order, each use once.  numbers: values of floating
    point.  tiled: axes of values of which all slices are equal parts side by side."""

    op: Op
    shapes: Mapping[str, Shape]
    numbers: frozenset[str]
    tiled: frozenset[Place]

    @cached_property
    def name(self) -> str:
        """The op's own name."""
        return op_name(self.op.target)

    @cached_property
    def row(self) -> OpRow:
        """Its row of the table."""
        return row_of(self.op.target)

    @cached_property
    def arguments(self) -> dict[str, Literal]:
        """Its arguments by name."""
        return dict(self.op.attrs)

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """The names of its tensor arguments."""
        return tuple(ref[1:] for ref in operands(self.op))

    @property
    def reshapes(self) -> bool:
        """Whether it keeps its elements in row-major order and changes their axes."""
        return self.name in RESHAPES and bool(self.op.writes)

    def shape(self, name: str) -> Shape:
        """Return the shape of a value or parameter."""
        return self.shapes[name]

    def dim(self, default: int = 0, ndim: int | None = None) -> int:
        """Return the axis that its argument `dim` names."""
        count = len(self.shape(self.reads[0])) if ndim is None else ndim
        given = self.arguments.get("dim", default)
        axis = given if type(given) is int else default
        return axis + count if axis < 0 else axis

    @cached_property
    def letters(self) -> Letters | None:
        """The letters of its axes, where they are known and mean that rows along them stay apart or add up."""
        if self.reshapes or self.name in _NO_LETTERS or "batch_norm" in self.name or not self.op.writes:
            return None
        if self.name in ("cat", "stack"):
            return self._joined()
        if self.name == ENTROPY:
            return self._entropy()
        family = self.row.family
        if family in (LOSS, WINDOW) or (family == INDEXING and self.name != EMBEDDING):
            return None
        return letters(self.row, self.arguments, [self.shape(name) for name in self.reads], self._result)

    @property
    def _result(self) -> Shape:
        return self.shape(self.op.writes[0])

    def _joined(self) -> Letters | None:
        """Letters of cat and stack: an axis each, but for the one along which they join.  Tensors without entries, as
        empty caches of keys are, do not count."""
        ndim = len(self._result)
        dim, joined = self.dim(0, ndim), self.joined
        names = tuple(f".{axis}" if axis != dim or len(joined) == 1 else "" for axis in range(ndim))
        own = names if self.name == "cat" else (*names[:dim], *names[dim + 1 :])
        if any(len(self.shape(name)) != len(own) for name in joined):
            return None
        return Letters(tuple(own if name in joined else () for name in self.reads), (names,))

    @property
    def joined(self) -> tuple[str, ...]:
        """What a cat or stack joins, without empty tensors of one axis."""
        return tuple(name for name in self.reads if self.name == "stack" or self.shape(name) != (0,))

    def _entropy(self) -> Letters | None:
        """Letters of a cross entropy with numbers of classes: n rows of v classes."""
        logits, target, *others = self.reads
        if len(self.shape(logits)) != 2 or len(self.shape(target)) != 1 or others:
            return None
        return Letters((("n", "v"), ("n",)), (("n",) if self._result else (),))

    @cached_property
    def operands(self) -> tuple[Mapping[str, int], ...]:
        """The axis of each letter in each tensor argument; a broadcast axis, of size 1, has none."""
        named = self.letters.operands if self.letters is not None else ()
        found = [self._at(name, names) for name, names in zip(self.reads, named, strict=False)]
        return (*found, *[{}] * (len(self.reads) - len(found)))

    @cached_property
    def results(self) -> tuple[Mapping[str, int], ...]:
        """The axis of each letter in each result."""
        if self.letters is None:
            return tuple({} for _ in self.op.writes)
        named = self.letters.results
        every = named if len(named) > 1 else named * len(self.op.writes)
        return tuple(
            self._at(name, names) if len(names) == len(self.shape(name)) else {}
            for name, names in zip(self.op.writes, every, strict=False)
        )

    def _at(self, tensor: str, names: tuple[str, ...]) -> Mapping[str, int]:
        """Return the axis of each letter that stands for one axis of more than one entry.  Letters of the axes D of a
        slice are left out: they hold other entries."""
        shape = self.shape(tensor)
        cut = self.row.family == VIEW and self.name in SLICES
        return {
            name: axis
            for axis, name in enumerate(names)
            if name and shape[axis] > 1 and names.count(name) == 1 and not (cut and name.startswith("D"))
        }

    def axes(self) -> dict[str, list[Place]]:
        """Return the axes that stand for each letter, if all are equally long.  A letter that stands twice in one
        tensor, as in einsum("dd -> d"), takes its diagonal, which no part of one axis has."""
        named = self.letters
        every = (*named.operands, *named.results) if named is not None else ()
        twice = {name for names in every for name in names if names.count(name) > 1}
        found: dict[str, list[Place]] = {}
        pairs = (*zip(self.reads, self.operands, strict=True), *zip(self.op.writes, self.results, strict=False))
        for tensor, own in pairs:
            for letter in [each for each in own if each not in twice]:
                found.setdefault(letter, []).append((tensor, own[letter]))
        return {letter: places for letter, places in found.items() if len({self.shape(n)[a] for n, a in places}) == 1}

    def sections(self) -> Iterator[Sections]:
        """Yield the axes that are parts of others: of slices that tile a value, of values that are joined, of grouped
        heads."""
        if self.name in SLICES and (self.reads[0], self.dim()) in self.tiled:
            yield from (Sections((name, self.dim()), (self.reads[0], self.dim())) for name in self.op.writes)
        elif self.name == "cat" and self.letters is not None:
            dim, sizes = self.dim(0, len(self._result)), {self.shape(name) for name in self.joined}
            if len(sizes) == 1 < len(self.joined):
                yield from (Sections((name, dim), (self.op.writes[0], dim)) for name in self.joined)
        elif self.name == ATTENTION and self.arguments.get("enable_gqa") is True:
            query, *others = self.reads[:3]
            axis = len(self.shape(query)) - 3
            if all(self.shape(query)[axis] % max(1, self.shape(other)[axis]) == 0 for other in others):
                yield from (Sections((other, axis), (query, axis), major=True) for other in others)


def bounds_of(call: Call) -> list[tuple[int, int]] | None:
    """Return the first entry and the end of each result of a slice or split; None for steps."""
    size, dim = call.shape(call.reads[0])[call.dim()], call.dim()
    if call.name == "slice":
        if call.arguments.get("step", 1) not in (None, 1):
            return None
        first = bound(call.arguments.get("start"), 0, size)
        return [(first, max(first, bound(call.arguments.get("end"), size, size)))]
    if call.name == "narrow":
        start, length = call.arguments.get("start"), call.shape(call.op.writes[0])[dim]
        return [(start, start + length)] if type(start) is int and start >= 0 else None
    given = call.arguments.get("split_sizes", call.arguments.get("split_size"))
    if isinstance(given, tuple):
        ends = [*accumulate(length for length in given if isinstance(length, int))]
    else:
        most = max(1, given if type(given) is int else -(-size // _chunks(call)))
        ends = [*range(most, size, most), size]
    return list(pairwise([0, *ends]))


def _chunks(call: Call) -> int:
    count = call.arguments.get("chunks", 1)
    return count if type(count) is int and count > 0 else 1


def shapes_of(graph: Graph) -> dict[str, Shape]:
    """Return the shapes of all values and parameters, by name."""
    return {v.name: v.shape for v in graph.values} | {p.name: p.shape for p in graph.params}


def calls_of(graph: Graph) -> list[Call]:
    """Return the ops of a graph with the shapes of what they read and write.  O(reads)."""
    shapes = shapes_of(graph)
    numbers = frozenset(value.name for value in graph.values if "float" in value.dtype)
    calls = [Call(op, shapes, numbers, frozenset()) for op in graph.ops]
    pieces: dict[Place, list[tuple[int, int]]] = {}
    for call in calls:
        if call.name in SLICES:
            found = bounds_of(call)
            place = call.reads[0], call.dim()
            pieces.setdefault(place, []).extend(found if found is not None else [(0, -1)])
    tiled = frozenset(place for place, found in pieces.items() if _tile(found, shapes[place[0]][place[1]]))
    return [Call(op, shapes, numbers, tiled) for op in graph.ops]


def _tile(pieces: list[tuple[int, int]], size: int) -> bool:
    """Return whether pieces are equal parts of an axis, each at a multiple of its length."""
    lengths = {end - first for first, end in pieces}
    length = lengths.pop() if len(lengths) == 1 else 0
    return length > 0 and size % length == 0 and all(first % length == 0 for first, _ in pieces)

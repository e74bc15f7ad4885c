"""One model's program at every size of a micro-batch: what has to be captured for it, and what follows from that.

A program is captured at two sizes, the base and another one.  Every further size lies on the line through them
(`passes.ops.resize`); before it runs it is captured, and compared with the base.  For a model on the meta device one
capture may be enough: at a prime number of rows, from which the second program is inferred (`infer_size`).

Two captures also show the batch axis of each value, and every number in the program that depends on the rows (a loss
divided by `x.shape[0]`), which the loss analysis has to know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from autopart.batch.batch import Batch
from autopart.capture.cache import CaptureCache
from autopart.capture.capture import Captured
from autopart.ir.errors import CaptureError, OtherProgramError, RefusedError
from autopart.ir.graph import Graph, Size
from autopart.passes.ops.resize import resizable_to, resize
from autopart.planning.derive.infer_size import infer_other_size, prime_batch_size

Captures = Callable[[Batch, Size], Captured]
"""Captures one model in one mode: a `CaptureCache`, or one with a mode bound to it."""


class ProgramFamily:
    """The programs of one model for micro-batches of batches like `batch`.

    base: captured at the size that is wanted first, or at a prime number of rows.  other: at another size; None when
    only the base is wanted, or when the capture was refused with `refusal`.
    """

    def __init__(
        self,
        captures: Captures,
        batch: Batch,
        base: Captured,
        other: Captured | None,
        refusal: CaptureError | RefusedError | None = None,
    ) -> None:
        self._captures = captures
        self.batch, self.base, self.other, self.refusal = batch, base, other, refusal

    @property
    def on_meta(self) -> bool:
        """Whether the model is on the meta device: its programs can be planned but not run."""
        return self.base.on_meta

    def captured(self, size: Size) -> Captured:
        """Return the program captured at this size.

        Raises CaptureError, RefusedError; the latter also when it differs from the program of the base.
        """
        found = self._captures(self.batch, size)
        require_same_program(self.base.graph, found.graph)
        return found

    def known(self, sizes: Iterable[Size]) -> bool:
        """Return whether `at` knows the program at each of these sizes.  O(ops + values)."""
        return resizable_to(self.base.graph, self.twin(self.base.graph), sizes)

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
        return ProgramFamily(self._captures, self.batch, self._captures(self.batch, size), None)

    def based_at(self, size: Size) -> ProgramFamily:
        """Return this family with its base captured at this size.  Raises CaptureError, RefusedError."""
        return ProgramFamily(self._captures, self.batch, self.captured(size), self.base)


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

"""One model's program at every size of a micro-batch: what has to be captured for it, and what follows from that.

A program is captured at two sizes, the base and another one.  Every further size lies on the line through them
(`passes.ops.resize`); before it runs it is captured, and compared with the base.  For a model on the meta device one
capture may be enough: at a prime number of rows, from which the second program is inferred (`infer_size`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from autopart.batch.batch import Batch
from autopart.capture.cache import CaptureCache
from autopart.capture.capture import Captured
from autopart.ir.errors import CaptureError, RefusedError
from autopart.ir.graph import Graph, Size
from autopart.passes.ops.resize import resizable_to, resize
from autopart.planning.derive.infer_size import infer_other_size, prime_batch_size
from autopart.planning.derive.rows import require_same_program

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
    if not captures.values_come and any(parameter.is_meta for parameter in captures.model.parameters()):
        with suppress(CaptureError, RefusedError):  # errors that do not come from the prime number are raised below
            family = _inferred(captures, batch, others)
            if family is not None:
                return family
    first = captures(batch, base)
    try:
        return ProgramFamily(captures, batch, first, captures(batch, another_size(base, others)))
    except (CaptureError, RefusedError) as error:
        if base.rows != batch.rows:
            raise
        return ProgramFamily(captures, batch, first, None, error)  # the whole batch may still run


def _inferred(captures: CaptureCache, batch: Batch, others: Sequence[Size]) -> ProgramFamily | None:
    """Return a family from one capture at a prime number of rows; None if no prime differs from every other size.

    If the second program cannot be inferred, it is captured.
    """
    prime = prime_batch_size(captures.model, batch)
    if prime is None:
        return None
    first, second = captures(batch, Size(prime)), another_size(Size(prime), others)
    return ProgramFamily(captures, batch, first, infer_other_size(first, second) or captures(batch, second))


def another_size(size: Size, others: Sequence[Size]) -> Size:
    """Return a size to compare with: one of `others` if one differs, else one row more."""
    return next((other for other in others if other != size), Size(size.rows + 1, size.tokens))

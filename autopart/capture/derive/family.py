"""One model's program at every size of a micro-batch: what has to be captured for it, and what follows from that.

A program is captured at two sizes, the base and another one, and every further size lies on the line through them
(`passes.ops.resize`).  Of a model without values, which can be planned and not be run, one capture may be enough: at a
prime number of rows, from which the other is inferred (`infer_size`).  Whoever wants to run what was planned asks for
the captured program, which is compared with the base.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from autopart.capture.batch.batch import Batch
from autopart.capture.cache import CaptureCache
from autopart.capture.capture import Captured
from autopart.capture.derive.infer_size import infer_other_size, prime_batch_size
from autopart.capture.derive.rows import require_same_program
from autopart.ir.errors import CaptureError, RefusedError
from autopart.ir.graph import Graph
from autopart.ir.size import Size
from autopart.passes.ops.resize import resizable_to, resize


class ProgramFamily:
    """The programs of one model for micro-batches of batches like `batch`.

    base: captured, at a size that may be planned for or for comparison alone.  other: at another size, captured or
    inferred; None when only the base is of interest, or where there is no other.  refusal: why there is none.
    """

    def __init__(
        self,
        captures: CaptureCache,
        batch: Batch,
        base: Captured,
        other: Captured | None,
        refusal: CaptureError | RefusedError | None = None,
    ) -> None:
        self._captures = captures
        self.batch, self.base, self.other, self.refusal = batch, base, other, refusal

    @property
    def on_meta(self) -> bool:
        """Whether the model has no values: its programs can be planned and not be run."""
        return self.base.on_meta

    def captured(self, size: Size) -> Captured:
        """The program as captured at this size.

        Raises CaptureError, RefusedError; the latter also when it is another program than the base.
        """
        found = self._captures(self.batch, size)
        require_same_program(self.base.graph, found.graph)
        return found

    def known(self, sizes: Iterable[Size]) -> bool:
        """Whether `at` has an answer at each of these sizes.  O(ops + values)."""
        return resizable_to(self.base.graph, self.twin(self.base.graph), sizes)

    def at(self, size: Size) -> Graph:
        """The program at this size, captured or not.  O(ops + values).  Raises GraphError where it is not known."""
        return resize(self.base.graph, self.twin(self.base.graph), size)

    def twin(self, graph: Graph) -> Graph | None:
        """The other graph, if it shows how a graph of the base's size grows with the rows (`resize`)."""
        if self.other is None or self.other.graph.structure_digest() != graph.structure_digest():
            return None
        return self.other.graph

    def alone(self, size: Size) -> ProgramFamily:
        """The program captured at this size and at no other."""
        return ProgramFamily(self._captures, self.batch, self._captures(self.batch, size), None)

    def based_at(self, size: Size) -> ProgramFamily:
        """The same family with its base at this size.  Raises as `captured`."""
        return ProgramFamily(self._captures, self.batch, self.captured(size), self.base)


def capture_family(
    captures: CaptureCache, batch: Batch, base: Size, others: Sequence[Size] | None = None
) -> ProgramFamily:
    """Capture what a family needs.

    base: the size wanted first.  others: those that may be run anyway, of which the first that differs from the base
    is the second; None when no other size is of interest.  Raises CaptureError, RefusedError.
    """
    if others is None:
        return ProgramFamily(captures, batch, captures(batch, base), None)
    if any(parameter.is_meta for parameter in captures.model.parameters()):
        with suppress(CaptureError, RefusedError):  # what was not due to the prime number of rows comes again below
            family = _inferred(captures, batch, others)
            if family is not None:
                return family
    first = captures(batch, base)
    try:
        return ProgramFamily(captures, batch, first, captures(batch, another_size(base, others)))
    except (CaptureError, RefusedError) as error:
        if base.rows != batch.rows:
            raise
        return ProgramFamily(captures, batch, first, None, error)  # it may still run whole


def _inferred(captures: CaptureCache, batch: Batch, others: Sequence[Size]) -> ProgramFamily | None:
    """A family from one capture at a prime number of rows, where there is one that no other size can be mistaken for;
    the second program is captured where it cannot be inferred."""
    prime = prime_batch_size(captures.model, batch)
    if prime is None:
        return None
    first, second = captures(batch, Size(prime)), another_size(Size(prime), others)
    return ProgramFamily(captures, batch, first, infer_other_size(first, second) or captures(batch, second))


def another_size(size: Size, others: Sequence[Size]) -> Size:
    """A size to compare with: one that may be run anyway, if one differs."""
    return next((other for other in others if other != size), Size(size.rows + 1, size.tokens))

"""How the losses of micro-batches combine to that of the batch: asked of two captures, and of numbers where needed."""

from __future__ import annotations

from collections.abc import Sequence

from autopart.capture.batch import Batch
from autopart.capture.cache import CaptureCache
from autopart.capture.family import ProgramFamily, another_size
from autopart.capture.gc_pause import gc_paused
from autopart.capture.probe import prove_rows
from autopart.capture.rows import mark_rows
from autopart.ir.graph import LossReduction
from autopart.ir.size import Size
from autopart.passes.loss.derive import UnprovenRows, derive_loss_weight

WHOLE = LossReduction("any")


def reduction_of_batch(captures: CaptureCache, batch: Batch, micro_rows: Sequence[int], stated: str) -> LossReduction:
    """How the losses of micro-batches of these rows combine for batches like `batch`.

    A Python value, a length or a dtype may choose another loss than that of the batch that was planned for.  Captures
    at two sizes of several rows, since on one row a model may run other operations.  Raises CaptureError,
    RefusedError (CoupledLossError).
    """
    base = Size(max(2, *micro_rows))
    other = another_size(base, [Size(batch.rows or 1)])  # the whole batch may take another branch of the model's Python
    family = ProgramFamily(captures, batch, captures(batch, base), captures(batch, other))
    return loss_reduction(family, (micro_rows,), stated)


def loss_reduction(family: ProgramFamily, splits: Sequence[Sequence[int]], stated: str) -> LossReduction:
    """How the losses of micro-batches combine.  One needs no rule; more need one that is proven exact.

    splits: the rows of the micro-batches, in each way to split the batch that may be taken.  stated: what the user says
    of the loss, or "auto".  Raises CoupledLossError when the whole loss is not a combination of theirs.
    """
    base, other = family.base, family.other
    if all(len(micro_rows) == 1 for micro_rows in splits):
        return WHOLE
    if other is None:
        if family.refusal is not None:
            raise family.refusal
        return WHOLE
    graph = mark_rows(base.graph, other.graph)
    given = None if stated == "auto" else stated
    proven: frozenset[str] = frozenset()
    while True:
        try:
            with gc_paused():
                return derive_loss_weight(graph, other.graph, stated=given, proven=proven)
        except UnprovenRows as unproven:
            found = _prove(family, unproven.names) - proven
            if not found:  # what is proven makes rules apply further on, which ask for more
                raise unproven.refusal from None
            proven |= found


def _prove(family: ProgramFamily, names: frozenset[str]) -> frozenset[str]:
    """Those of the values that are slices of the whole batch's, as numbers show."""
    assert family.other is not None
    if family.on_meta:
        return names  # planning only: compile checks again, with values
    small, large = sorted((family.base, family.other), key=lambda captured: captured.graph.rows)
    return prove_rows(small, large, names, family.batch)

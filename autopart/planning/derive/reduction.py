"""How the losses of micro-batches combine to the loss of the batch, derived from two captures, and from numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopart.batch.batch import Batch
from autopart.capture.capture import Captured
from autopart.capture.gc_pause import gc_paused
from autopart.ir.errors import RefusedError
from autopart.ir.graph import Graph, LossReduction, Size
from autopart.ir.shares import RowLayout
from autopart.passes.loss.analysis import steady_updates
from autopart.passes.loss.derive import UnprovenRows, derive_loss_weight, find_layouts
from autopart.planning.derive.family import Captures, ProgramFamily, another_size, mark_rows
from autopart.planning.derive.probe import prove_rows
from autopart.planning.derive.stated import refuted

WHOLE = LossReduction("any")
Layouts = Mapping[str, RowLayout | None]
"""How values hold the rows of a micro-batch; None for values without rows."""


@dataclass(frozen=True, slots=True)
class BatchRule:
    """How a kind of batch is cut.  reduction: how losses of parts combine; layouts: of the values that replicas cut;
    steady: buffers that a step updates once."""

    reduction: LossReduction
    layouts: Layouts = field(default_factory=dict)
    steady: frozenset[str] = frozenset()


def coupling_ops(graph: Graph, *, synced: bool = False) -> set[str]:
    """Return the ops for which micro-batches give other results than the whole batch: they take batch statistics, or
    write a buffer's new value.

    synced: whether batch norms use the statistics of all micro-batches.
    """
    norms = {op.name for op in graph.ops if "batch_norm" in op.target and ("training", True) in op.attrs}
    writers = {value: op for op in graph.ops for value in op.writes}
    updating = [writers[value] for _, value in graph.updates]
    if not synced:
        return norms | {op.name for op in updating}
    return {op.name for op in updating if op.reads} - norms


def family_of_batch(captures: Captures, batch: Batch, micro_rows: Sequence[int]) -> ProgramFamily:
    """Return the program at two sizes that tell how micro-batches of these rows combine for batches like `batch`.

    A Python value, a length or a dtype may choose another loss than in the batch that was planned for.  Both sizes have
    several rows, since on one row a model may run other operations.  Raises CaptureError, RefusedError.
    """
    base = Size(max(2, *micro_rows))
    other = another_size(base, [Size(batch.rows or 1)])  # the whole batch may take another branch
    return ProgramFamily(captures, batch, captures(batch, base), captures(batch, other))


def rule_of(
    family: ProgramFamily, reduction: LossReduction, crossing: Collection[str], drawn: Collection[str]
) -> BatchRule:
    """Return how batches are cut whose losses combine by `reduction`; the values as for `row_layouts`."""
    steady = steady_updates(family.base.graph, family.other.graph) if family.other is not None else frozenset[str]()
    return BatchRule(reduction, row_layouts(family, reduction, crossing, drawn), steady)


def loss_reduction(family: ProgramFamily, splits: Sequence[Sequence[int]], stated: str) -> LossReduction:
    """Return how the losses of micro-batches combine.  Several micro-batches need a rule that is proven exact.

    splits: the rows of the micro-batches, for each way to split the batch.  stated: what the user states about the
    loss, or "auto".  Raises RefusedError if the whole loss is not a combination of the losses of micro-batches.
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
            if unproven.stated is not None:
                return _confirmed(family, unproven, stated)
            found = _prove(family, unproven) - proven
            if not found:  # what is proven makes rules apply further on, which ask for more
                raise unproven.refusal from None
            proven |= found


def _confirmed(family: ProgramFamily, unproven: UnprovenRows, stated: str) -> LossReduction:
    """Return the first meaning of the user's statement about an opaque loss that numbers do not refute.

    Raises RefusedError if the statement is false.
    """
    meanings = unproven.stated or ()
    if family.on_meta and meanings:
        return meanings[-1]  # planning only: compile tries it, with values
    assert family.other is not None
    small, large = sorted((family.base, family.other), key=lambda captured: captured.graph.rows)
    if large.graph.rows % small.graph.rows:
        large = family.captured(replace(small.graph.size, rows=2 * small.graph.rows))
    why = "it reads no class numbers of the batch that could be counted"
    if _without_values(large):
        meanings, why = (), _WITHOUT_VALUES
    for meaning in meanings:
        why = refuted(small, large, meaning, family.batch)
        if not why:
            return meaning
    raise RefusedError(
        f'loss_reduction="{stated}" is stated, and numbers show that the loss does not combine like that',
        where=unproven.where,
        why=why,
        fix="use micro_batches=1; or compute the loss with torch's own operations, of which autopart knows how they "
        "combine: a custom backward has to scale the gradient that comes in, and may not divide by a number of rows",
    )


def row_layouts(
    family: ProgramFamily, reduction: LossReduction, crossing: Collection[str], drawn: Collection[str]
) -> Layouts:
    """Return how these values hold the rows of a micro-batch, None for values without rows (`find_layouts`).

    Raises RefusedError for a value that replicas cannot divide.
    """
    base, other = family.base, family.other
    if not crossing and not drawn:
        return {}
    if other is None:
        raise family.refusal or RefusedError(
            "a stage cannot have replicas: the model was captured at one size only", fix="use replicas=1"
        )
    graph = mark_rows(base.graph, other.graph)
    whole = frozenset(item.value for item in reduction.adjusted if item.reader is None)
    proven: frozenset[str] = frozenset()
    tried: frozenset[str] = frozenset()
    while True:
        try:
            return find_layouts(graph, other.graph, crossing, drawn, whole=whole, proven=proven)
        except UnprovenRows as unproven:
            if unproven.names <= tried:
                raise RefusedError(
                    "a stage cannot have replicas: its rows cannot be shown to be independent of each other",
                    where=unproven.where,
                    why=unproven.why,
                    fix="use replicas=1, or the same number of replicas for every stage",
                ) from None
            tried |= unproven.names
            proven |= _prove(family, unproven)


_WITHOUT_VALUES = "numbers would have to show it, and the model is on the meta device"


def _without_values(captured: Captured) -> bool:
    return any(tensor.is_meta for tensor in captured.tensors.values())


def _prove(family: ProgramFamily, unproven: UnprovenRows) -> frozenset[str]:
    """Return those of the values that numbers show to be slices of the whole batch's values."""
    assert family.other is not None
    if family.on_meta:
        return unproven.names  # planning only: compile checks again, with values
    small, large = sorted((family.base, family.other), key=lambda captured: captured.graph.rows)
    found = prove_rows(small, large, unproven.names, family.batch)
    if not found and _without_values(large):
        raise RefusedError(
            "it is not known whether the rows of a batch are independent of each other in this model",
            where=unproven.where,
            why=f"{unproven.why}; {_WITHOUT_VALUES}",
            fix="use micro_batches=1 and replicas=1, or check a small model of the same code, with values, by "
            "autopart.verify",
        )
    return found

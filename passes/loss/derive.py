"""How the losses of micro-batches combine to the loss of the whole batch, derived from the graph; or a refusal.

Every value gets a placement (`analysis`, `ops.placement`) from rules for single ops: from their letters in the table of
ops (`ops.propagation`), or from a rule for what moves elements, for loss functions (`rules`) and for counts (`masks`).
An op without a rule is reported, and may be tested on numbers (`planning.derive.probe`).

Assumed: random ops draw per micro-batch, and batch norm in training takes statistics per micro-batch, in the reference
too.  A number that changes with the rows is a power of the number of rows if it is one in both captures.  Sums of
floating point numbers may be reordered.  Micro-batches whose count is 0 (every label ignored) have an undefined loss
and must be left out when losses are combined.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from autopart.ir.errors import CaptureError, RefusedError, UsageError
from autopart.ir.graph import Adjusted, Graph, LossReduction, Op
from autopart.ir.shares import RowLayout
from autopart.passes.loss.analysis import CHANGED_BUFFER, DIVIDES_BY_NONE, Analysis, numbers_of_inputs
from autopart.passes.loss.rules import adds
from autopart.passes.ops.placement import (
    CONSTANT,
    COUPLED,
    INDEX,
    PARTIAL,
    REPLICATE,
    SHARD,
    TERMS,
    UNPROVEN,
    RowPlacement,
)
from autopart.passes.ops.table import op_name

_ONE = "use micro_batches=1, or write the loss as a mean or a sum over rows, or over tokens"
_STATE = (
    'say how the loss of the batch combines: loss_reduction="mean" or "sum" over rows, or "token-mean" over labels '
    "that are not ignored, which is then tried on numbers; or use micro_batches=1"
)
_FIXES = (
    (
        CHANGED_BUFFER,
        "use micro_batches=1; or read the buffer before forward() changes it, and change it after the step",
    ),
    (
        DIVIDES_BY_NONE,
        "use micro_batches=1; or multiply what is summed by the very mask whose sum divides it (the loss that balances "
        "the routes of a mixture of experts is a product of two means over all tokens: leave it out of the loss)",
    ),
)
"""(part of a reason, advice for it)."""
_OTHERWISE = (
    "use micro_batches=1; or compute it with operations that autopart knows (for an op of your own: "
    "autopart.register_op)"
)


@dataclass(eq=False)
class UnprovenRows(Exception):
    """Raised if the rules cannot tell whether some values keep the rows of the batch apart.

    names: values to test numerically, and lifted constants to compare between the captures; those that pass go into
    `proven` of the next call.  where: the first op without a rule.  stateable: whether rows stay apart up to the loss
    function, so that loss_reduction= helps.  stated: what the user's loss_reduction= may mean, of which the first that
    numbers confirm is right; None where it is not set.
    """

    names: frozenset[str]
    where: str
    why: str
    stateable: bool = False
    stated: tuple[LossReduction, ...] | None = None

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"

    @property
    def refusal(self) -> RefusedError:
        """The error to raise if the numeric test fails."""
        return RefusedError(
            "the rows of the batch cannot be shown to be independent of each other",
            where=self.where,
            why=self.why,
            fix=_STATE if self.stateable else _OTHERWISE,
        )


def derive_loss_weight(
    graph: Graph, other: Graph, *, proven: frozenset[str] = frozenset(), stated: str | None = None
) -> LossReduction:
    """The weight of a micro-batch's loss in the whole loss.

    graph: with rows marked (`derive.family.mark_rows`); other: the same model at another number of rows.  proven:
    values that a numeric test showed to be slices of those of the whole batch, and constants equal in both captures.
    stated: loss_reduction= of the user, "mean", "sum" or "token-mean": it must agree with what is derived, and is
    tested on numbers if no rule knows the loss function (`UnprovenRows.stated`).

    Raises RefusedError, CaptureError, UsageError (contradiction) and UnprovenRows.  O(ops).
    """
    try:
        return _derived(Analysis(graph, other), proven, stated)
    except RefusedError as refusal:
        numbers = numbers_of_inputs(graph)
        if not numbers:
            raise
        try:  # with these as they are for the whole batch
            return _derived(Analysis(graph, other, numbers), proven, stated)
        except RefusedError:
            raise refusal from None


def _derived(analysis: Analysis, proven: frozenset[str], stated: str | None) -> LossReduction:
    graph = analysis.graph
    constants = frozenset(p.name for p in graph.params if p.kind == "constant")
    loss = graph.outputs[0]
    best = analysis(constants.union(v.name for v in graph.values))[loss]
    if best.tag == COUPLED:  # whatever a test may show
        raise _refusal(graph, best.op, best.why)
    strictly = analysis(proven)
    placements = analysis(proven | constants)
    found, strict = placements[loss], strictly[loss]
    if found.tag == UNPROVEN:
        axes, sources = {v.name: v.rows_axis for v in graph.values}, _unproven_sources(graph, placements, loss)
        names = frozenset(n for n in sources if axes.get(n) is not None and not placements[n].gated)  # to be tested
        opaque = not names and not analysis.of_batch
        raise UnprovenRows(
            names | _open_constants(graph, strictly),
            _where_of(graph, found.op),
            found.why,
            stateable=not names,
            stated=_meanings(graph, placements, found.op, stated) if opaque and stated is not None else None,
        )
    if found.tag == COUPLED:
        raise _refusal(graph, found.op, found.why)
    if found.tag not in (REPLICATE, PARTIAL, TERMS):
        raise CaptureError(
            "the loss is one number per row, not one number", where=_where_of(graph, graph.writer()[loss])
        )
    if strict.tag == UNPROVEN:
        raise UnprovenRows(_open_constants(graph, strictly), _where_of(graph, strict.op), strict.why)
    if found.tag == TERMS:
        reduction = LossReduction("sum", adjusted=_terms(graph, placements, loss, stated))
    else:
        reduction = agree(_weight(graph, found, graph.writer()[loss]), None if analysis.of_batch else stated)
    reduction = replace(reduction, adjusted=(*reduction.adjusted, *_given_whole(analysis, loss)))
    _require_of_the_batch_alone(analysis, reduction)
    return reduction


def _meanings(graph: Graph, placements: Mapping[str, RowPlacement], op: str, stated: str) -> tuple[LossReduction, ...]:
    """What loss_reduction= may mean for an op without a rule.  A mean may be over labels that are not ignored: over
    class numbers that the op reads, without -100 or a number among its arguments.  That meaning comes first: if nothing
    is ignored it is the mean over rows too."""
    if stated == "sum":
        return (LossReduction("sum"),)
    loss_op = graph.op_map()[op]
    numbers = [value for _, value in loss_op.attrs if type(value) is int and value != -100]
    ignored = [*sorted(number for number in numbers if number < 0), -100, *(n for n in numbers if n >= 0)]
    values = graph.value_map()
    labels = [
        name
        for name in loss_op.reads
        if values[name].dtype.startswith("int")
        and placements[name].tag == SHARD
        and placements[name].plain
        and not count_problem(graph, LossReduction("tokens", name))
    ]
    counts = tuple(LossReduction("tokens", name, ignore) for name in labels for ignore in dict.fromkeys(ignored))
    return counts if stated == "token-mean" else (*counts, LossReduction("rows"))


def _weight(graph: Graph, found: RowPlacement, op: str) -> LossReduction:
    """The reduction of a value.  op: where it is used, for the refusal."""
    if found.tag == REPLICATE and found.plain:
        return LossReduction("any")
    if found.tag == PARTIAL and found.plain:
        return LossReduction("sum")
    if found.tag == PARTIAL and found.factor == (-1, None):
        return LossReduction("rows")
    if found.tag != PARTIAL or found.count is None or found.scale:
        raise _refusal(graph, op, "the loss depends on how many rows the batch has, not as a mean or a sum does")
    reason = count_problem(graph, found.count)
    if reason:
        raise _refusal(graph, op, reason)
    return found.count


def _terms(graph: Graph, placements: Mapping[str, RowPlacement], loss: str, stated: str | None) -> tuple[Adjusted, ...]:
    """The terms of the loss, which is TERMS, with the reduction of each where it is added: each is weighed by its own
    share there, and the sums of the micro-batches add up.

    Refused where weighing the terms would change another value.  O(ops).
    """
    found, sums = dict[tuple[str, str], None](), {loss}  # (op that adds, value or parameter that it adds)
    for op in reversed(graph.ops):
        if sums.isdisjoint(op.writes):
            continue
        numbers = [value for key, value in op.attrs if key in ("self", "other") and isinstance(value, (int, float))]
        if adds(op) and any(numbers):
            raise _refusal(graph, op.name, "it adds a term that does not depend on the batch to a sum over the batch")
        for operand in (*op.reads, *op.params):
            if placements.get(operand, CONSTANT).tag == TERMS:
                sums.add(operand)
            elif adds(op):
                found[op.name, operand] = None
    for op in graph.ops:
        if not sums.isdisjoint(op.reads):
            sums.update(op.writes)
    for buffer, value in graph.updates:
        if value in sums:
            why = f"buffer {buffer} keeps a sum of terms with different reductions"
            raise _refusal(graph, graph.writer()[value], why)
    return tuple(
        Adjusted(value, agree(_weight(graph, placements.get(value, CONSTANT), op), stated), op) for op, value in found
    )


def _given_whole(analysis: Analysis, loss: str) -> tuple[Adjusted, ...]:
    """The numbers of the whole batch that the loss needs."""
    needed, found = {loss}, list[Adjusted]()
    for op in reversed(analysis.graph.ops):
        for name in op.writes:
            if name in needed and name in analysis.of_batch:
                found.append(Adjusted(name, _weight(analysis.graph, analysis.of_batch[name], op.name)))
            elif name in needed:
                needed.update(op.reads)
    return tuple(found)


def _require_of_the_batch_alone(analysis: Analysis, reduction: LossReduction) -> None:
    """Refuse a number of the whole batch that depends on another one: before the step each is counted from the inputs
    of the micro-batches alone.  O(ops)."""
    after, whole = set[str](), set(analysis.of_batch)
    for op in analysis.graph.ops:
        if whole.intersection(op.reads) or after.intersection(op.reads):
            after.update(op.writes)
    for name in reduction.counted():
        if name in after:
            why = f"the number {name}, of the whole batch, depends on another such number"
            raise _refusal(analysis.graph, analysis.graph.writer()[name], why)


def agree(weight: LossReduction, stated: str | None) -> LossReduction:
    """Return `weight`.  Raises UsageError if the user states another reduction."""
    derived = {"sum": "sum", "rows": "mean", "tokens": "token-mean"}.get(weight.kind)
    wrong = stated is not None and derived is not None and stated != derived
    if wrong and not (stated == "mean" and derived == "token-mean"):
        raise UsageError(
            f'loss_reduction="{stated}" is stated, but the loss is a {derived}',
            why="micro-batches combined as stated would not give the loss of the whole batch",
            fix=f'leave loss_reduction out, or say "{derived}"',
        )
    return weight


def count_problem(graph: Graph, count: LossReduction) -> str:
    """Why a count is not known before the step, from the batch alone; "" if it is."""
    params, updated = graph.param_map(), {buffer for buffer, _ in graph.updates}
    classes = params.get(count.classes or "")
    if classes is not None and (classes.trainable or classes.name in updated):
        return f"the class weights {classes.name} that it divides by change in the step"
    needed = set(count.counted())
    for op in reversed(graph.ops):
        if needed.isdisjoint(op.writes):
            continue
        if op.random:
            return f"the count {count.value} that it divides by is random ({op.target})"
        if any(params[p].trainable or p in updated for p in op.params):
            return f"the count {count.value} that it divides by depends on parameters or changing buffers"
        needed.update(op.reads)
    return ""


def _open_constants(graph: Graph, placements: dict[str, RowPlacement]) -> frozenset[str]:
    """Lifted constants that the loss depends on and that are not known to be equal in both captures."""
    found = _unproven_sources(graph, placements, graph.outputs[0])
    return found & {p.name for p in graph.params}


def _unproven_sources(graph: Graph, placements: dict[str, RowPlacement], loss: str) -> frozenset[str]:
    """Unproven values and constants that the loss depends on through unproven ones only.  O(reads)."""
    unproven = {name for name, placement in placements.items() if placement.tag == UNPROVEN}
    found = unproven & {loss}
    for op in reversed(graph.ops):
        if not found.isdisjoint(op.writes):
            found |= unproven.intersection((*op.reads, *op.params))
    return frozenset(found)


def _refusal(graph: Graph, op: str, why: str) -> RefusedError:
    fix = next((fix for said, fix in _FIXES if said in why), _ONE)
    return RefusedError(
        "the loss of the whole batch is not a combination of the losses of micro-batches",
        where=_where_of(graph, op),
        why=why,
        fix=fix,
    )


def _where_of(graph: Graph, name: str) -> str:
    """An op in words: its name, module and line of the user's code; without a line that of an op which it reads, or of
    the next op with one."""
    ops, writer = graph.op_map(), graph.writer()
    op: Op | None = ops.get(name)
    if op is None:
        return name
    while not op.where and not op.module and op.reads and op.reads[0] in writer:  # autopart's own op
        op = ops[writer[op.reads[0]]]
    behind = graph.ops[graph.ops.index(op) :] if not op.where else ()
    line = f"at {op.where}" if op.where else next((f"before {other.where}" for other in behind if other.where), "")
    parts: Iterable[str] = (op_name(op.target), f"in module {op.module}" if op.module else "", line)
    return " ".join(part for part in parts if part)


_UNDIVIDED = {
    INDEX: "it holds row numbers, counted from the first row of a replica",
    UNPROVEN: "no rule says how it holds the rows, and a numeric test did not show it either",
}


def find_layouts(
    graph: Graph,
    other: Graph,
    crossing: Collection[str],
    drawn: Collection[str],
    *,
    whole: frozenset[str] = frozenset(),
    proven: frozenset[str] = frozenset(),
) -> dict[str, RowLayout | None]:
    """How these values hold the rows of a micro-batch, so that replicas can cut and join them; None for no rows.

    A value that passes between stages with different numbers of replicas must hold its rows apart (each goes to the
    replica with that row), or be the same on every replica.  A sum or mean over the rows of a replica is neither.
    graph, other, proven: as for `derive_loss_weight`.  crossing: values between stages with different numbers of
    replicas.  drawn: values that random ops of a stage with replicas read and write.  whole: numbers of the whole batch
    that every micro-batch gets.  Raises RefusedError for a value that cannot be divided, and UnprovenRows.  O(ops).
    """
    placements = Analysis(graph, other, whole)(proven)
    axes = {value.name: value.rows_axis for value in graph.values}
    asked = [*crossing, *(name for name in drawn if axes.get(name) is not None)]
    unproven = [name for name in asked if placements[name].tag == UNPROVEN]
    sources = frozenset[str]().union(*(_unproven_sources(graph, placements, name) for name in unproven)) - proven
    if sources:
        first = unproven[0]
        raise UnprovenRows(sources, _where_of(graph, graph.writer().get(first, first)), placements[first].why)
    found: dict[str, RowLayout | None] = dict.fromkeys(drawn)
    for name in asked:
        found[name] = _layout(graph, name, placements[name], crosses=name in crossing)
    return found


def _layout(graph: Graph, name: str, placement: RowPlacement, *, crosses: bool) -> RowLayout | None:
    if placement.tag == SHARD and (placement.plain or not crosses):
        return RowLayout(placement.axis, max(1, placement.stride_factor))
    if placement.tag == REPLICATE and placement.plain:
        return None
    refusal = RefusedError(
        f"value {name} cannot be divided between replicas",
        where=_where_of(graph, graph.writer().get(name, name)),
        why=_UNDIVIDED.get(placement.tag, "")
        or placement.why
        or "it is a sum or a mean over the rows that a replica has, and another stage has other replicas",
        fix="use replicas=1, the same number of replicas for every stage, or other cuts",
    )
    refusal.value = name
    raise refusal


def without_weight(graph: Graph, dropped: frozenset[tuple[str, str]]) -> frozenset[str]:
    """The values that do not reach the loss without these reads, (op, value).  O(reads)."""
    reached = {graph.outputs[0]}
    for op in reversed(graph.ops):
        if not reached.isdisjoint(op.writes):
            reached.update(read for read in op.reads if (op.name, read) not in dropped)
    return frozenset(value.name for value in graph.values) - reached

"""How the losses of micro-batches combine to the loss of the whole batch, derived from the graph; or a refusal.

A dataflow analysis: every value gets a kind (`kinds`), op by op in topological order, from rules about single ops
(`loss_views`: what moves elements; `loss_math`, `loss_products`: what computes; `loss_terms`: loss functions).  Two
captures of the model at different numbers of rows are read side by side, so that every shape and every number in the
program that depends on the batch size is seen; each derived kind is checked against both shapes.

What it relies on.  Random ops draw per micro-batch: the reference with dropout is the same program on the same
micro-batches.  Batch norm in training mode: the reference is the plain model on the same micro-batches.  A number that
changes with the rows is taken for a power of the number of rows when it is one in both captures.  Sums of floating
point numbers may be reordered.  Micro-batches whose count is 0 (every label ignored) have an undefined loss and carry
no weight: whoever combines must leave them out.

Where the rules do not know an op they say so, and a numeric test (`capture.probe`) may settle it; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autopart.ir.errors import CoupledLossError, LossError, UsageError
from autopart.ir.gc_pause import gc_paused
from autopart.ir.graph import Graph, LossReduction, Op, Value
from autopart.passes.loss.context import OpContext, fits
from autopart.passes.loss.masks import Masks
from autopart.passes.loss.math_rules import MATH_RULES, is_statistic, reduce_other
from autopart.passes.loss.placement import (
    CONSTANT,
    COUPLED,
    PARTIAL,
    REPLICATE,
    SHARD,
    UNPROVEN,
    Count,
    Placement,
    RuleExit,
)
from autopart.passes.loss.product_rules import PRODUCT_RULES
from autopart.passes.loss.term_rules import TERM_RULES
from autopart.passes.loss.view_rules import VIEW_RULES, broadcast_tensors, is_zero
from autopart.passes.ops.row import CREATION, POINTWISE, REDUCTION
from autopart.passes.ops.table import FAMILY, family, op_name

RULES = {**MATH_RULES, **PRODUCT_RULES, **TERM_RULES, **VIEW_RULES, "broadcast_tensors": broadcast_tensors}
_SIZES = {"size", "shape", "repeats", "end", "start", "length", "split_size", "split_sizes", "sizes", "dims"}
"""Arguments that are sizes: where they change with the rows, so does a shape, and shapes are checked."""
_ONE = "use micro_batches=1, or write the loss as a mean or a sum over rows, or over tokens"


class UnprovenRows(Exception):
    """The rules cannot tell whether some values keep the rows of the batch apart.

    names: values to test numerically (and lifted constants to compare between the captures); values that pass go into
    `proven` of the next `weigh`.  where: the first op that no rule knows.  refusal: what to raise when the test fails.
    """

    def __init__(self, names: frozenset[str], where: str, why: str) -> None:
        self.names, self.where, self.why = names, where, why
        super().__init__(f"{where}: {why}")

    @property
    def refusal(self) -> CoupledLossError:
        """The error for the user when the numeric test does not settle it."""
        return CoupledLossError(
            "the rows of the batch cannot be shown to be independent of each other",
            where=self.where,
            why=self.why,
            fix='use micro_batches=1; if only the loss function is opaque, state loss_reduction="mean" or "sum"',
        )


@gc_paused()
def derive_loss_weight(
    graph: Graph, other: Graph, *, proven: frozenset[str] = frozenset(), stated: str | None = None
) -> LossReduction:
    """The weight of a micro-batch's loss in the whole loss.

    graph: with rows marked (`capture.rows.mark_rows`); other: the same model at another number of rows.  proven: values
    that a numeric test showed to be slices of the whole batch's, and constants equal in both captures.  stated: what
    the user says about the loss, "mean", "sum" or "token-mean": believed where the loss function is opaque, else it
    must agree.

    Raises CoupledLossError, LossError, UsageError (contradiction) and UnprovenRows.  O(ops).
    """
    constants = frozenset(p.name for p in graph.params if p.kind == "constant")
    loss = graph.outputs[0]
    analysis = Analysis(graph, other)
    best = analysis(constants.union(v.name for v in graph.values))[loss]
    if best.tag == COUPLED:  # whatever a test may show
        raise _refusal(graph, best.op, best.why)
    kinds = analysis(proven | constants)
    kind = kinds[loss]
    if kind.tag == UNPROVEN:
        names = _to_test(graph, kinds, loss)
        if not names and stated in _STATED:
            return _STATED[stated]
        raise UnprovenRows(names | _open_constants(graph, analysis(proven)), _where(graph, kind.op), kind.why)
    if kind.tag == COUPLED:
        raise _refusal(graph, kind.op, kind.why)
    if kind.tag not in (REPLICATE, PARTIAL):
        raise LossError("the loss is one number per row, not one number", where=_where(graph, graph.writer()[loss]))
    strictly = analysis(proven)
    strict = strictly[loss]
    if strict.tag == UNPROVEN:
        raise UnprovenRows(_open_constants(graph, strictly), _where(graph, strict.op), strict.why)
    return agree(_weight(graph, kind, loss), stated)


_STATED = {"mean": LossReduction("rows"), "sum": LossReduction("sum")}


def _weight(graph: Graph, kind: Placement, loss: str) -> LossReduction:
    writer = graph.writer()[loss]
    if kind.tag == REPLICATE and kind.plain:
        return LossReduction("any")
    if kind.tag == PARTIAL and kind.plain:
        return LossReduction("sum")
    if kind.tag == PARTIAL and kind.count is None and kind.scale == -1:
        return LossReduction("rows")
    if kind.tag != PARTIAL or kind.count is None or kind.scale:
        raise _refusal(graph, writer, "the loss depends on how many rows the batch has, not as a mean or a sum does")
    reason = count_problem(graph, kind.count)
    if reason:
        raise _refusal(graph, writer, reason)
    return LossReduction("tokens", kind.count.value, kind.count.ignore)


def agree(weight: LossReduction, stated: str | None) -> LossReduction:
    """`weight`, unless the user states otherwise: a sum is no mean, and a mean over rows is none over tokens."""
    derived = {"sum": "sum", "rows": "mean", "tokens": "token-mean"}.get(weight.kind)
    wrong = stated is not None and derived is not None and stated != derived
    if wrong and not (stated == "mean" and derived == "token-mean"):
        raise UsageError(
            f'loss_reduction="{stated}" is stated, but the loss is a {derived}',
            why="micro-batches combined as stated would not give the loss of the whole batch",
            fix=f'leave loss_reduction out, or say "{derived}"',
        )
    return weight


def count_problem(graph: Graph, count: Count) -> str:
    """Why a count cannot be taken before the step, from the batch alone; "" when it can."""
    ops, params = {w: op for op in graph.ops for w in op.writes}, graph.param_map()
    updated = {buffer for buffer, _ in graph.updates}
    queue, seen = [count.value], set[str]()
    while queue:
        op = ops.get(queue.pop())
        if op is None or op.name in seen:
            continue
        seen.add(op.name)
        if op.random:
            return f"the count {count.value} that it divides by is random ({op.target})"
        if any(params[p].trainable or p in updated for p in op.params):
            return f"the count {count.value} that it divides by depends on parameters or changing buffers"
        queue.extend(op.reads)
    return ""


def analyse(graph: Graph, other: Graph, proven: frozenset[str] = frozenset()) -> dict[str, Placement]:
    """The kind of every value.  O(ops)."""
    return Analysis(graph, other)(proven)


class Analysis:
    """`analyse` of one model under several sets of what is proven: an op is looked at again only where the kinds of its
    operands are others than the last time."""

    def __init__(self, graph: Graph, other: Graph) -> None:
        """O(ops)."""
        self.graph, self.other = graph, other
        self._values, self._twins, self._params = graph.value_map(), other.value_map(), graph.param_map()
        self._masks = Masks()
        for op in graph.ops:
            self._masks.see(op, self._values)
        self._given: dict[str, Placement] = {}
        for name in graph.inputs:
            axis = self._values[name].rows_axis
            self._given[name] = CONSTANT if axis is None else Placement(SHARD, axis=axis, outer=1)
        for param in graph.params:
            if param.kind == "constant" and param.size_bytes:
                why = "a constant may hold a number that depends on the batch size"
                self._given[param.name] = Placement(UNPROVEN, why=why)
        for buffer, _ in graph.updates:
            why = f"it reads buffer {buffer}, which every micro-batch changes for the next"
            self._given[buffer] = Placement(COUPLED, why=why)
        self._constants = {p.name for p in graph.params if p.kind == "constant"} - {b for b, _ in graph.updates}
        self._last: list[tuple[list[Placement], list[Placement]]] = [([], [])] * len(graph.ops)

    def __call__(self, proven: frozenset[str]) -> dict[str, Placement]:
        """The kind of every value.  proven: see `weigh`."""
        settled = self._constants & proven
        kinds = {name: kind for name, kind in self._given.items() if name not in settled}
        for place, (op, twin) in enumerate(zip(self.graph.ops, self.other.ops, strict=True)):
            site = OpContext(op, twin, self.graph.rows, self.other.rows, self._values, self._twins, self._params, kinds)
            found = _masked_mean(site, self._masks) or self._kinds_of(place, site)
            for written, kind in zip(op.writes, found, strict=True):
                kinds[written] = _settled(site, written, kind, proven)
        return kinds

    def _kinds_of(self, place: int, site: OpContext) -> list[Placement]:
        operands = [site.kinds.get(name, CONSTANT) for name in site.op.reads + site.op.params]
        before, found = self._last[place]
        if not found or before != operands:
            found = _kinds_of(site)
            self._last[place] = operands, found
        return found


def _settled(site: OpContext, name: str, kind: Placement, proven: frozenset[str]) -> Placement:
    value, twin = site.values[name], site.twins[name]
    if kind.tag not in (UNPROVEN, COUPLED) and not fits(kind, value, twin, site.rows, site.twin_rows):
        kind = Placement(UNPROVEN, why="its shape does not follow the rule for this op")
    if kind.tag == UNPROVEN and not kind.gated and name in proven and value.rows_axis is not None:
        return Placement(SHARD, axis=value.rows_axis, outer=1)
    if kind.tag not in (UNPROVEN, COUPLED):
        return kind
    return replace(kind, op=kind.op or site.op.name, gated=kind.gated or value.dtype == "bool")


def _masked_mean(site: OpContext, masks: Masks) -> list[Placement] | None:
    """x / count.clamp(min=1) where x vanishes when the count does (`masks`), else None."""
    above, below = site.arg("self"), site.arg("other")
    if site.name != "div" or site.arg("rounding_mode") is not None:
        return None
    if not isinstance(above, str) or not isinstance(below, str):
        return None
    kind, count = site.kind(above), masks.count_behind(above[1:], below[1:])
    if (
        count is None
        or kind.tag not in (PARTIAL, SHARD)
        or not kind.plain
        or site.kinds[count] != Placement(PARTIAL, witness=site.kinds[count].witness)
    ):
        return None
    return [Placement(kind.tag, 0, Count(count), kind.axis, kind.outer)]


def _kinds_of(site: OpContext) -> list[Placement]:
    """Kinds of the results of one op."""
    count = len(site.op.writes)
    operands = [site.kind(ref) for ref in site.tensors() if not is_statistic(site, ref)]
    created = FAMILY.get(site.name) == CREATION
    if not created:
        worst = [k for tag in (COUPLED, UNPROVEN) for k in operands if k.tag == tag]
        if worst:
            return [replace(worst[0], gated=any(k.gated for k in worst))] * count
    if any(_growing_axes(site.values[w], site.twins[w]) > 1 for w in site.op.writes):
        return [Placement(COUPLED, why="it combines every row of the batch with every other")] * count
    try:
        found = _apply(site, operands)
    except RuleExit as verdict:
        found = verdict.kind
    return found if isinstance(found, list) else [found] * count


def _apply(site: OpContext, operands: list[Placement]) -> Placement | list[Placement]:
    changing = {key for key, _ in site.op.attrs if site.differs(key)}
    fixed = all(k.tag == REPLICATE and k.plain for k in operands)
    if fixed and not changing and all(site.values[w].rows_axis is None for w in site.op.writes):
        return Placement(REPLICATE, zero=is_zero(site))
    rule = RULES.get(site.name)
    if site.name in ("max", "min") and family(site.op.target) == REDUCTION:
        rule = reduce_other
    numeric = FAMILY.get(site.name) in (POINTWISE, CREATION)
    if rule is not None and (numeric or changing <= _SIZES):
        return rule(site)
    if rule is not None:
        return Placement(COUPLED, why=f"its argument {min(changing - _SIZES)} changes with the size of the batch")
    return Placement(UNPROVEN, why="no rule says how it treats the rows of the batch")


def _growing_axes(value: Value, twin: Value) -> int:
    return sum(a != b for a, b in zip(value.shape, twin.shape, strict=True))


def _open_constants(graph: Graph, kinds: dict[str, Placement]) -> frozenset[str]:
    """Lifted constants that matter to the loss and are not known to be equal in both captures."""
    found = _unproven_sources(graph, kinds, graph.outputs[0])
    return found & {p.name for p in graph.params}


def _to_test(graph: Graph, kinds: dict[str, Placement], loss: str) -> frozenset[str]:
    """Unproven values along the rows that the loss depends on through unproven values only."""
    axes = {v.name: v.rows_axis for v in graph.values}
    found = _unproven_sources(graph, kinds, loss)
    return frozenset(name for name in found if axes.get(name) is not None and not kinds[name].gated)


def _unproven_sources(graph: Graph, kinds: dict[str, Placement], loss: str) -> frozenset[str]:
    """Unproven values and constants that the loss depends on through unproven ones only.  O(reads)."""
    ops = {w: op for op in graph.ops for w in op.writes}
    queue, seen = [loss], set[str]()
    while queue:
        name = queue.pop()
        if name in seen or kinds.get(name, CONSTANT).tag != UNPROVEN:
            continue
        seen.add(name)
        op = ops.get(name)
        if op is not None:
            queue.extend((*op.reads, *op.params))
    return frozenset(seen)


def _refusal(graph: Graph, op: str, why: str) -> CoupledLossError:
    return CoupledLossError(
        "the loss of the whole batch is no combination of the losses of micro-batches",
        where=_where(graph, op),
        why=why,
        fix=_ONE,
    )


def _where(graph: Graph, name: str) -> str:
    op: Op | None = graph.op_map().get(name)
    if op is None:
        return name
    parts: Iterable[str] = (
        op_name(op.target),
        f"in module {op.module}" if op.module else "",
        f"at {op.where}" if op.where else "",
    )
    return " ".join(part for part in parts if part)


__all__ = ["UnprovenRows", "agree", "analyse", "count_problem", "derive_loss_weight"]

"""The placement of every value: a dataflow analysis, op by op in topological order.

Two captures of the model at different numbers of rows are read side by side, so that every shape and every number in
the program that depends on the batch size is seen; each derived placement is checked against both shapes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

from autopart.ir.graph import Graph, LossReduction, Value, alike
from autopart.passes.loss.masks import Masks
from autopart.passes.loss.rules import NO_RULE, RULES, averaged, create, is_zero, of_terms
from autopart.passes.ops.context import OpContext
from autopart.passes.ops.placement import (
    CONSTANT,
    COUPLED,
    PARTIAL,
    REPLICATE,
    SHARD,
    TERMS,
    UNPROVEN,
    RowPlacement,
    RuleExit,
)
from autopart.passes.ops.propagation import Rule, by_letters, cast
from autopart.passes.ops.row import CREATION, POINTWISE
from autopart.passes.ops.table import op_name

_LIMITS = frozenset(
    ["clamp", "clamp_min", "clamp_max", "clip", "minimum", "maximum", "min", "max", "fmin", "fmax", "sign", "relu"]
)
_COUNTS = ("histc", "bincount")
_SIZES = {"size", "shape", "repeats", "end", "start", "length", "split_size", "split_sizes", "sizes", "dims"}
"""Arguments that are sizes: if they change with the rows, so does a shape, and shapes are checked."""

CHANGED_BUFFER = "which every micro-batch changes for the next"
DIVIDES_BY_NONE = "its numerator need not be 0 in a micro-batch where it divides by 0"


class Analysis:
    """The analysis of one model under several sets of proven values: a rule is applied again only if the placements of
    the operands changed.

    of_batch: numbers of the whole batch that every micro-batch gets as constants, with the placements that they would
    have otherwise; of the last call.
    """

    def __init__(self, graph: Graph, other: Graph, given: frozenset[str] = frozenset()) -> None:
        """given: values to put into `of_batch` if they are a sum or a mean over the rows.  O(ops)."""
        self.graph = graph
        self.of_batch: dict[str, RowPlacement] = {}
        self._given_whole = given
        values, others, params = graph.value_map(), other.value_map(), graph.param_map()
        pairs, sizes = zip(graph.ops, other.ops, strict=True), (graph.rows, other.rows)
        self._contexts = [OpContext(*pair, *sizes, values, others, params) for pair in pairs]
        self._masks = Masks()
        counted = [set(op.reads) for op in graph.ops if op_name(op.target) in _COUNTS]
        other_reads = {name for op in graph.ops if op_name(op.target) not in _COUNTS for name in op.reads}
        self._only_counted = frozenset(set().union(*counted) - other_reads)
        self._countable = of_inputs_alone(graph)
        for op in graph.ops:
            self._masks.see(op, values)
        self._given: dict[str, RowPlacement] = {}
        for name in graph.inputs:
            axis = values[name].rows_axis
            self._given[name] = CONSTANT if axis is None else RowPlacement(SHARD, axis=axis, stride_factor=1)
        for param in graph.params:
            if param.kind == "constant" and param.size_bytes:
                why = "a constant may hold a number that depends on the batch size"
                self._given[param.name] = RowPlacement(UNPROVEN, why=why)
        steady = steady_updates(graph, other)
        for buffer in (buffer for buffer, _ in graph.updates if buffer not in steady):
            why = f"it reads buffer {buffer}, {CHANGED_BUFFER}"
            self._given[buffer] = RowPlacement(COUPLED, why=why)
        self._constants = {p.name for p in graph.params if p.kind == "constant"} - {b for b, _ in graph.updates}
        self._last: list[tuple[list[RowPlacement], list[RowPlacement]]] = [([], [])] * len(graph.ops)

    def __call__(self, proven: frozenset[str]) -> dict[str, RowPlacement]:
        """The placement of every value.  proven: see `derive_loss_weight`."""
        self.of_batch.clear()
        equal = self._constants & proven
        placements = {name: placement for name, placement in self._given.items() if name not in equal}
        for number, context in enumerate(self._contexts):
            context.placements = placements
            found = _masked_mean(context, self._masks) or self._placements_of(number, context)
            found = [self._counted(context, placement) for placement in found]
            if any(placement.tag == UNPROVEN for placement in found) and self._is_beyond_numbers(context):
                found = [replace(placement, gated=True) for placement in found]
            for written, placement in zip(context.op.writes, found, strict=True):
                settled = _settled(context, written, placement, proven)
                if written in self._given_whole and settled.tag == PARTIAL:
                    self.of_batch[written] = settled
                    settled = CONSTANT
                placements[written] = settled
        return placements

    def _is_beyond_numbers(self, context: OpContext) -> bool:
        """Return whether a numeric test may miss what an op does, of which no rule says that rows stay apart: a limit
        of places and counts of rows, these as floating point numbers, and a sum that grows with the rows."""
        unproven = [ref for ref in context.tensors() if context.placement(ref).tag == UNPROVEN]
        if context.name == "cumsum":
            return not unproven and "int" not in context.out.dtype
        if context.row.family != POINTWISE or not any("int" in context.dtype(ref) for ref in unproven):
            return False
        limited = context.name in _LIMITS or (context.name == "remainder" and not context.differs("other"))
        return limited or ("int" not in context.out.dtype and not self._only_counted.issuperset(context.op.writes))

    def _counted(self, context: OpContext, placement: RowPlacement) -> RowPlacement:
        """Check x / count: where the count of a micro-batch is 0, x has to be 0 too."""
        above, below = context.ref("self"), context.ref("other")
        if placement.count is None or above is None or below is None:
            return placement
        if context.argument("other").tag != PARTIAL or below not in self._countable:
            return placement
        if self._masks.empty_with(above, below) or self._masks.count_behind(above, below):
            return placement
        return RowPlacement(COUPLED, why=DIVIDES_BY_NONE)

    def _placements_of(self, number: int, context: OpContext) -> list[RowPlacement]:
        operands = [context.placements.get(name, CONSTANT) for name in context.op.reads + context.op.params]
        before, found = self._last[number]
        if not found or before != operands:
            found = _placements_of(context)
            self._last[number] = operands, found
        return found


def _settled(context: OpContext, name: str, placement: RowPlacement, proven: frozenset[str]) -> RowPlacement:
    value = context.values[name]
    known = placement.tag not in (UNPROVEN, COUPLED)
    if known and _fits(placement, value, context.other_values[name], context.rows, context.other_rows):
        return placement
    if known:
        placement = RowPlacement(UNPROVEN, why="its shape does not follow the rule for this op")
    if placement.tag == UNPROVEN and not placement.gated and name in proven and value.rows_axis is not None:
        return RowPlacement(SHARD, axis=value.rows_axis, stride_factor=1)
    return replace(placement, op=placement.op or context.op.name, gated=placement.gated or value.dtype == "bool")


def _fits(placement: RowPlacement, value: Value, other: Value, rows: int, other_rows: int) -> bool:
    """Whether a placement agrees with the shapes of both captures: a cross-check of every rule."""
    if placement.has_rows:
        if value.rows_axis != placement.axis:
            return False
        stride = max(1, placement.stride_factor)
        block = Fraction(value.shape[placement.axis], rows * stride)
        return block == Fraction(other.shape[placement.axis], other_rows * stride) and block.denominator == 1
    return value.shape == other.shape


def _masked_mean(context: OpContext, masks: Masks) -> list[RowPlacement] | None:
    """The placement of x / count.clamp(min=1) if x is 0 where the count is 0 (`masks`), else None."""
    above, below = context.ref("self"), context.ref("other")
    if context.name != "div" or context.arg("rounding_mode") is not None or above is None or below is None:
        return None
    placement, count = context.argument("self"), masks.count_behind(above, below)
    if count is None or placement.tag not in (PARTIAL, SHARD) or not placement.plain:
        return None
    counted = context.placements[count]
    if counted != RowPlacement(PARTIAL, witness=counted.witness):
        return None
    return [RowPlacement(placement.tag, 0, LossReduction("tokens", count), placement.axis, placement.stride_factor)]


def _placements_of(context: OpContext) -> list[RowPlacement]:
    """The placements of the results of one op."""
    count = len(context.op.writes)
    if context.name == "mul" and 0 in (context.arg("self"), context.arg("other")) and not context.out.shape:
        return [RowPlacement(REPLICATE, zero=True)]  # a term of the loss that is switched off
    operands = [context.placement(ref) for ref in context.tensors()]
    if context.row.family != CREATION:
        worst = [p for tag in (COUPLED, UNPROVEN) for p in operands if p.tag == tag]
        if worst:
            return [replace(worst[0], gated=any(p.gated for p in worst))] * count
    shapes = ((context.values[name].shape, context.other_values[name].shape) for name in context.op.writes)
    if any(sum(a != b for a, b in zip(*pair, strict=True)) > 1 for pair in shapes):
        return [RowPlacement(COUPLED, why="it combines every row of the batch with every other")] * count
    try:
        sums = context.row.family != CREATION and any(placement.tag == TERMS for placement in operands)
        found = of_terms(context) if sums else _apply(context, operands)
    except RuleExit as end:
        found = end.placement
    return found if isinstance(found, list) else [found] * count


def _apply(context: OpContext, operands: list[RowPlacement]) -> RowPlacement | list[RowPlacement]:
    changing = context.differing()
    fixed = all(placement.tag == REPLICATE and placement.plain for placement in operands)
    if fixed and not changing and all(context.values[w].rows_axis is None for w in context.op.writes):
        return RowPlacement(REPLICATE, zero=is_zero(context))
    rule = _rule(context)
    if rule is None:
        return RowPlacement(UNPROVEN, why="no rule says how it treats the rows of the batch")
    if context.row.family not in (POINTWISE, CREATION) and changing - _SIZES:
        return RowPlacement(COUPLED, why=f"its argument {min(changing - _SIZES)} changes with the size of the batch")
    return rule(context)


def _rule(context: OpContext) -> Rule | None:
    row = context.row
    if row.name in RULES:
        return RULES[row.name]
    if row.averages:
        return averaged
    if row.family == CREATION and row.name not in NO_RULE:
        return create
    if row.same_elements and row.family == POINTWISE:
        return cast
    return by_letters if row.axes else None


def of_inputs_alone(graph: Graph, *, frozen: bool = True) -> frozenset[str]:
    """The values that depend on inputs, constants and buffers alone, and on no random numbers.  frozen: parameters
    that are not trained count as constants.  O(ops)."""
    updated = {buffer for buffer, _ in graph.updates}
    changing = updated.union(p.name for p in graph.params if p.trainable or (p.kind == "param" and not frozen))
    found = set(graph.inputs)
    for op in graph.ops:
        if not op.random and changing.isdisjoint(op.params) and found.issuperset(op.reads):
            found.update(op.writes)
    return frozenset(found)


def numbers_of_inputs(graph: Graph) -> frozenset[str]:
    """The single numbers that depend on inputs, constants and buffers alone.  O(ops).

    Left out: what reads parameters, which would have to be in the first stage, and what the new value of a buffer
    depends on, since that changes with every micro-batch.
    """
    kept = {value for _, value in graph.updates}
    for op in reversed(graph.ops):
        if kept.intersection(op.writes):
            kept.update(op.reads)
    single = {value.name for value in graph.values if math.prod(value.shape) == 1}
    return frozenset((of_inputs_alone(graph, frozen=False) & single) - kept - set(graph.inputs))


def steady_updates(graph: Graph, other: Graph) -> frozenset[str]:
    """Return the buffers whose new value is the same in every micro-batch and for the whole batch, such as counters.

    It follows from parameters and such buffers alone, by the same ops with the same arguments at both numbers of rows,
    and no other buffer's new value needs it.  other: the program at another number of rows, op by op.
    O(reads · buffers).
    """
    values, shapes, others = dict(graph.updates), graph.value_map(), other.value_map()
    owner = {p.name: p.same_as or p.name for p in graph.params}
    constants = {p.name for p in graph.params if p.kind == "constant"}  # may hold a number of rows
    by_rows = {
        op.name
        for op, twin in zip(graph.ops, other.ops, strict=True)
        if op.random
        or not alike(op.attrs, twin.attrs)
        or not constants.isdisjoint(op.params)
        or any(shapes[a].shape != others[b].shape for a, b in zip(op.writes, twin.writes, strict=True))
    }
    steady, before = set(values), set[str]()
    while before != steady:
        before, moving = set(steady), set(graph.inputs)
        changing = {owner[buffer] for buffer in values.keys() - steady}
        for op in graph.ops:
            if op.name in by_rows or not (moving.isdisjoint(op.reads) and changing.isdisjoint(op.params)):
                moving.update(op.writes)
        steady = {buffer for buffer in steady if values[buffer] not in moving}
        needed = graph.ops_between((), [values[buffer] for buffer in values.keys() - steady])
        read = {name for op in graph.ops if op.name in needed for name in op.params}
        steady = {buffer for buffer in steady if owner[buffer] not in read}
    return frozenset(steady)

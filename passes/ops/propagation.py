"""The general rules of the loss analysis: rows along a letter that the result keeps stay apart, along a letter that is
summed over they add up, along a letter that is mixed they are coupled."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from autopart.ir.graph import LossReduction
from autopart.passes.ops.context import OpContext
from autopart.passes.ops.letters import Letters
from autopart.passes.ops.placement import (
    COUPLED,
    INDEX,
    PARTIAL,
    REPLICATE,
    SHARD,
    RowPlacement,
    added,
    coupled,
    multiplied,
    need_plain,
    same_stride,
    unproven,
)
from autopart.passes.ops.row import POINTWISE, VIEW

Rule = Callable[[OpContext], RowPlacement | list[RowPlacement]]
_LINEAR_DTYPES = ("float", "bfloat", "complex")


class _Operand(NamedTuple):
    """An operand with the names and sizes of its axes, () for a number."""

    placement: RowPlacement
    names: Sequence[str] = ()
    sizes: Sequence[int] = ()

    @property
    def rows_name(self) -> str:
        """The letter of the axis that holds the rows."""
        return self.names[self.placement.axis]


def by_letters(context: OpContext) -> RowPlacement | list[RowPlacement]:
    """The placements of the results of an op with letters.  No operand may be COUPLED or UNPROVEN."""
    letters = _letters(context)
    match context.row.linear:
        case "each" | "mean":
            return _each(context, letters)
        case "sum":
            return _sum(context, letters)
        case "product":
            return _product_and_sum(context, letters)
    return any_function(context)


def _letters(context: OpContext) -> Letters:
    letters = context.letters()
    if letters is None:
        raise unproven("it is not known what its axes stand for")
    for ref in context.tensors()[len(letters.operands) :]:
        if context.row.linear != "each" and context.placement(ref).tag != REPLICATE:
            raise unproven("an operand depends on the batch whose axes are not known")
    return letters


def _operands(context: OpContext, letters: Letters) -> list[_Operand]:
    """The arguments that are tensors, or numbers that change with the rows."""
    pairs = zip(context.tensors(), letters.operands, strict=False)
    found = [_Operand(context.placement(ref), names, context.shape(ref)) for ref, names in pairs]
    for key, value in context.op.attrs:
        if not context.is_tensor(value) and context.differs(key) and context.row.family == POINTWISE:
            found.append(_Operand(context.argument(key)))
    return found


def _pair(context: OpContext, letters: Letters) -> list[_Operand]:
    """The two arguments of a binary op, tensors or numbers."""
    names = iter(letters.operands)

    def operand(key: str) -> _Operand:
        ref = context.arg(key)
        axes = next(names) if context.is_tensor(ref) else ()
        return _Operand(context.argument(key), axes, context.shape(ref))

    return [operand("self"), operand("other")]


def combined(
    arguments: Sequence[tuple[RowPlacement, Sequence[str], Sequence[int]]],
    result: Sequence[str],
    scale: int = 0,
    count: LossReduction | None = None,
) -> RowPlacement:
    """Placement of a result: along the axis that the rows of all arguments lie along, or a sum over it.

    arguments: (placement, names of the axes, sizes of the axes) of each.
    """
    operands = [_Operand(*argument) for argument in arguments]
    rows = [operand for operand in operands if operand.placement.tag == SHARD]
    if not rows:
        return RowPlacement(REPLICATE, scale, count)
    names = {operand.rows_name for operand in rows}
    if len(names) > 1 or "" in names:
        raise coupled("it combines every row of the batch with every other")
    name, stride = names.pop(), same_stride(operand.placement for operand in rows)
    there = [(operand, operand.sizes[operand.names.index(name)]) for operand in operands if name in operand.names]
    there = [(operand, size) for operand, size in there if operand in rows or size != 1]  # the others are broadcast
    if len(there) > len(rows) or len({size for _, size in there}) > 1:
        raise unproven("not all its operands hold the same rows of the batch")
    if name not in result:
        return RowPlacement(PARTIAL, scale, count)
    return RowPlacement(SHARD, scale, count, result.index(name), stride)


def any_function(context: OpContext) -> list[RowPlacement]:
    """The rule for an op that is not linear: its operands must be plain, and it may not mix an axis of rows."""
    letters = _letters(context)
    operands = _operands(context, letters)
    if any(operand.placement.tag == INDEX for operand in operands):
        raise _row_numbers(context)
    need_plain(operand.placement for operand in operands)
    for operand in operands:
        if operand.placement.tag == SHARD:
            _refuse_mixed(context, operand.rows_name, letters.results[0])
    every = [combined(operands, names) for names in letters.results]
    if len(every) == 1 or every[0].tag == REPLICATE:
        return every[:1] * len(context.op.writes)
    by_axis: dict[int | None, RowPlacement] = {placement.axis: placement for placement in reversed(every)}
    by_axis[None] = RowPlacement(COUPLED, why="it uses statistics of the batch")  # mean of a batch norm in training
    return [by_axis.get(context.values[written].rows_axis, every[0]) for written in context.op.writes]


def _refuse_mixed(context: OpContext, name: str, result: Sequence[str]) -> None:
    letter = name[:1]
    if not letter or letter not in context.row.mixes + context.row.may_mix:
        return
    verdict = coupled if letter in context.row.mixes else unproven
    if context.name in ("select", "unbind"):
        raise verdict("it picks one row of the batch")
    doing = f"runs {context.name} along" if name in result else f"takes {context.name} over"
    raise verdict(f"it {doing} the rows of the batch")


def _row_numbers(context: OpContext) -> Exception:
    """What computes with INDEX.  arange(rows) * n + i may number the elements of a flat tensor: that may be undone."""
    numbering = context.name in ("add", "sub", "rsub", "mul") and "int" in context.out.dtype
    certain = context.row.family == POINTWISE or context.row.linear in ("each", "mean")
    verdict = coupled if certain and not numbering else unproven
    return verdict("it computes with the number of the row in the micro-batch")


def _each(context: OpContext, letters: Letters) -> RowPlacement:
    """Linear in its one operand: a view, a sum or a mean."""
    ref, placement = context.first()
    if placement.tag == INDEX and context.row.family != VIEW and not context.row.same_elements:
        raise _row_numbers(context)
    if not placement.has_rows:
        return spread(context, placement)
    name, result = letters.operands[0][placement.axis], letters.results[0]
    _refuse_mixed(context, name, result)
    if name in result:
        return placement.along(result.index(name))
    scale = placement.scale - (1 if context.row.linear == "mean" else 0)
    whole = not any(result) and placement.plain
    return RowPlacement(PARTIAL, scale, placement.count, witness=ref[1:] if whole else None)


def spread(context: OpContext, placement: RowPlacement, axis: int | None = None) -> RowPlacement:
    """A value without rows; in a result that has some along `axis`, the same in each row."""
    axis = context.out.rows_axis if axis is None else axis
    if axis is None:
        return without_rows(context, placement)
    if placement.tag == PARTIAL:
        raise coupled("it spreads a sum or mean over the rows of the batch back over the rows")
    return RowPlacement(SHARD, placement.scale, placement.count, axis, 0)


def without_rows(context: OpContext, placement: RowPlacement) -> RowPlacement:
    """The rule for a linear op on a value without rows.  A sum keeps its witness only as a single number."""
    sizes = math.prod(context.out.shape), math.prod(context.shape(context.tensors()[0]))
    if placement.tag == PARTIAL and max(sizes) > 1:
        return RowPlacement(PARTIAL, placement.scale, placement.count)
    return placement


def _sum(context: OpContext, letters: Letters) -> RowPlacement:
    """add, sub, rsub: the factors of both operands must agree; the number 0 as a term does not count."""
    if context.differs("alpha"):
        raise coupled("its factor alpha changes with the size of the batch")
    other, terms = context.arg("other"), _pair(context, letters)
    first = terms[0].placement
    if not context.is_tensor(other) and other == 0 and not context.differs("other"):
        if first.tag in (REPLICATE, PARTIAL) or (first.tag == INDEX and context.name == "add"):
            return without_rows(context, first)
        terms = terms[:1]
    if any(term.placement.tag == INDEX for term in terms):
        raise _row_numbers(context)
    return _total(terms, letters.results[0])


def _total(terms: list[_Operand], result: Sequence[str]) -> RowPlacement:
    placements = [term.placement for term in terms]
    tags = {placement.tag for placement in placements}
    if PARTIAL in tags:
        if SHARD in tags:
            raise coupled("it combines rows with a sum or mean over the rows of the batch")
        return added(placements)
    if len({placement.factor for placement in placements}) > 1:
        raise coupled("it adds values that scale differently with the size of the batch")
    return combined(terms, result, *placements[0].factor)


def _product_and_sum(context: OpContext, letters: Letters) -> RowPlacement:
    """The rule for a product that is summed over what the result lacks, with operands that are added to it."""
    if context.row.family == POINTWISE:
        return _product(context, _pair(context, letters), letters.results[0])
    if any(len(set(names)) < len(names) - names.count("") for names in letters.operands):
        raise unproven("its equation is not understood")
    operands = _operands(context, letters)
    result = _product(context, [o for i, o in enumerate(operands) if i not in letters.added], letters.results[0])
    terms = [operand for i, operand in enumerate(operands) if i in letters.added]
    if not terms:
        return result
    if any(term.placement.tag == INDEX for term in terms):
        raise _row_numbers(context)
    out = letters.results[0]
    return _total([_Operand(result, out, context.out.shape), *terms], out)


def _product(context: OpContext, operands: list[_Operand], result: Sequence[str]) -> RowPlacement:
    placements = [operand.placement for operand in operands]
    if any(placement.tag == INDEX for placement in placements):
        raise _row_numbers(context)
    scale, count = multiplied(placements)
    sums = [placement for placement in placements if placement.tag == PARTIAL]
    if len(sums) > 1 or (sums and any(placement.tag == SHARD for placement in placements)):
        raise coupled("it multiplies a sum or mean over the rows of the batch with rows, or with another one")
    if not sums:
        return combined(operands, result, scale, count)
    single = not context.out.shape and all(not p.scale for p in placements if p.tag == REPLICATE)
    return RowPlacement(PARTIAL, scale, count, witness=sums[0].witness if single else None)


def divide(context: OpContext) -> RowPlacement | list[RowPlacement]:
    """The rule for div: by a constant, row by row, or by a count of the batch (a token mean)."""
    letters = _letters(context)
    above, below = _pair(context, letters)
    if context.arg("rounding_mode") is not None:
        return any_function(context)
    if below.placement.tag == PARTIAL:
        return _divided_by_sum(context, above.placement, below.placement)
    if below.placement.count is not None:
        raise coupled("it divides by a value that was divided by a count of the batch")
    divisor = below.placement
    inverse = RowPlacement(divisor.tag, -divisor.scale, None, divisor.axis, divisor.stride_factor)
    return _product(context, [above, below._replace(placement=inverse)], letters.results[0])


def _divided_by_sum(context: OpContext, above: RowPlacement, below: RowPlacement) -> RowPlacement:
    """x / n with n a sum or mean over the rows: a mean weighted by n if n is a count."""
    ref = context.arg("other")
    assert isinstance(ref, str)
    if context.values[ref[1:]].grad:
        raise coupled("it divides by a sum over the batch that itself depends on parameters")
    witness = ref[1:] if below.scale == 0 else below.witness
    if below.count is not None or above.count is not None or witness is None or context.shape(ref):
        raise coupled("it divides by a sum or mean over the rows of the batch that is not a plain count")
    if above.tag == INDEX:
        raise _row_numbers(context)
    return RowPlacement(
        above.tag, above.scale - below.scale, LossReduction("tokens", witness), above.axis, above.stride_factor
    )


def cast(context: OpContext) -> RowPlacement | list[RowPlacement]:
    """The rule for clone and casts: linear unless the result is an integer and the operand is not."""
    ref, placement = context.first()
    before, after = context.dtype(ref), context.out.dtype
    if placement.tag == INDEX and before != after and "int" not in after:
        raise _row_numbers(context)
    if placement.tag == INDEX or before == after or after.startswith(_LINEAR_DTYPES):
        return _each(context, _letters(context))
    return any_function(context)

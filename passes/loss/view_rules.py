"""Rules of the loss analysis for ops that move elements and do not compute: views, joins, lookups, creation."""

from __future__ import annotations

import math
from collections.abc import Callable

from autopart.ir.graph import Literal
from autopart.passes.loss.context import OpContext, aligned, ints, positive, rows_of
from autopart.passes.loss.placement import (
    INDEX,
    PARTIAL,
    REPLICATE,
    SHARD,
    Placement,
    added,
    coupled,
    same_outer,
    unproven,
)
from autopart.passes.ops.row import CREATION, VIEW
from autopart.passes.ops.table import FAMILY, NAMES

Rule = Callable[[OpContext], Placement]


def first(site: OpContext) -> tuple[str, Placement]:
    """The first tensor argument and its kind."""
    ref = site.tensors()[0]
    return ref, site.kind(ref)


def moved(kind: Placement, axis: int, outer: int | None = None) -> Placement:
    """A view of a value along the rows: the same kind along another axis."""
    outer = kind.outer if outer is None else outer
    return Placement(kind.tag, kind.scale, kind.count, axis, outer)


def reshape(site: OpContext) -> Placement:
    """Row-major order is kept, so the elements before the rows axis must multiply to the same number on both sides."""
    ref, kind = first(site)
    if kind.tag not in (SHARD, INDEX):
        return without_rows(site, kind)
    axis = site.out.rows_axis
    if axis is None:
        raise coupled("the axis that holds the rows is gone")
    before = math.prod(site.shape(ref)[: kind.axis]) * max(1, kind.outer)
    rest = math.prod(site.out.shape[:axis])
    if before % rest:
        raise unproven("the rows of the batch are no longer in order")
    outer = before // rest
    untouched = outer == 1 and site.out.shape[axis] == site.shape(ref)[kind.axis]
    return moved(kind, axis, kind.outer if untouched else outer)


def without_rows(site: OpContext, kind: Placement) -> Placement:
    """A linear op on a value that has no rows axis.  What a sum is proportional to is known for single numbers only."""
    if kind.tag == PARTIAL and max(math.prod(site.out.shape), math.prod(site.shape(site.tensors()[0]))) > 1:
        return Placement(PARTIAL, kind.scale, kind.count)
    return kind


def permute(site: OpContext) -> Placement:
    """transpose, permute, t, movedim, mT."""
    ref, kind = first(site)
    if kind.tag not in (SHARD, INDEX):
        return without_rows(site, kind)
    ndim = len(site.shape(ref))
    order = list(range(ndim))
    name = site.name
    if name == "permute":
        order = [positive(d, ndim) for d in ints(site.arg("dims"))]
    elif name == "movedim":
        sources = [positive(d, ndim) for d in ints(site.arg("source"))]
        targets = [positive(d, ndim) for d in ints(site.arg("destination"))]
        order = [d for d in order if d not in sources]
        for target, source in sorted(zip(targets, sources, strict=True)):
            order.insert(target, source)
    elif ndim > 1:
        keys = ("dim0", "dim1") if name == "transpose" else ("axis0", "axis1")
        a, b = (site.number(keys[0], -2), site.number(keys[1], -1)) if name in ("transpose", "swapaxes") else (-2, -1)
        a, b = positive(a, ndim), positive(b, ndim)
        order[a], order[b] = order[b], order[a]
    return moved(kind, order.index(kind.axis))


def expand(site: OpContext) -> Placement:
    """expand, expand_as, broadcast_to: a constant or a number that is spread over the rows holds the same in each."""
    ref, kind = first(site)
    return spread(site, kind, len(site.shape(ref)), site.out.rows_axis, len(site.out.shape))


def spread(site: OpContext, kind: Placement, ndim: int, axis: int | None, out_ndim: int) -> Placement:
    """Kind of an operand of `ndim` axes broadcast to a shape whose rows lie along `axis`."""
    if kind.tag in (SHARD, INDEX):
        return moved(kind, kind.axis - ndim + out_ndim)
    if axis is None:
        return without_rows(site, kind) if kind.tag == PARTIAL else kind
    if kind.tag == PARTIAL:
        raise coupled("it spreads a sum or mean over the rows of the batch back over the rows")
    return Placement(SHARD, kind.scale, kind.count, axis, 0)


def broadcast_tensors(site: OpContext) -> list[Placement]:
    """Each operand spread to the common shape."""
    refs = site.tensors()
    operands = [(site.kind(r), len(site.shape(r))) for r in refs]
    ndim = len(site.out.shape)
    axis = aligned(operands, ndim)[0] if any(k.tag == SHARD for k, _ in operands) else None
    kinds = [spread(site, kind, n, axis, ndim) for kind, n in operands]
    if len(kinds) != len(site.op.writes):  # some result is not used: which one, the shapes do not tell
        if len({(k.tag, k.scale, k.count, k.outer) for k in kinds}) > 1:
            raise unproven("it cannot be told which of its results are used")
        kinds = kinds[: len(site.op.writes)]
    return kinds


def repeat(site: OpContext) -> Placement:
    """repeat, tile: copies along the rows axis would put a row in several places."""
    ref, kind = first(site)
    shape, out = site.shape(ref), site.out
    counts = ints(site.arg("repeats", site.arg("dims")))
    counts = (1,) * (len(shape) - len(counts)) + counts
    added_axes = len(counts) - len(shape)
    if kind.tag == PARTIAL:
        return spread(site, kind, len(shape), out.rows_axis, len(out.shape))
    if kind.tag == REPLICATE:
        return kind if out.rows_axis is None else Placement(SHARD, kind.scale, kind.count, out.rows_axis, 1)
    axis = kind.axis + added_axes
    if counts[axis] == 1:
        return moved(kind, axis)
    return moved(kind, axis, max(1, kind.outer) * counts[axis])


def repeat_interleave(site: OpContext) -> Placement:
    """Each element repeated in place: rows stay in order."""
    _, kind = first(site)
    dim = site.arg("dim")
    if not isinstance(site.arg("repeats"), int) or not isinstance(dim, int) or kind.tag not in (SHARD, INDEX):
        raise unproven("its result is not known to keep the rows in order")
    return moved(kind, kind.axis)


def take_axis(site: OpContext) -> Placement:
    """slice, select, split, chunk, unbind, narrow: along another axis than the rows; along the rows only whole blocks
    of a concatenation of batches."""
    ref, kind = first(site)
    ndim = len(site.shape(ref))
    dim = positive(site.number("dim", 0), ndim)
    if dim != kind.axis and any(site.differs(key) for key in ("start", "end", "length", "index")):
        raise coupled("the place it takes from changes with the size of the batch")
    if kind.tag not in (SHARD, INDEX):
        return without_rows(site, kind)
    drops = site.name in ("select", "unbind")
    if dim != kind.axis:
        return moved(kind, kind.axis - (drops and dim < kind.axis))
    if drops:
        raise coupled("it picks one row of the batch")
    if site.out.shape == site.shape(ref):
        return kind
    return _whole_blocks(site, ref, kind)


def _whole_blocks(site: OpContext, ref: str, kind: Placement) -> Placement:
    """cat((a, b)) holds two blocks of rows; taking one of them back is exact."""
    size, twin_size = (graph[ref[1:]].shape[kind.axis] for graph in (site.values, site.twins))
    blocks = max(1, kind.outer)
    if site.name == "slice" and site.number("step", 1) == 1:
        starts = [_bound(site.arg("start"), size, 0), _bound(site.twin_arg("start"), twin_size, 0)]
        whole = starts[0] * blocks % size == 0 and starts[0] * twin_size == starts[1] * size
    else:
        whole = site.name in ("split", "chunk")
    taken = {site.values[w].shape[kind.axis] * blocks for w in site.op.writes}
    if not whole or any(n % size for n in taken) or len(taken) != 1 or kind.outer == 0:
        raise coupled("it picks some rows of the batch by their place")
    return moved(kind, kind.axis, taken.pop() // size)


def _bound(value: Literal, size: int, default: int) -> int:
    number = value if isinstance(value, int) else default
    return max(0, min(size, number + size if number < 0 else number))


def join(site: OpContext) -> Placement:
    """cat, stack."""
    refs = [r for r in site.tensors() if math.prod(site.shape(r)) or len(site.shape(r)) != 1]
    kinds = [site.kind(r) for r in refs]
    new_axis = site.name == "stack"
    ndim = len(site.out.shape)
    dim = positive(site.number("dim", 0), ndim)
    if any(k.tag == PARTIAL for k in kinds):
        if any(k.tag not in (PARTIAL, REPLICATE) for k in kinds):
            raise coupled("it joins rows with a sum or mean over the rows")
        return added(kinds)
    if len({(k.scale, k.count) for k in kinds}) > 1:
        raise coupled("it joins values that scale differently with the size of the batch")
    if all(k.tag == REPLICATE for k in kinds):
        return kinds[0] if site.out.rows_axis is None else _unknown_rows()
    axes = {k.axis for k in kinds if k.tag in (SHARD, INDEX)}
    tags = {k.tag for k in kinds}
    if len(axes) > 1 or len(tags) > 1:
        raise coupled("it joins values whose rows lie along different axes")
    axis = axes.pop()
    if new_axis:
        return moved(kinds[0], axis + (dim <= axis), same_outer(kinds))
    if dim != axis:
        return moved(kinds[0], axis, same_outer(kinds))
    sizes = {site.shape(r)[axis] for r in refs}
    layouts = {max(1, k.outer) for k in kinds}
    if len(sizes) > 1 or len(layouts) > 1 or tags != {SHARD}:
        raise coupled("it appends values of different sizes along the rows of the batch")
    return moved(kinds[0], axis, layouts.pop() * len(refs))


def _unknown_rows() -> Placement:
    raise unproven("its result grows with the batch and the rules do not say how")


def pad(site: OpContext) -> Placement:
    """Padding along other axes than the rows."""
    ref, kind = first(site)
    amounts = ints(site.arg("pad", site.arg("padding")))
    ndim = len(site.shape(ref))
    if kind.tag == REPLICATE:
        return kind
    if kind.tag != SHARD or not kind.plain:
        raise coupled("it pads a sum or mean over the rows of the batch")
    if kind.axis >= ndim - len(amounts) // 2 and any(amounts[2 * (ndim - 1 - kind.axis) :][:2]):
        raise coupled("it pads the rows of the batch")
    return kind


def create(site: OpContext) -> Placement:
    """zeros, full, rand and the like: the same in every row (random numbers: of the same distribution).

    `zeros_like(x)` does not depend on what x holds.
    """
    for key, _ in site.op.attrs:
        if key not in ("size", "fill_value", "s") and site.differs(key):
            raise coupled(f"its argument {key} changes with the size of the batch")
    scale = sum(site.growth(site.arg(key), site.twin_arg(key)) for key in ("fill_value", "s"))
    axis = site.out.rows_axis
    return (
        Placement(REPLICATE, scale, zero=is_zero(site)) if axis is None else Placement(SHARD, scale, axis=axis, outer=0)
    )


def is_zero(site: OpContext) -> bool:
    """True for a created tensor of zeros, and for views and casts of one."""
    if site.name in ("zeros", "new_zeros", "zeros_like"):
        return True
    if FAMILY.get(site.name) == VIEW or site.name in ("clone", "_to_copy"):
        return bool(site.tensors()) and first(site)[1].zero
    return FAMILY.get(site.name) == CREATION and site.arg("fill_value", site.arg("s")) == 0


def arange(site: OpContext) -> Placement:
    """arange(rows) counts the rows; any other range that grows with the batch is unknown."""
    if site.out.rows_axis is None:
        keys = ("start", "end", "step")
        if any(site.differs(key) for key in keys):
            raise coupled("its numbers change with the size of the batch")
        return Placement(REPLICATE)
    if "int" not in site.out.dtype:
        raise coupled("it makes numbers that grow with the batch")
    if site.out.shape != (site.rows,) or site.arg("start", 0) != 0 or site.arg("step", 1) != 1:
        raise unproven("it makes numbers that grow with the batch")
    return Placement(INDEX, axis=0, outer=1)


def embedding(site: OpContext) -> Placement:
    """Rows of a table by number."""
    table, kind = site.argument_kind("weight"), site.argument_kind("indices")
    if site.arg("scale_grad_by_freq") is True:
        raise coupled("it scales gradients by how often an index stands in the whole batch")
    if table.tag != REPLICATE or not table.plain or kind.tag not in (SHARD, REPLICATE) or not kind.plain:
        raise unproven("it looks up in a table that depends on the batch")
    return kind


def index(site: OpContext) -> Placement:
    """x[i, j, ...] with tensors: exact when the rows are not indexed, or are indexed by arange(rows)."""
    ref, kind = site.arg("self"), site.argument_kind("self")
    picks = site.arg("indices")
    assert isinstance(ref, str) and isinstance(picks, tuple)
    used = [(axis, pick) for axis, pick in enumerate(picks) if isinstance(pick, str)]
    kinds = [(site.kind(p), len(site.shape(p))) for _, p in used]
    broadcast = max((n for _, n in kinds), default=0)
    places = [axis for axis, _ in used]
    adjacent = places == list(range(places[0], places[0] + len(places)))
    start = places[0] if adjacent else 0
    if kind.tag == PARTIAL or any(k.tag not in (REPLICATE, SHARD, INDEX) or not k.plain for k, _ in kinds):
        raise coupled("it indexes with, or into, a sum or mean over the rows of the batch")
    if kind.tag == INDEX or any(site.dtype(p) in ("bool", "uint8") for _, p in used):
        raise unproven("it indexes with a mask, or into row numbers")
    if kind.tag == REPLICATE:
        return _from_constant(site, kind, kinds, start, broadcast)
    if kind.axis in places:
        return _by_row_number(site, ref, kind, kinds, places.index(kind.axis), start, broadcast)
    if any(k.tag != REPLICATE for k, _ in kinds):
        raise coupled("it picks, for every row, from every row of the batch")
    before = sum(1 for axis in range(kind.axis) if axis not in places)
    after_picks = broadcast if not adjacent or kind.axis > start else 0
    return moved(kind, before + after_picks)


def _from_constant(
    site: OpContext, kind: Placement, picks: list[tuple[Placement, int]], start: int, broadcast: int
) -> Placement:
    if any(k.tag == INDEX for k, _ in picks):
        raise unproven("it looks up by the number of the row in the micro-batch")
    if all(k.tag == REPLICATE for k, _ in picks):
        return kind
    axis, outer = aligned(picks, broadcast)
    return Placement(SHARD, kind.scale, kind.count, start + axis, outer)


def _by_row_number(
    site: OpContext,
    ref: str,
    kind: Placement,
    picks: list[tuple[Placement, int]],
    which: int,
    start: int,
    broadcast: int,
) -> Placement:
    """x[arange(rows), ...]: the row number must index exactly the rows."""
    number = picks[which][0]
    if number.tag != INDEX or kind.outer > 1 or site.shape(ref)[kind.axis] != site.rows:
        raise unproven("it reorders the rows of the batch by an index")
    as_rows = [(Placement(SHARD, axis=k.axis, outer=k.outer) if k.tag == INDEX else k, n) for k, n in picks]
    axis, outer = aligned(as_rows, broadcast)
    return rows_of(kind, start + axis, outer)


def index_select(site: OpContext) -> Placement:
    """Along another axis than the rows, by a constant."""
    ref, kind = first(site)
    dim = positive(site.number("dim", 0), len(site.shape(ref)))
    pick = site.argument_kind("index")
    if kind.tag == SHARD and pick.tag == REPLICATE and dim != kind.axis:
        return kind
    if kind.tag == REPLICATE and pick.tag == SHARD and pick.plain:
        return Placement(SHARD, kind.scale, kind.count, dim, pick.outer)
    raise unproven("it picks rows of the batch by an index")


def gather(site: OpContext) -> Placement:
    """gather, scatter: along another axis than the rows, with all operands along the same rows."""
    ref, kind = first(site)
    ndim = len(site.shape(ref))
    if site.name == "scatter_add" and kind.zero:
        return _sorted_into(site)
    operands = [(site.kind(r), len(site.shape(r))) for r in site.tensors()]
    if positive(site.number("dim", 0), ndim) == kind.axis:
        raise unproven("it picks rows of the batch by an index")
    if any(k.tag != SHARD or not k.plain for k, _ in operands):
        raise unproven("not all its operands are along the rows of the batch")
    if len({site.shape(r)[kind.axis] for r in site.tensors()}) > 1:
        raise unproven("its operands have different sizes along the rows of the batch")
    axis, outer = aligned(operands, len(site.out.shape))
    return Placement(SHARD, axis=axis, outer=outer)


def _sorted_into(site: OpContext) -> Placement:
    """Rows added up by an index of each row, from nothing: a sum over the rows."""
    number, source = site.argument_kind("index"), site.argument_kind("src")
    dim = positive(site.number("dim", 0), max(1, len(site.out.shape)))
    if not all(k.tag == SHARD and k.plain and k.axis == dim for k in (number, source)):
        raise unproven("it adds up rows of the batch by an index")
    same_outer([number, source])
    return Placement(PARTIAL)


def place(site: OpContext) -> Placement:
    """slice_scatter, select_scatter: write into another axis than the rows."""
    ref, kind = first(site)
    source = site.argument_kind("src")
    ndim = len(site.shape(ref))
    dim = positive(site.number("dim", 0), ndim)
    if kind.tag == REPLICATE and source.tag == REPLICATE and kind.plain and source.plain:
        return kind
    if kind.tag != SHARD or source.tag != SHARD or dim == kind.axis or not kind.plain or not source.plain:
        raise unproven("it writes into rows of the batch by their place")
    source_axis = source.axis + (site.name == "select_scatter" and dim <= source.axis)
    if source_axis != kind.axis:
        raise coupled("it writes rows along an axis that does not hold the rows")
    return rows_of(kind, kind.axis, same_outer([kind, source]))


def numbers(site: OpContext) -> Placement:
    """linspace, eye and others of a size that grows with the batch."""
    raise coupled("it makes numbers that grow with the batch")


_NUMBERS = {"linspace", "eye", "tril_indices", "triu_indices"}

VIEW_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("reshape", "view", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten", "view_as"), reshape
    ),
    **dict.fromkeys(("transpose", "swapaxes", "t", "permute", "movedim", "mT", "numpy_T"), permute),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), expand),
    **dict.fromkeys(("repeat", "tile"), repeat),
    "repeat_interleave": repeat_interleave,
    **dict.fromkeys(("slice", "select", "split", "split_with_sizes", "chunk", "unbind", "narrow"), take_axis),
    **dict.fromkeys(("cat", "stack"), join),
    **dict.fromkeys(("pad", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "replication_pad1d"), pad),
    **dict.fromkeys(
        NAMES[CREATION] - {"arange", "linspace", "eye", "tril_indices", "triu_indices", "randperm"}, create
    ),
    "arange": arange,
    "embedding": embedding,
    **dict.fromkeys(("index", "_unsafe_index"), index),
    "index_select": index_select,
    **dict.fromkeys(("gather", "scatter", "scatter_add"), gather),
    **dict.fromkeys(("slice_scatter", "select_scatter"), place),
}
"""Op name -> rule.  Every rule may rely on: no operand is COUPLED or UNPROVEN."""

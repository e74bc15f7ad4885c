"""Rules of the loss analysis for ops that compute: pointwise, reductions, normalisations, windows."""

from __future__ import annotations

import re
from collections.abc import Callable

from autopart.passes.loss.context import OpContext, aligned, ints, positive, rows_of
from autopart.passes.loss.placement import (
    COUPLED,
    INDEX,
    PARTIAL,
    REPLICATE,
    SHARD,
    Count,
    Placement,
    added,
    coupled,
    multiplied,
    need_plain,
    same_outer,
    unproven,
)
from autopart.passes.ops.row import NORM, POINTWISE, REDUCTION, WINDOW
from autopart.passes.ops.table import NAMES

Rule = Callable[[OpContext], Placement | list[Placement]]
_LINEAR_DTYPES = ("float", "bfloat", "complex")


def operands(site: OpContext) -> list[tuple[Placement, int]]:
    """Kind and number of axes of every argument that is a tensor or a number that changes with the rows."""
    found = [(site.kind(ref), len(site.shape(ref))) for ref in site.tensors()]
    for key, value in site.op.attrs:
        if not site.is_tensor(value) and site.differs(key):
            found.append((Placement(REPLICATE, site.growth(value, site.twin_arg(key))), 0))
    return found


def broadcast(
    site: OpContext, found: list[tuple[Placement, int]], scale: int = 0, count: Count | None = None
) -> Placement:
    """Kind of a pointwise result: along the rows when an operand is, else constant."""
    if not any(k.tag == SHARD for k, _ in found):
        return Placement(REPLICATE, scale, count)
    axis, outer = aligned(found, len(site.out.shape))
    return Placement(SHARD, scale, count, axis, outer)


def pointwise(site: OpContext) -> Placement:
    """Any function of single elements."""
    found = operands(site)
    kinds = [k for k, _ in found]
    if any(k.tag == INDEX for k in kinds):
        positions = "int" in site.out.dtype and site.name in ("add", "sub", "rsub", "mul")
        verdict = unproven if positions else coupled  # arange(rows) * n + i may number the elements of a flat tensor
        raise verdict("it computes with the number of the row in the micro-batch")
    need_plain(kinds)
    return broadcast(site, found)


def cast(site: OpContext) -> Placement:
    """clone, detach, casts: linear unless the result is integer and the operand is not."""
    ref = site.tensors()[0]
    kind = site.kind(ref)
    exact = site.out.dtype == site.dtype(ref) or site.out.dtype.startswith(_LINEAR_DTYPES)
    if kind.tag == INDEX:
        return kind if site.out.dtype == site.dtype(ref) or "int" in site.out.dtype else pointwise(site)
    return kind if exact else pointwise(site)


def add(site: OpContext) -> Placement:
    """add, sub, rsub: linear; the factors of both operands must agree."""
    found = operands_of_sum(site)
    kinds = [k for k, _ in found]
    if any(k.tag == INDEX for k in kinds):
        zero = site.name == "add" and site.arg("other") == 0
        return kinds[0] if zero else pointwise(site)
    if any(k.tag == PARTIAL for k in kinds):
        if any(k.tag == SHARD for k in kinds):
            raise coupled("it combines rows with a sum or mean over the rows of the batch")
        total = added(kinds)
        return kinds[0] if len(kinds) == 1 and not site.out.shape else total
    if len({(k.scale, k.count) for k in kinds}) > 1:
        raise coupled("it adds values that scale differently with the size of the batch")
    return broadcast(site, found, kinds[0].scale, kinds[0].count)


def operands_of_sum(site: OpContext) -> list[tuple[Placement, int]]:
    """Both terms, without a term that is the number 0."""
    if site.differs("alpha"):
        raise coupled("its factor alpha changes with the size of the batch")
    terms: list[tuple[Placement, int]] = []
    for key in ("self", "other"):
        ref = site.arg(key)
        if site.is_tensor(ref) or ref != 0 or site.differs(key):
            terms.append((site.argument_kind(key), len(site.shape(ref))))
    return terms


def multiply(site: OpContext) -> Placement:
    """mul: a sum or mean may be multiplied by what does not depend on the batch."""
    found = [(site.argument_kind(key), len(site.shape(site.arg(key)))) for key in ("self", "other")]
    return product(site, found)


def product(site: OpContext, found: list[tuple[Placement, int]]) -> Placement:
    """Kind of an elementwise product."""
    kinds = [k for k, _ in found]
    if any(k.tag == INDEX for k in kinds):
        return pointwise(site)
    sums = [k for k in kinds if k.tag == PARTIAL]
    if len(sums) > 1 or (sums and any(k.tag == SHARD for k in kinds)):
        raise coupled("it multiplies a sum or mean over the rows of the batch with rows, or with another one")
    scale, count = multiplied(kinds)
    if not sums:
        return broadcast(site, found, scale, count)
    if site.out.rows_axis is not None:
        raise coupled("it spreads a sum or mean over the rows of the batch back over the rows")
    single = not site.out.shape and all(not k.scale for k in kinds if k.tag == REPLICATE)
    return Placement(PARTIAL, scale, count, witness=sums[0].witness if single else None)


def divide(site: OpContext) -> Placement:
    """div: by a constant, row by row, or by a count of the batch (a token mean)."""
    above, below = site.argument_kind("self"), site.argument_kind("other")
    if site.arg("rounding_mode") is not None:
        return pointwise(site)
    if below.tag == PARTIAL:
        return divided_by_sum(site, above, below)
    if INDEX in (above.tag, below.tag):
        return pointwise(site)
    if below.count is not None:
        raise coupled("it divides by a value that was divided by a count of the batch")
    inverse = Placement(below.tag, -below.scale, None, below.axis, below.outer)
    found = [(above, len(site.shape(site.arg("self")))), (inverse, len(site.shape(site.arg("other"))))]
    return product(site, found)


def divided_by_sum(site: OpContext, above: Placement, below: Placement) -> Placement:
    """x / n with n a sum (or mean) over the rows: a mean weighted by n, when n is a count."""
    ref = site.arg("other")
    assert isinstance(ref, str)
    if site.values[ref[1:]].grad:
        raise coupled("it divides by a sum over the batch that itself depends on parameters")
    witness = ref[1:] if below.scale == 0 else below.witness
    if below.count is not None or above.count is not None or witness is None or site.out.shape != above_shape(site):
        raise coupled("it divides by a sum or mean over the rows of the batch that is no plain count")
    if above.tag not in (PARTIAL, SHARD, REPLICATE):
        return pointwise(site)
    return Placement(above.tag, above.scale - below.scale, Count(witness), above.axis, above.outer)


def above_shape(site: OpContext) -> tuple[int, ...] | None:
    """The numerator's shape when the divisor is one number, else None."""
    return site.shape(site.arg("self")) if len(site.shape(site.arg("other"))) == 0 else None


def negate(site: OpContext) -> Placement:
    """neg, positive."""
    kind = site.argument_kind("self")
    return pointwise(site) if kind.tag == INDEX else kind


_RUNNING = {"softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "cummax",
            "cummin", "logcumsumexp", "sort", "argsort", "topk", "flip", "roll", "glu"}  # fmt: skip
_REORDERING = {"sort", "argsort", "topk", "flip", "roll", "cumsum"}
"""May be undone later, as routing to experts and back is; the others never are."""
_ALL_AXES = NAMES[REDUCTION] - _RUNNING - {"cosine_similarity", "pairwise_distance", "mode", "kthvalue"} | {
    "max",
    "min",
}
"""Reductions over all axes when none is named; for those that run along one (`softmax`), that is the last."""
_DIMS = {"cosine_similarity": 1}


def reduced_axes(site: OpContext, ndim: int) -> frozenset[int]:
    """The axes that an op reduces or runs along."""
    dims = site.arg("dim", site.arg("dims", site.arg("axis")))
    listed = ints(dims)
    if not listed and site.name in _ALL_AXES:
        return frozenset(range(ndim))
    if dims is None:
        listed = (_DIMS.get(site.name, -1),)
    return frozenset(positive(d, ndim) for d in listed)


def reduce_linear(site: OpContext) -> Placement:
    """sum and mean: over the rows they make a sum or mean of the batch, over other axes nothing changes."""
    ref = site.tensors()[0]
    kind, ndim = site.kind(ref), len(site.shape(ref))
    axes = reduced_axes(site, ndim)
    if kind.tag == INDEX:
        return pointwise(site)
    if kind.tag in (REPLICATE, PARTIAL):
        return kind if ndim == 0 else Placement(kind.tag, kind.scale, kind.count)
    if kind.axis not in axes:
        return along(site, kind, axes)
    scale = kind.scale - (site.name == "mean")
    whole = len(axes) == ndim and kind.plain
    return Placement(PARTIAL, scale, kind.count, witness=ref[1:] if whole else None)


def along(site: OpContext, kind: Placement, axes: frozenset[int]) -> Placement:
    """A reduction over other axes than the rows."""
    keep = site.arg("keepdim", False) is True
    return rows_of(kind, kind.axis if keep else kind.axis - sum(a < kind.axis for a in axes))


def reduce_other(site: OpContext) -> Placement:
    """Any other reduction: exact over other axes than the rows."""
    found = operands(site)
    kinds = [k for k, _ in found]
    need_plain(kinds)
    rows = [(k, n) for k, n in found if k.tag == SHARD]
    if not rows:
        return Placement(REPLICATE)
    kind, ndim = rows[0]
    axes = reduced_axes(site, ndim)
    if len(rows) > 1:
        ndim = max(n for _, n in found)
        axis, outer = aligned(found, ndim)
        kind, axes = Placement(SHARD, axis=axis, outer=outer), reduced_axes(site, ndim)
    if kind.axis in axes:
        raise coupled(f"it takes {site.name} over the rows of the batch")
    return along(site, kind, axes)


def run_along(site: OpContext) -> Placement:
    """softmax, cumsum, sort, flip...: exact along another axis than the rows; the shape stays."""
    ref = site.tensors()[0]
    kind, ndim = site.kind(ref), len(site.shape(ref))
    need_plain([k for k, _ in operands(site)])
    if kind.tag != SHARD:
        return kind
    if kind.axis in reduced_axes(site, ndim) or (site.name == "roll" and not ints(site.arg("dims"))):
        verdict = unproven if site.name in _REORDERING else coupled
        raise verdict(f"it runs {site.name} along the rows of the batch")
    return kind


def leading(site: OpContext, found: list[tuple[Placement, int]], trailing: int) -> Placement:
    """An op that mixes only the last `trailing` axes of its operands."""
    kinds = [k for k, _ in found]
    need_plain(kinds)
    if not any(k.tag == SHARD for k in kinds):
        return Placement(REPLICATE)
    if any(k.tag == SHARD and k.axis >= n - trailing for k, n in found):
        raise unproven(f"it runs {site.name} along the rows of the batch")
    return broadcast(site, found)


def trailing_axes(site: OpContext) -> Placement:
    """layer_norm, pooling, resampling...: of one operand, other tensors being parameters."""
    ref = site.tensors()[0]
    if site.name in ("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"):
        trailing = len(ints(site.arg("normalized_shape")))
    elif site.name in ("pixel_shuffle", "pixel_unshuffle"):
        trailing = 3
    else:
        digits = re.search(r"(\d)d", site.name)
        trailing = int(digits[1]) if digits else 2
    others = [site.kind(r) for r in site.tensors()[1:]]
    need_plain(others)
    if any(k.tag != REPLICATE for k in others):
        raise unproven("a second operand depends on the batch")
    kind = site.kind(ref)
    found = leading(site, [(kind, len(site.shape(ref)))], trailing)
    return rows_of(found, kind.axis) if found.tag == SHARD else found


def per_sample(site: OpContext) -> list[Placement]:
    """Ops whose axis 0 is the batch: convolutions, group and instance norm, batch norm, grid sampling.

    Batch norm in training mode does couple the rows: what is exact is defined there as the plain model over the same
    micro-batches (as in every pipeline), so its output counts as ROWS and its statistics may not reach the loss.
    """
    ref = site.tensors()[0]
    kind = site.kind(ref)
    others = [site.kind(r) for r in site.tensors()[1:] if not is_statistic(site, r)]
    need_plain([kind, *others])
    if site.name.startswith("conv") and len(site.shape(ref)) != len(site.shape(site.arg("weight"))):
        raise unproven("its input has no batch axis")
    sampled = site.name in ("grid_sampler", "grid_sampler_2d")
    if any(k.tag != REPLICATE and not (sampled and k.tag == SHARD and k.axis == 0) for k in others):
        raise unproven("its parameters depend on the batch")
    rows = [k for k in [kind, *others] if k.tag == SHARD]
    if any(k.axis != 0 for k in rows) or (sampled and len(rows) != 2 and rows):
        raise unproven("its axis 0 is not the batch")
    result = Placement(SHARD, axis=0, outer=same_outer(rows)) if rows else Placement(REPLICATE)
    hidden = Placement(COUPLED, why="it uses statistics of the batch")
    has_axis = [site.values[w].rows_axis is not None for w in site.op.writes]
    return [result if has or not rows else hidden for has in has_axis]


def is_statistic(site: OpContext, ref: str) -> bool:
    """Running statistics of a norm that uses those of its input: written, not read."""
    own = site.arg("training") is True or site.arg("use_input_stats") is True
    return own and ref in (site.arg("running_mean"), site.arg("running_var"))


def one_more_axis(site: OpContext) -> Placement:
    """one_hot: a new last axis."""
    kind = site.argument_kind("self")
    need_plain([kind])
    return kind


_BATCH_OPS = (NAMES[NORM] - {"layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"}) | {
    "conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "im2col",
    "col2im", "grid_sampler", "grid_sampler_2d", "affine_grid_generator", "channel_shuffle", "local_response_norm",
}  # fmt: skip

MATH_RULES: dict[str, Rule] = {
    **dict.fromkeys(NAMES[POINTWISE], pointwise),
    **dict.fromkeys(("clone", "contiguous", "_to_copy", "to", "type_as", "detach", "alias"), cast),
    **dict.fromkeys(("add", "sub", "rsub"), add),
    "mul": multiply,
    **dict.fromkeys(("div", "true_divide"), divide),
    **dict.fromkeys(("neg", "positive"), negate),
    **dict.fromkeys(("sum", "mean"), reduce_linear),
    **dict.fromkeys(NAMES[REDUCTION] - _RUNNING - {"sum", "mean"}, reduce_other),
    **dict.fromkeys(_RUNNING, run_along),
    **dict.fromkeys(NAMES[WINDOW] - _BATCH_OPS, trailing_axes),
    **dict.fromkeys(
        ("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm", "pixel_shuffle", "tril", "triu"),
        trailing_axes,
    ),
    **dict.fromkeys(_BATCH_OPS, per_sample),
    "one_hot": one_more_axis,
}
"""Op name -> rule.  Every rule may rely on: no operand is COUPLED or UNPROVEN."""

"""The storage that each value of a graph has: its own, or that of the value or parameter which it is a view of.

Whether a reshape is a view depends on how its operand lies in memory, so strides are followed through views as torch
computes them (`computeStride_impl` in its `ATen/TensorUtils.cpp`).  Results of computes lie in order, but for fused
attention's: kernels write all heads of a token together (row, token, head, element), so that a model which puts the
heads of a token side by side afterwards copies nothing.

Wrong where: an op keeps the layout of its operand (a sum of two transposed values lies transposed as well); attention
runs without a fused kernel for a reason besides `is_fused`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopart.ir.graph import Graph, Op, Value
from autopart.passes.ops.casts import cast_values
from autopart.passes.ops.flops import operands
from autopart.passes.ops.row import VIEW, OpRow
from autopart.passes.ops.table import row_of

Strides = tuple[int, ...]
Layout = tuple[tuple[int, ...], Strides | None]
"""Shape of a tensor and its strides in elements; None where they are not known."""


def storage(graph: Graph) -> dict[str, str]:
    """For each value, the value or parameter whose storage it shares.  O(values)."""
    values = graph.value_map()
    roots: dict[str, str] = {name: name for name in graph.inputs}
    casts = cast_values(graph)
    layouts: dict[str, Layout] = {p.name: (p.shape, in_order(p.shape)) for p in graph.params}
    layouts |= {name: (values[name].shape, in_order(values[name].shape)) for name in graph.inputs}
    for op in graph.ops:
        row, refs = row_of(op.target), names_of(op)
        source = refs[0] if refs else ""
        for place, written in enumerate(op.writes):
            base = refs[place] if row.name == "broadcast_tensors" and place < len(refs) else source
            shape = values[written].shape
            strides = viewed(op, row, layouts[base], shape) if row.family == VIEW and base in layouts else None
            shares = row.family == VIEW and base and (strides is not None or row.storage != "reshape")
            roots[written] = casts.get(written, roots.get(base, base) if shares else written)
            layouts[written] = (shape, strides if shares else _result(op, row, values, shape))
    return roots


def names_of(op: Op) -> list[str]:
    """Names of the tensor arguments in order."""
    return [ref[1:] for ref in operands(op)] or [*op.reads, *op.params]


def is_fused(op: Op, values: Mapping[str, Value]) -> bool:
    """Whether one kernel computes an attention: without dropout, and without a gradient for its mask.

    CPUs compute scores, their softmax and its product with the values one by one then; CUDA has fused kernels for
    both.
    """
    mask = str(dict(op.attrs).get("attn_mask"))[1:]
    return not op.random and not (mask in values and values[mask].grad)


def in_order(shape: tuple[int, ...]) -> Strides:
    """Strides of a tensor whose elements lie as its axes say."""
    return tuple([math.prod(shape[axis + 1 :]) for axis in range(len(shape))])


def _result(op: Op, row: OpRow, values: Mapping[str, Value], shape: tuple[int, ...]) -> Strides:
    if row.hidden == "attention" and len(shape) == 4 and is_fused(op, values):
        _, heads, tokens, size = shape
        return heads * tokens * size, size, heads * size, 1
    return in_order(shape)


def viewed(op: Op, row: OpRow, of: Layout, shape: tuple[int, ...]) -> Strides | None:
    """Strides of a view, in elements; None where they are not known, and for a reshape that copies.

    of: the layout of its operand.  shape: of the view.
    """
    old, strides = of
    if strides is None:
        return None
    attrs, axes = dict(op.attrs), len(old)
    axis = attrs.get("dim", 0)
    match row.name:
        case "transpose" | "t" | "mT" if axes > 1:
            a, b = (int(str(attrs.get(name, default))) % axes for name, default in (("dim0", -2), ("dim1", -1)))
            order = list(range(axes))
            order[a], order[b] = b, a
            return tuple([strides[place] for place in order])
        case "permute":
            dims = attrs.get("dims")
            return tuple([strides[int(str(d)) % axes] for d in dims]) if isinstance(dims, tuple) else None
        case "slice" if isinstance(axis, int):
            step = int(str(attrs.get("step", 1)))
            return tuple([stride * (step if place == axis % axes else 1) for place, stride in enumerate(strides)])
        case "narrow" | "split" | "split_with_sizes" | "chunk" | "alias":
            return strides
        case "select" | "unbind" if isinstance(axis, int):
            return tuple([stride for place, stride in enumerate(strides) if place != axis % axes])
        case "expand" | "expand_as" | "broadcast_to":
            new = len(shape) - axes
            kept = [strides[i] if old[i] == shape[new + i] else 0 for i in range(axes)]
            return (*[0] * new, *kept)
    return None if row.storage == "out of order" else reshaped(old, strides, shape)


def reshaped(old: tuple[int, ...], strides: Strides, new: tuple[int, ...]) -> Strides | None:
    """Strides of a reshape that copies nothing; None if it has to copy.  O(axes).

    From the right, axes that lie as one (each stride is the length of what is inside) are a run; axes of the new shape
    must divide such runs without one that crosses from one to the next.
    """
    if math.prod(old) != math.prod(new):  # read as another dtype
        return None
    if not math.prod(old):
        return in_order(new)
    runs: list[tuple[int, int]] = []  # (elements, stride of the innermost), from the right
    for size, stride in zip(reversed(old), reversed(strides), strict=True):
        if size == 1:
            continue
        if runs and stride == runs[-1][0] * runs[-1][1]:
            runs[-1] = runs[-1][0] * size, runs[-1][1]
        else:
            runs.append((size, stride))
    found: list[int] = []
    left, stride = 1, 1  # of the run at hand
    for size in reversed(new):
        if size == 1:
            found.append(stride)
            continue
        if left == 1:
            left, stride = runs.pop(0)
        if left % size:
            return None
        found.append(stride)
        left, stride = left // size, stride * size
    return tuple(reversed(found))

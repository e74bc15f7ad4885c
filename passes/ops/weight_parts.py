"""The part of an op's backward that makes gradients of weights alone, and can wait (`W` in `ir.actions`).

It is the weight's product of a matrix product with a trainable matrix, or with a cast or a transposed view of one: the
backward has another product as large for the gradient of x, if that is needed.  From I to W it keeps x and the
gradient of its result.  Everything else (norms, biases, embeddings, convolutions) runs whole in I.

Each gradient of a parameter is added to the sum of earlier micro-batches and slices (`additions`):

    product with a weight, all of it in the type of the sum     the product adds: it reads the sum besides
    product in half precision (autocast, or a half weight)      a kernel of its own: reads the product and the fp32 sum,
                                                                writes the sum: 10 bytes an element
    any other use of a parameter (norms, biases, convolutions)  autograd adds: reads gradient and sum, writes the sum;
                                                                from half precision it is widened before
    lookup in a table                                           as any other, of the whole table, zeroed before

Assumed, and wrong where: the two products take equally long.  An x that several products share (queries, keys, values)
counts for the first of them, also if a cut parts them.  Every micro-batch adds (the first of a step leaves its gradient
as the sum); a parameter that several ops of a stage use is added once for each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from autopart.ir.graph import Cost, Graph, Op, Param, Value
from autopart.passes.ops.casts import cast_parameter
from autopart.passes.ops.flops import operands
from autopart.passes.ops.table import row_of

_PRODUCTS: Mapping[str, tuple[int, int]] = {
    "aten.linear.default": (0, 1),
    "aten.addmm.default": (1, 2),
    "aten.mm.default": (0, 1),
    "aten.matmul.default": (0, 1),
}
"""By op, the places of x and of the weight among its tensor operands."""


class WeightPart(NamedTuple):
    """halves: of the backward that can wait, 0 to 2.  kept: names of values whose sizes are kept until then.

    weight: the parameter.  reads: the value by which it is read, if that is a cast or a view of it.
    """

    halves: int = 0
    kept: tuple[str, ...] = ()
    weight: str = ""
    reads: tuple[str, ...] = ()

    def of(self, cost: Cost, values: Mapping[str, Value], added_ns: int = 0) -> Cost:
        """Return the cost with its weight part, in nanoseconds and bytes.  added_ns: of the backward, spent on adding
        the gradient to its sum, which waits as well."""
        if not self.halves:
            return cost
        kept_bytes = sum([values[name].size_bytes for name in self.kept])
        weight_ns = (cost.bwd_ns - added_ns) * self.halves // 2 + added_ns
        return replace(cost, weight_ns=weight_ns, weight_bytes=kept_bytes)


def weight_parts(graph: Graph, roots: Mapping[str, str]) -> list[WeightPart]:
    """Return the weight part of each op.  roots: the storage of each value (`storage`).  O(ops)."""
    values, params = graph.value_map(), graph.param_map()
    counted: set[str] = set()
    found = []
    for op in graph.ops:
        factors = _factors_of_product(op, values, params, roots)
        if factors is None:
            found.append(WeightPart())
            continue
        x, weight = factors
        root = roots.get(x, x)
        fresh = () if root in counted or root not in values else (root,)
        counted.update(fresh)
        halves = 1 if root in values and values[root].grad else 2
        reads = (weight,) if weight in values else ()
        found.append(WeightPart(halves, (*fresh, op.writes[0]), roots.get(weight, weight), reads))
    return found


def with_weight_parts(graph: Graph, parts: list[WeightPart], analytic: Sequence[Cost]) -> Graph:
    """Return the graph with the weight part of each op in its cost, whatever the source of its times.

    analytic: of each op, the cost that has the share of the weight part in the backward.  O(ops).
    """
    values, ops = graph.value_map(), []
    for op, part, known in zip(graph.ops, parts, analytic, strict=True):
        cost = part.of(op.cost, values)
        if known.bwd_ns:
            cost = replace(cost, weight_ns=round(cost.bwd_ns * known.weight_ns / known.bwd_ns))
        ops.append(replace(op, cost=cost))
    return replace(graph, ops=tuple(ops))


def _factors_of_product(
    op: Op, values: Mapping[str, Value], params: Mapping[str, Param], roots: Mapping[str, str]
) -> tuple[str, str] | None:
    """Return the names of x and of the weight of a product whose weight's gradient can wait, else None."""
    if op.target not in _PRODUCTS or not values[op.writes[0]].grad:
        return None
    x, place = _PRODUCTS[op.target]
    names = [ref[1:] for ref in operands(op)]
    if len(names) <= place:
        return None
    weight = params.get(roots.get(names[place], names[place]))
    read = values.get(names[place])
    if weight is None or not weight.trainable or len(weight.shape) != 2:
        return None
    if read is not None and math.prod(read.shape) != math.prod(weight.shape):
        return None
    return names[x], names[place]


_HALF = ("float16", "bfloat16")


class Addition(NamedTuple):
    """What one op adds in a backward, in bytes of memory that are passed.

    inside: by its product.  own: by kernels of their own.  flows: whether its own gradient is computed at all; that of
    a cast is not where products alone use it, which add to the sum of its parameter themselves.
    """

    inside: int = 0
    own: int = 0
    flows: bool = True


def summed_bytes(param: Param) -> int:
    """Return the bytes of a gradient as it is summed: half precision is summed in fp32."""
    return param.size_bytes * 2 if param.dtype in _HALF else param.size_bytes


def additions(graph: Graph, parts: list[WeightPart]) -> list[Addition]:
    """Return what each op adds.  parts: its weight part.  O(ops + reads)."""
    params, grads = graph.param_map(), {value.name: value.dtype for value in graph.values if value.grad}
    product_reads = {(op.name, ref) for op, part in zip(graph.ops, parts, strict=True) for ref in part.reads}
    others = {read for op in graph.ops for read in op.reads if (op.name, read) not in product_reads}
    found = []
    for op, part in zip(graph.ops, parts, strict=True):
        dtype = next((grads[name] for name in op.writes if name in grads), None)
        cast = cast_parameter(op, params) is not None
        if dtype is None:
            found.append(Addition())
        elif cast and others.isdisjoint(op.writes):
            found.append(Addition(flows=False))
        else:
            inside = own = 0
            if part.weight:
                weight = params[part.weight]
                if weight.dtype == dtype and dtype not in _HALF:  # the product adds by itself
                    inside = weight.size_bytes
                else:
                    made = math.prod(weight.shape) * 2 if dtype in _HALF else summed_bytes(weight)
                    own = made + 2 * summed_bytes(weight)
            table = operands(op)[:1] if row_of(op.target).looks_up else []
            for param in [params[name] for name in dict.fromkeys(op.params) if name != part.weight]:
                if param.trainable:
                    summed = summed_bytes(param)
                    widened = param.size_bytes + summed if param.dtype in _HALF and not cast else 0
                    own += 3 * summed + widened + (param.size_bytes if table == [f"%{param.name}"] else 0)
            found.append(Addition(inside, own))
    return found

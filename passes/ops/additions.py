"""The passes over memory by which gradients are added to the sums of earlier micro-batches and slices.

    product with a weight, all of it in the type of the sum     the product adds: it reads the sum besides
    product in half precision (autocast, or a half weight)      a kernel of its own: reads the product and the fp32 sum,
                                                                writes the sum: 10 bytes an element
    any other use of a parameter (norms, biases, convolutions)  autograd adds: reads gradient and sum, writes the sum;
                                                                from half precision it is widened before
    lookup in a table                                           as any other, of the whole table, zeroed before

Assumed, and wrong where: every micro-batch adds (the first of a step leaves its gradient as the sum); a parameter that
several ops of a stage use is added once for each, though autograd may join their gradients first.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from autopart.ir.graph import Graph, Op, Param
from autopart.passes.ops.casts import cast_parameter
from autopart.passes.ops.flops import operands
from autopart.passes.ops.table import row_of
from autopart.passes.ops.weight_parts import WeightPart

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
            inside, own = _of_product(params[part.weight], dtype) if part.weight else (0, 0)
            rest = [params[name] for name in dict.fromkeys(op.params) if name != part.weight]
            found.append(Addition(inside, own + sum([_of_autograd(op, p, cast) for p in rest if p.trainable])))
    return found


def _of_product(weight: Param, dtype: str) -> tuple[int, int]:
    """Return the bytes that the product passes besides, and those of a kernel of its own.  dtype: of the product."""
    if weight.dtype == dtype and dtype not in _HALF:
        return weight.size_bytes, 0
    made = math.prod(weight.shape) * 2 if dtype in _HALF else summed_bytes(weight)
    return 0, made + 2 * summed_bytes(weight)


def _of_autograd(op: Op, param: Param, cast: bool) -> int:
    summed = summed_bytes(param)
    widened = param.size_bytes + summed if param.dtype in _HALF and not cast else 0
    table = row_of(op.target).looks_up and operands(op)[:1] == [f"%{param.name}"]
    return 3 * summed + widened + (param.size_bytes if table else 0)

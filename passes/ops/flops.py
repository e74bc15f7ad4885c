"""Floating point operations of one op, forward and backward.

A multiply-add counts as 2 (as in torch.utils.flop_counter, whose numbers ours equal for matrix products, convolutions
and attention).  Attention counts the whole square, also when it is causal.  Views and creation of constants count 0,
reductions, normalisations and losses one per element read, everything else one per element written: right to a small
factor for pointwise ops, which memory traffic bounds anyway.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopart.ir.graph import Literal, Op, Param, Value
from autopart.passes.ops.table import CREATION, LOSS, MATMUL, NORM, REDUCTION, VIEW, family, op_name

Shape = tuple[int, ...]


def flops(op: Op, values: Mapping[str, Value], params: Mapping[str, Param]) -> int:
    """FLOPs of the forward of `op`.  values and params: by name, as `Graph.value_map` and `param_map`."""
    kind = family(op.target)
    if kind in (VIEW, CREATION):
        return 0
    written = sum(math.prod(values[w].shape) for w in op.writes)
    if kind == MATMUL:
        return _matmul(op, values, params, written)
    if kind in (REDUCTION, NORM, LOSS):
        return max([written] + [math.prod(values[r].shape) for r in op.reads])
    return written


def backward_flops(op: Op, values: Mapping[str, Value], params: Mapping[str, Param]) -> int:
    """FLOPs of the backward: for matrix products the forward's once per operand that needs a gradient (at most
    twice), attention 5/2 (it recomputes its scores), all else once; 0 when no gradient reaches the op."""
    if not any(values[w].grad for w in op.writes):
        return 0
    forward = flops(op, values, params)
    if op_name(op.target) == "scaled_dot_product_attention":
        return forward * 5 // 2
    if family(op.target) != MATMUL:
        return forward
    factors = sum(values[r].grad for r in op.reads)
    factors += sum(params[p].trainable and len(params[p].shape) > 1 for p in op.params)
    return forward * min(2, max(1, factors))


def shape_of(ref: Literal, values: Mapping[str, Value], params: Mapping[str, Param]) -> Shape | None:
    """Shape of the operand that "%name" stands for; None for anything else."""
    if not isinstance(ref, str) or not ref.startswith("%"):
        return None
    name = ref[1:]
    if name in values:
        return values[name].shape
    return params[name].shape if name in params else None


def _matmul(op: Op, values: Mapping[str, Value], params: Mapping[str, Param], written: int) -> int:
    name, attrs = op_name(op.target), dict(op.attrs)
    operands = [shape for _, ref in op.attrs if (shape := shape_of(ref, values, params)) is not None]
    if name == "einsum":
        return _einsum(attrs, values, params)
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        steps = math.prod(operands[0][:-1]) if operands else 0
        return 2 * steps * sum(math.prod(params[p].shape) for p in op.params if len(params[p].shape) > 1)
    if name.startswith("conv"):
        return _convolution(name, attrs, operands, written)
    if name == "scaled_dot_product_attention":
        query, key, value = operands[:3]
        batch_and_queries = math.prod(query[:-1])
        return 2 * batch_and_queries * key[-2] * (query[-1] + value[-1])
    if name in ("addmm", "baddbmm", "addmv"):
        operands = operands[1:]
    if name in ("outer", "ger") or not operands:
        return written
    inner = operands[0][-1] if operands[0] else 1
    return 2 * written * inner


def _convolution(name: str, attrs: dict[str, Literal], operands: list[Shape], written: int) -> int:
    data, weight = operands[0], operands[1]
    if "transpose" in name or attrs.get("transposed") is True:
        return 2 * math.prod(data) * math.prod(weight[1:])
    return 2 * written * math.prod(weight[1:])


def _einsum(attrs: dict[str, Literal], values: Mapping[str, Value], params: Mapping[str, Param]) -> int:
    """All indices of a pair multiplied, operands contracted from left to right without regard to cost."""
    equation, tensors = attrs.get("equation"), attrs.get("tensors")
    if not isinstance(equation, str) or not isinstance(tensors, tuple):
        return 0
    shapes = [shape_of(ref, values, params) or () for ref in tensors]
    letters = einsum_letters(equation, shapes)
    if letters is None:
        return 0
    sizes: dict[str, int] = {}
    for term, shape in zip(letters[0], shapes, strict=True):
        sizes.update(zip(term, shape, strict=True))
    return 2 * math.prod(sizes.values()) * max(1, len(shapes) - 1)


def einsum_letters(equation: str, shapes: list[Shape]) -> tuple[list[list[str]], list[str]] | None:
    """An index name for each axis of each operand, and for the result; None when the equation is not understood."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(shapes):
        return None
    named = [_letters(term, len(shape)) for term, shape in zip(terms, shapes, strict=True)]
    if arrow:
        dots = max((sum(x.startswith(".") for x in term) for term in named), default=0)
        return named, _letters(right, len(right.replace("...", "")) + (dots if "..." in right else 0))
    counts: dict[str, int] = {}
    for term in named:
        for letter in term:
            counts[letter] = counts.get(letter, 0) + 1
    return named, sorted(x for x in counts if x.startswith(".")) + sorted(
        x for x, n in counts.items() if n == 1 and not x.startswith(".")
    )


def _letters(term: str, ndim: int) -> list[str]:
    """ "...ab" with 4 axes -> [".1", ".0", "a", "b"]: the axes of the dots are counted from the right."""
    if "..." not in term:
        return list(term)
    before, after = term.split("...")
    dots = ndim - len(before) - len(after)
    return [*before, *(f".{dots - 1 - i}" for i in range(dots)), *after]

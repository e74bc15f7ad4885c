"""Rules of the loss analysis for sums of products: matrix products, einsum, attention, recurrent cells."""

from __future__ import annotations

from collections.abc import Callable

from autopart.passes.loss.context import OpContext
from autopart.passes.loss.math_rules import broadcast, leading
from autopart.passes.loss.placement import (
    INDEX,
    PARTIAL,
    REPLICATE,
    SHARD,
    Placement,
    added,
    coupled,
    multiplied,
    need_plain,
    same_outer,
    unproven,
)
from autopart.passes.ops.letters import einsum_letters

Rule = Callable[[OpContext], Placement | list[Placement]]


def contract(site: OpContext, terms: list[tuple[Placement, list[str]]], out: list[str]) -> Placement:
    """A sum of products, each axis named: exact when the rows of all operands carry one name; summed over, a sum over
    the rows.  A letter "" stands for an axis of size 1 that is broadcast."""
    kinds = [k for k, _ in terms]
    if any(k.tag == INDEX for k in kinds):
        raise unproven("it multiplies by the number of the row in the micro-batch")
    scale, count = multiplied(kinds)
    names = {letters[k.axis] for k, letters in terms if k.tag == SHARD}
    sums = sum(k.tag == PARTIAL for k in kinds)
    if sums > 1 or (sums and names):
        raise coupled("it multiplies a sum or mean over the rows of the batch with rows, or with another one")
    if sums:
        return Placement(PARTIAL, scale, count)
    if not names:
        return Placement(REPLICATE, scale, count)
    if len(names) > 1 or "" in names:
        raise coupled("it combines every row of the batch with every other")
    name = names.pop()
    outer = same_outer([k for k in kinds if k.tag == SHARD])
    if name not in out:
        return Placement(PARTIAL, scale, count)
    return Placement(SHARD, scale, count, out.index(name), outer)


def product_letters(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[list[str], list[str], list[str]]:
    """Names of the axes of a @ b: batch axes aligned from the right, then rows, inner, columns."""
    batch_a, batch_b = a[:-2], b[:-2]
    ndim = max(len(batch_a), len(batch_b))

    def batch(mine: tuple[int, ...], theirs: tuple[int, ...]) -> list[str]:
        names = []
        for i in range(len(mine), 0, -1):
            other = theirs[-i] if i <= len(theirs) else 1
            names.append("" if mine[-i] == 1 and other != 1 else f"b{i}")
        return names

    left = batch(batch_a, batch_b) + (["m", "k"] if len(a) > 1 else ["k"])
    right = batch(batch_b, batch_a) + (["k", "n"] if len(b) > 1 else ["k"])
    out = [f"b{i}" for i in range(ndim, 0, -1)] + ["m"] * (len(a) > 1) + ["n"] * (len(b) > 1)
    return left, right, out


_FACTORS = {
    "matmul": ("self", "other"),
    "mm": ("self", "mat2"),
    "bmm": ("self", "mat2"),
    "mv": ("self", "vec"),
    "dot": ("self", "tensor"),
    "vdot": ("self", "other"),
    "addmm": ("mat1", "mat2"),
    "addmv": ("mat", "vec"),
    "baddbmm": ("batch1", "batch2"),
}


def matrix_product(site: OpContext) -> Placement:
    """matmul, mm, bmm, mv, dot, and the same with a term added."""
    keys = _FACTORS[site.name]
    a, b = (site.arg(key) for key in keys)
    left, right, out = product_letters(site.shape(a), site.shape(b))
    result = contract(site, [(site.kind(a), left), (site.kind(b), right)], out)
    if site.name not in ("addmm", "addmv", "baddbmm"):
        return result
    if site.differs("alpha") or site.differs("beta"):
        raise coupled("a factor in it changes with the size of the batch")
    return plus(site, result, [(site.argument_kind("self"), len(site.shape(site.arg("self"))))])


def plus(site: OpContext, result: Placement, terms: list[tuple[Placement, int]]) -> Placement:
    """A product with a bias added."""
    kinds = [result, *(k for k, _ in terms)]
    if any(k.tag == INDEX for k in kinds):
        raise unproven("it adds the number of the row in the micro-batch")
    if any(k.tag == PARTIAL for k in kinds):
        if any(k.tag == SHARD for k in kinds):
            raise coupled("it combines rows with a sum or mean over the rows of the batch")
        return added(kinds)
    if len({(k.scale, k.count) for k in kinds}) > 1:
        raise coupled("it adds values that scale differently with the size of the batch")
    return broadcast(site, [(result, len(site.out.shape)), *terms], result.scale, result.count)


def linear(site: OpContext) -> Placement:
    """x @ w.T + b with w and b independent of the batch."""
    x, w, b = site.arg("input"), site.arg("weight"), site.arg("bias")
    ndim = len(site.shape(x))
    names = [f"x{i}" for i in range(ndim - 1)]
    rest = ["n"] if len(site.shape(w)) == 2 else []
    result = contract(site, [(site.kind(x), [*names, "k"]), (site.kind(w), [*rest, "k"])], names + rest)
    if not site.is_tensor(b):
        return result
    return plus(site, result, [(site.kind(b), len(site.shape(b)))])


def einsum(site: OpContext) -> Placement:
    """A sum of products with named axes."""
    equation, refs = site.arg("equation"), site.tensors()
    assert isinstance(equation, str)
    letters = einsum_letters(equation, [site.shape(r) for r in refs])
    if letters is None or any(len(set(term)) < len(term) for term in letters[0]):
        raise unproven("its equation is not understood")
    terms = [(site.kind(r), list(term)) for r, term in zip(refs, letters[0], strict=True)]
    return contract(site, terms, list(letters[1]))


def attention(site: OpContext) -> Placement:
    """scaled_dot_product_attention: the rows must lie before the last two axes of every operand."""
    keys = [k for k in ("query", "key", "value", "attn_mask") if site.is_tensor(site.arg(k))]
    found = [(site.argument_kind(k), len(site.shape(site.arg(k)))) for k in keys]
    if site.differs("scale"):
        raise coupled("its scale changes with the size of the batch")
    return leading(site, found, 2)


def recurrent(site: OpContext) -> list[Placement]:
    """lstm, gru, rnn: exact along the batch axis; states and the cell's results have it at axis 1."""
    ref = site.arg("input")
    kind = site.kind(ref)
    states = site.arg("hx")
    refs = [r for r in (states if isinstance(states, tuple) else (states,)) if isinstance(r, str)]
    found = [site.kind(r) for r in refs]
    need_plain([kind, *found])
    axis = 0 if site.arg("batch_first") is True else 1
    lies = (kind.tag != SHARD or kind.axis == axis) and all(k.tag != SHARD or k.axis == 1 for k in found)
    if not lies or len(site.shape(ref)) != 3:
        raise unproven("the rows of the batch do not lie along its batch axis")
    if not any(k.tag == SHARD for k in [kind, *found]):
        return [Placement(REPLICATE)] * len(site.op.writes)
    outer = same_outer([k for k in [kind, *found] if k.tag == SHARD])
    return [Placement(SHARD, axis=site.values[w].rows_axis or 0, outer=outer) for w in site.op.writes]


PRODUCT_RULES: dict[str, Rule] = {
    **dict.fromkeys(_FACTORS, matrix_product),
    "linear": linear,
    "einsum": einsum,
    "scaled_dot_product_attention": attention,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), recurrent),
}
"""Op name -> rule.  Every rule may rely on: no operand is COUPLED or UNPROVEN."""

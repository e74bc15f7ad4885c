"""Rules for ops of which letters do not tell enough: what moves tokens, attention, and what is made from nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from autopart.ir.graph import Literal
from autopart.passes.tokens.causality import Causality
from autopart.passes.tokens.context import Found, Refused, TokenOp, before
from autopart.passes.tokens.places import FALSE, NEGATIVE, Place
from autopart.passes.tokens.propagation import Letters, by_letters
from autopart.passes.tokens.recipe import (
    CAUSAL,
    DIAGONAL,
    DRAWN,
    MADE,
    PLAIN,
    SIZES,
    WHOLE,
    Form,
    Guard,
    TokenLayout,
)
from autopart.passes.tokens.state_rules import STATE_RULES, shifted, window

Rule = Callable[[TokenOp, Causality, list[Guard]], Found]


def reshape(op: TokenOp, causality: Causality, guards: list[Guard]) -> Found:
    """Row-major order is kept: what stands before the tokens must be as many elements on both sides."""
    form, shape, out = op.forms[0], op.model.shape(op.refs[0]), op.out
    if form.halo:
        raise Refused("it reshapes what holds tokens of the slice before")
    growing = list(op.model.varying(out.name))
    if len(growing) != len(list(form.roles())):
        raise Refused("it merges the tokens of queries and keys")
    pairs = sorted(form.roles(), key=lambda role: role[1].axis)
    found = Form(order=form.order)
    for (prefix, layout), axis in zip(pairs, growing, strict=True):
        ahead = before(shape, layout.axis) * layout.stride
        stride, rest = divmod(ahead, before(out.shape, axis))
        tokens = op.model.tokens - layout.short
        block, more = divmod(out.shape[axis], stride * tokens) if stride else (0, 1)
        if rest or more or not block:
            raise Refused("the tokens are no longer in order after it")
        if form.order is not None and (stride, block) != (layout.stride, layout.block):
            raise Refused("it reshapes tokens that were sorted")
        moved = replace(layout, axis=axis, stride=stride, block=block)
        found = replace(found, keys=moved) if prefix else replace(found, queries=moved)
    return op.found(found, (form, *([WHOLE] * (len(op.refs) - 1))), SIZES)


def take(op: TokenOp, causality: Causality, guards: list[Guard]) -> Found:
    """slice, narrow, split, chunk: of the tokens all, or all but the last ones."""
    form, shape = op.forms[0], op.model.shape(op.refs[0])
    axis = op.axis("dim", len(shape))
    layout = next((layout for _, layout in form.roles() if layout.axis == axis), None)
    if layout is None:
        return by_letters(op, causality)
    size, step = shape[axis], op.number("step", 1)
    start, end = _bound(op.arg("start"), 0, size), _bound(op.arg("end"), size, size)
    if form.order is not None:
        raise Refused("it picks some of tokens that were sorted")
    if form.halo and form.keys is None and op.name == "slice":
        return window(op, start, end, step)
    if op.name != "slice" or step != 1 or form.halo:
        raise Refused(f"it picks some of the tokens by their place ({op.name} along them)")
    twin = dict(op.twin.attrs)
    fewer = layout.stride * (op.model.fewer - layout.short) * layout.block
    other_start, other_end = _bound(twin.get("start"), 0, fewer), _bound(twin.get("end"), fewer, fewer)
    if (start, end) == (0, size) and (other_start, other_end) == (0, fewer):
        return op.found(form, (form,), SIZES)
    missing = size - end
    plain = (layout.stride, layout.block) == (1, 1) and form.keys is None
    if start or other_start or missing != fewer - other_end or not plain:
        raise Refused(f"it picks some of the tokens by their place ([{start}:{end}] of {size})")
    return op.found(Form(queries=replace(layout, short=layout.short + missing)), (form,), SIZES, missing)


def _bound(value: Literal, missing: int, size: int) -> int:
    number = value if type(value) is int else missing
    return max(0, min(size, number + size if number < 0 else number))


def join(op: TokenOp, causality: Causality, guards: list[Guard]) -> Found:
    """cat, stack: of values with the same tokens, along another axis.  What is empty does not count."""
    stacked, shapes = op.name == "stack", [op.model.shape(ref) for ref in op.refs]
    ndim = len(op.out.shape)
    dim = op.axis("dim", ndim)
    filled = [n for n, shape in enumerate(shapes) if math.prod(shape)]
    first = next(n for n in filled if not op.forms[n].whole)
    form = op.forms[first]
    if form.partial or form.halo:
        raise Refused("it joins a sum over the tokens with others" if form.partial else "it joins tokens of two slices")
    if not stacked and any(layout.axis == dim for _, layout in form.roles()):
        if len(filled) > 1:
            moved = shifted(op, dim)
            if moved is None:
                raise Refused("it appends to the tokens")
            return moved
        return op.found(form, tuple(form if n == first else WHOLE for n in range(len(op.refs))))
    reads = []
    for number, other in enumerate(op.forms):
        if number in filled and not other.whole and _layouts(other) != _layouts(form):
            raise Refused("it joins values that hold the tokens in different orders")
        grows = number in filled and op.model.varying(op.refs[number])
        if number in filled and set(op.model.varying(op.refs[number])) != {layout.axis for _, layout in form.roles()}:
            raise Refused("it joins tokens with what is the same for all of them")
        reads.append(form if grows else WHOLE)

    def placed(layout: TokenLayout | None) -> int | None:
        return None if layout is None else layout.axis + (stacked and dim <= layout.axis)

    return op.found(form.moved(queries=placed(form.queries), keys=placed(form.keys)), tuple(reads))


def _layouts(form: Form) -> tuple[TokenLayout | None, TokenLayout | None]:
    return form.queries, form.keys


def attention(op: TokenOp, causality: Causality, guards: list[Guard]) -> Found:
    """Scaled dot product attention: causal by its argument, or by its mask."""
    found = Letters(op, causality, keys=("k",), allowed=("q", "k"))
    query, key = found.roles.get("q"), found.roles.get("k")
    if set(found.roles) - {"q", "k"} and ("q" in found.roles or "k" in found.roles):
        raise Refused("it attends along more than the tokens")
    result = found.found()
    if key is None:
        return result
    if query is None or query[0]:
        raise Refused("what is asked for does not hold tokens, and the keys do: it attends to all tokens")
    if op.arg("is_causal") is True:
        lengths = {(layout.stride, layout.block, layout.short) for _, layout in (query, key)}
        if len(lengths) > 1 or next(iter(lengths))[:2] != (1, 1):
            raise Refused("its is_causal= is meant for queries and keys of one length")
        return replace(result, recipe=replace(result.recipe, how=CAUSAL))
    mask = op.ref("attn_mask")
    if mask is None:
        raise Refused("it attends to all tokens: there is neither a mask nor is_causal=", "use causal attention")
    names = found.operands[3]
    place = Place(mask, _index(names, "q", op.model.shape(mask)), _index(names, "k", op.model.shape(mask)))
    of_bools = op.model.values[mask].dtype == "bool" if mask in op.model.values else False
    if not causality.relies(op, place, FALSE if of_bools else NEGATIVE):
        raise Refused("its mask is not proven to hide every later token", _MASK)
    _note(guards, None if of_bools else causality.guard(op, place))
    return result


_MASK = "combine the mask with a causal one by &, torch.where or masked_fill, with -inf or the least number of its type"


def _index(names: tuple[str, ...], letter: str, shape: tuple[int, ...]) -> int | None:
    return names.index(letter) if letter in names and shape[names.index(letter)] > 1 else None


def _note(guards: list[Guard], guard: Guard | None) -> None:
    if guard is not None and all((guard.masks, guard.lifts) != (other.masks, other.lifts) for other in guards):
        guards.append(guard)


def softmax(op: TokenOp, causality: Causality, guards: list[Guard]) -> Found:
    """Along keys, of which the later ones are hidden; or along an axis without tokens."""
    form, ndim = op.forms[0], len(op.out.shape)
    along = op.axis("dim", ndim, -1)
    if form.keys is None or form.keys.axis != along:
        return by_letters(op, causality)
    if form.queries is None:
        raise Refused("it is taken over all tokens")
    place = Place(op.refs[0], form.queries.axis, along)
    if not causality.relies(op, place, NEGATIVE):
        raise Refused("it is taken over all tokens: that the later ones are hidden is not proven", _MASK)
    _note(guards, causality.guard(op, place))
    return op.found(form, (form,))


def triangle(op: TokenOp, causality: Causality, guards: list[Guard]) -> Found:
    """tril, triu of scores: the diagonal lies as many columns to the right as there are tokens before the slice."""
    form, last = op.forms[0], len(op.out.shape) - 1
    if form.queries is None or form.keys is None:
        return by_letters(op, causality)
    if (form.queries.axis, form.keys.axis) != (last - 1, last):
        raise Refused("it cuts scores along other axes than queries and keys")
    if any((layout.stride, layout.block) != (1, 1) for _, layout in form.roles()):
        raise Refused("it cuts scores whose tokens are merged with another axis")
    return op.found(form, (form,), DIAGONAL)


def made(op: TokenOp, causality: Causality, guards: list[Guard]) -> Found:
    """zeros_like(x) depends on no number of x."""
    if op.name.removeprefix("new_").removesuffix("_like") not in ("zeros", "ones", "full", "empty"):
        raise Refused("it makes numbers in a way that is not known")
    if isinstance(op.arg("fill_value"), str):
        raise Refused("it fills with a number that is computed")
    return op.found(WHOLE, (WHOLE,) * len(op.refs), MADE)


def repeated(op: TokenOp, causality: Causality, guards: list[Guard]) -> Found:
    """repeat, tile: not along the tokens."""
    form, shape = op.forms[0], op.model.shape(op.refs[0])
    ahead = len(op.out.shape) - len(shape)
    if op.differing() or form.halo or form.partial:
        raise Refused("it repeats tokens")
    moved = {
        prefix: layout.axis + ahead
        for prefix, layout in form.roles()
        if op.out.shape[layout.axis + ahead] == shape[layout.axis]
    }
    if len(moved) < len(list(form.roles())):
        raise Refused("it repeats tokens")
    return op.found(form.moved(queries=moved.get(False), keys=moved.get(True)), (form,), PLAIN)


def index(op: TokenOp, causality: Causality, guards: list[Guard]) -> Found:
    """x[:, :, i] along axes without tokens; table[i] with an index for every token.

    What is picked lies where the indices lie, if those are next to each other, else in front.
    """
    shape, form, used = op.model.shape(op.refs[0]), op.forms[0], _picks(op)
    axes = sorted(used)
    ndim = max(len(op.model.shape(op.refs[number])) for number in used.values())
    adjacent = axes == list(range(axes[0], axes[0] + len(axes)))
    start = axes[0] if adjacent else 0
    picked = [op.forms[number] for number in used.values() if not op.forms[number].whole]
    if form.partial or form.halo or any(p.partial or p.halo or p.keys is not None for p in picked):
        raise Refused("it indexes with, or into, what is no value for each token")
    reads = [WHOLE] * len(op.refs)
    if form.whole:
        if len({(p, op.model.shape(op.refs[n])) for p, n in zip(op.forms[1:], range(1, 9), strict=False)}) > 1:
            raise Refused("it picks by several indices, which do not all hold the tokens")
        reads[1:] = op.forms[1:]
        return op.found(picked[0].moved(queries=start + _axis_of(picked[0])), tuple(reads))
    if picked or any(op.model.varying(op.refs[n]) for n in used.values()) or op.differing():
        raise Refused("it picks, for every token, from the tokens")
    if any(layout.axis in axes for _, layout in form.roles()):
        raise Refused("it picks some of the tokens by an index")
    of_bools = {op.model.values[r].dtype if r in op.model.values else op.model.params[r].dtype for r in op.refs[1:]}
    if of_bools & {"bool", "uint8"} or len(shape) < len(axes):
        raise Refused("it indexes with a mask")

    def moved(layout: TokenLayout | None) -> int | None:
        if layout is None:
            return None
        before = sum(1 for axis in range(layout.axis) if axis not in axes)
        return before + ndim if not adjacent or layout.axis > start else before

    reads[0] = form
    return op.found(form.moved(queries=moved(form.queries), keys=moved(form.keys)), tuple(reads))


def _axis_of(form: Form) -> int:
    assert form.queries is not None
    return form.queries.axis


def _picks(op: TokenOp) -> dict[int, int]:
    """Axis to the number of the operand that indexes it."""
    if op.name == "index_select":
        return {op.axis("dim", len(op.model.shape(op.refs[0]))): 1}
    picks = op.arg("indices")
    assert isinstance(picks, tuple)
    return {axis: n for n, axis in enumerate((a for a, pick in enumerate(picks) if isinstance(pick, str)), start=1)}


def in_pairs(op: TokenOp, causality: Causality, guards: list[Guard]) -> Found:
    """view_as_complex, view_as_real: a last axis of two real numbers is one complex number."""
    form = op.forms[0]
    if form.partial or form.halo:
        raise Refused("it pairs what is no value for each token")
    return op.found(form, (form,))


def repeat_interleave(op: TokenOp, causality: Causality, guards: list[Guard]) -> Found:
    """Of a known number along an axis without tokens."""
    form = op.forms[0]
    axis = op.axis("dim", len(op.out.shape))
    known = type(op.arg("repeats")) is int and type(op.arg("dim")) is int and not op.differing()
    if not known or form.partial or form.halo or any(layout.axis == axis for _, layout in form.roles()):
        raise Refused("it repeats tokens")
    return op.found(form, (form, *([WHOLE] * (len(op.refs) - 1))))


def batch_norm(op: TokenOp, causality: Causality, guards: list[Guard]) -> Found:
    """In training it uses statistics of all tokens."""
    if op.arg("training") is not False:
        raise Refused("it takes statistics over all tokens", "use a norm over features")
    found = Letters(op, causality, allowed=("n", *(f".{n}" for n in range(8))))
    return found.found()


def broadcast(op: TokenOp, causality: Causality, guards: list[Guard]) -> Found:
    """broadcast_tensors of what has one shape already: as a loss does with its operands."""
    form, shape = next(form for form in op.forms if not form.whole), op.out.shape
    if form.partial or form.halo or any(op.model.shape(ref) != shape for ref in op.refs):
        raise Refused("it spreads tokens over another shape")
    axes = tuple(sorted(layout.axis for _, layout in form.roles()))
    for ref, other in zip(op.refs, op.forms, strict=True):
        if other != form and not (other.whole and op.model.varying(ref) == axes):
            raise Refused("its operands hold the tokens in different orders")
    return op.found(form, (form,) * len(op.refs))


def embedding(op: TokenOp, causality: Causality, guards: list[Guard]) -> Found:
    """Rows of a table by number."""
    if op.arg("scale_grad_by_freq") is True:
        raise Refused("it scales gradients by how often an index stands in the whole batch")
    return by_letters(op, causality)


def drawn(op: TokenOp, found: Found) -> Found:
    """A random op draws for the whole sequence, and takes what belongs to the slice: what it does not have of its
    operands does not count for that."""
    reads = tuple(WHOLE if form.whole else read for form, read in zip(op.forms, found.recipe.reads, strict=True))
    if op.name not in DRAWS_ALIKE or any(form.halo or form.order is not None for form in (*op.forms, *found.forms)):
        raise Refused("it draws random numbers, for every slice anew", "switch it off, or use torch's dropout")
    return Found(found.forms, replace(found.recipe, reads=reads, how=DRAWN))


DRAWS_ALIKE = ("dropout", "native_dropout", "scaled_dot_product_attention")
"""Random ops that draw as many numbers whatever their operands hold."""


def opaque(op: TokenOp) -> Found:
    """An op that no rule knows, of one operand with tokens: it is tried whether it keeps them apart."""
    held = [form for form in op.forms if not form.whole]
    form = held[0]
    unknown = Refused("no rule says how it treats tokens", "register it (autopart.register_op)")
    if len(held) > 1 or form.partial or form.halo or form.keys is not None or form.queries is None or op.op.random:
        raise unknown
    grows = {op.model.varying(name) for name in op.op.writes}
    if len(grows) != 1 or len(next(iter(grows))) != 1 or op.differing():
        raise unknown
    found = form.moved(queries=next(iter(grows))[0])
    if not all(op.fits(name, found) for name in op.op.writes) or not op.model.numbers.apart(
        op.op.name, tuple(op.forms), found
    ):
        raise unknown
    return op.found(found, tuple(op.forms))


RULES: dict[str, Rule] = {
    **dict.fromkeys(("reshape", "view", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten"), reshape),
    **dict.fromkeys(("slice", "narrow", "split", "split_with_sizes", "chunk"), take),
    **dict.fromkeys(("cat", "stack"), join),
    "scaled_dot_product_attention": attention,
    "embedding": embedding,
    **dict.fromkeys(("view_as_complex", "view_as_real"), in_pairs),
    "broadcast_tensors": broadcast,
    **dict.fromkeys(("softmax", "_softmax", "_safe_softmax"), softmax),
    **dict.fromkeys(("tril", "triu"), triangle),
    **dict.fromkeys(("repeat", "tile"), repeated),
    "repeat_interleave": repeat_interleave,
    **dict.fromkeys(("index", "_unsafe_index", "index_select"), index),
    **STATE_RULES,
    **dict.fromkeys(("batch_norm", "native_batch_norm", "_native_batch_norm_legit_functional"), batch_norm),
}
"""Op name -> rule.  Every rule may rely on: no operand is refused, and one at least holds tokens."""

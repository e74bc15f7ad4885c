"""Rules for ops that letters do not describe enough: what moves tokens, attention, what is made from nothing, losses.

A rule returns the recipe of an op, or raises Refused.  It may rely on: no operand is refused or `partial`, at least one
holds tokens, and none has a halo unless the op is one of `HALO`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from autopart.passes.ops.context import around_indices
from autopart.passes.ops.letters import bound, ints
from autopart.passes.ops.row import VIEW
from autopart.passes.ops.table import op_name
from autopart.passes.tokens import recipe as words
from autopart.passes.tokens.context import Refused, TokenOp
from autopart.passes.tokens.propagation import TokenLetters, by_letters
from autopart.passes.tokens.recipe import WHOLE, Form, OpRecipe, QueryKeyAxes, TokenLayout
from autopart.passes.tokens.state_rules import STATE_RULES, shifted, window

_NONE, _MEAN = 0, 1
_LINEAR = ("mul", "div", "neg", "_to_copy", "clone", "detach", "sum", "to", "alias")
_DRAWS_ALIKE = ("dropout", "native_dropout", "scaled_dot_product_attention")
"""Random ops whose draws depend on no number of their operands."""
HALO = (*STATE_RULES, "slice")
"""Ops whose rules know operands that hold tokens before their slice too."""


def reshape(op: TokenOp) -> OpRecipe:
    """Row-major order is kept: the axes before the tokens must have the same number of elements on both sides."""
    form, shape, out = op.forms[0], op.shapes[0], op.shape
    growing = op.model.varying(op.op.writes[0])
    if len(growing) != len(list(form.roles())):
        raise Refused("it merges the tokens of queries and keys")
    found = Form(order=form.order)
    for (prefix, layout), axis in zip(sorted(form.roles(), key=lambda role: role[1].axis), growing, strict=True):
        ahead = math.prod(shape[: layout.axis]) * layout.stride
        stride, rest = divmod(ahead, math.prod(out[:axis]))
        block, more = divmod(out[axis], stride * (op.model.tokens - layout.short)) if stride else (0, 1)
        if rest or more or not block:
            raise Refused("the tokens are no longer in order after it")
        if form.order is not None and (stride, block) != (layout.stride, layout.block):
            raise Refused("it reshapes tokens that were sorted")
        moved = replace(layout, axis=axis, stride=stride, block=block)
        found = replace(found, keys=moved) if prefix else replace(found, queries=moved)
    return op.recipe(found, (form, *([WHOLE] * (len(op.refs) - 1))), words.SIZES)


def take(op: TokenOp) -> OpRecipe:
    """slice, narrow, split, chunk: along the tokens all of them, or all but the last ones."""
    form, shape = op.forms[0], op.shapes[0]
    axis = op.axis("dim", len(shape))
    layout = next((layout for _, layout in form.roles() if layout.axis == axis), None)
    if layout is None:
        return by_letters(op)
    size, step = shape[axis], op.number("step", 1)
    start, end = bound(op.arg("start"), 0, size), bound(op.arg("end"), size, size)
    if form.order is not None:
        raise Refused("it picks some of tokens that were sorted")
    if form.halo:
        return window(op, start, end, step)
    if op.name != "slice" or step != 1:
        raise Refused(f"it picks some of the tokens by their place ({op.name} along them)")
    twin = op.other_attrs
    fewer = layout.stride * (op.model.fewer - layout.short) * layout.block
    other_start, other_end = bound(twin.get("start"), 0, fewer), bound(twin.get("end"), fewer, fewer)
    if (start, end) == (0, size) and (other_start, other_end) == (0, fewer):
        return op.recipe(form, how=words.SIZES)
    missing = size - end
    plain = (layout.stride, layout.block) == (1, 1) and form.keys is None
    if start or other_start or missing != fewer - other_end or not plain:
        raise Refused(f"it picks some of the tokens by their place ([{start}:{end}] of {size})")
    return op.recipe(Form(queries=replace(layout, short=layout.short + missing)), how=words.SIZES, amount=missing)


def join(op: TokenOp) -> OpRecipe:
    """cat, stack: of values with the same tokens, along another axis.  Empty operands do not count."""
    stacked, dim = op.name == "stack", op.axis("dim", len(op.shape))
    filled = [number for number, shape in enumerate(op.shapes) if math.prod(shape)]
    first = next(number for number in filled if not op.forms[number].whole)
    form = op.forms[first]
    axes = {layout.axis for _, layout in form.roles()}
    if not stacked and dim in axes:
        if len(filled) > 1:
            return shifted(op, dim)
        return op.recipe(form, [form if number == first else WHOLE for number in range(len(op.refs))])
    reads = [WHOLE] * len(op.refs)
    for number in filled:
        other = op.forms[number]
        if not other.whole and (other.queries, other.keys) != (form.queries, form.keys):
            raise Refused("it joins values that hold the tokens in different orders")
        if set(op.model.varying(op.refs[number])) != axes:
            raise Refused("it joins tokens with what is the same for all of them")
        reads[number] = form
    return op.recipe(form.moved(lambda axis: axis + (stacked and dim <= axis)), reads)


def attention(op: TokenOp) -> OpRecipe:
    """Scaled dot product attention: causal by its argument, or by its mask."""
    letters = TokenLetters(op, keys=("k",), allowed=("q", "k"))
    query, key = letters.roles.get("q"), letters.roles.get("k")
    if letters.roles.keys() - {"q", "k"} and (query or key):
        raise Refused("it attends along more than the tokens")
    recipe = letters.recipe()
    if key is None:
        return recipe
    if query is None or query[0]:
        raise Refused("its queries do not hold tokens, and its keys do: it attends to all tokens")
    if op.arg("is_causal") is True:
        lengths = {(layout.stride, layout.block, layout.short) for _, layout in (query, key)}
        if len(lengths) > 1 or next(iter(lengths))[:2] != (1, 1):
            raise Refused("its is_causal= is meant for queries and keys of one length")
        return replace(recipe, how=words.CAUSAL)
    mask = op.ref("attn_mask")
    if mask is None:
        raise Refused("it attends to all tokens: there is neither a mask nor is_causal=", "use causal attention")
    pairs = zip(letters.operands[3], op.model.shape(mask), strict=True)
    axes = {name: axis for axis, (name, size) in enumerate(pairs) if size > 1}
    hides = words.FALSE if op.model.dtype(mask) == "bool" else words.NEGATIVE
    return replace(recipe, relies_on=((QueryKeyAxes(mask, axes.get("q"), axes.get("k")), hides),))


def softmax(op: TokenOp) -> OpRecipe:
    """Along keys, of which the later ones are hidden; or along an axis without tokens."""
    form = op.forms[0]
    along = op.axis("dim", len(op.shape), -1)
    if form.keys is None or form.keys.axis != along:
        return by_letters(op)
    if form.queries is None:
        raise Refused("it is taken over all tokens")
    scores = QueryKeyAxes(op.refs[0], form.queries.axis, along)
    return replace(op.recipe(form), relies_on=((scores, words.NEGATIVE),))


def largest(op: TokenOp) -> OpRecipe:
    """amax over keys, of which the later ones are -inf; or along an axis without tokens."""
    form, keepdim = op.forms[0], len(op.shape) == len(op.shapes[0])
    dims = {axis % len(op.shapes[0]) for axis in ints(op.arg("dim"))}
    if form.queries is None or form.keys is None or dims != {form.keys.axis}:
        return by_letters(op)
    axis = form.queries.axis - (not keepdim and form.queries.axis > form.keys.axis)
    scores = QueryKeyAxes(op.refs[0], form.queries.axis, form.keys.axis)
    recipe = op.recipe(Form(queries=replace(form.queries, axis=axis)), (form,))
    return replace(recipe, relies_on=((scores, words.MINUS_INF),))


def triangle(op: TokenOp) -> OpRecipe:
    """tril, triu of scores: the diagonal moves to the right by the number of tokens before the slice."""
    form, last = op.forms[0], len(op.shape) - 1
    if form.queries is None or form.keys is None:
        return by_letters(op)
    if (form.queries.axis, form.keys.axis) != (last - 1, last):
        raise Refused("it cuts scores along other axes than queries and keys")
    if any((layout.stride, layout.block) != (1, 1) for _, layout in form.roles()):
        raise Refused("it cuts scores whose tokens are merged with another axis")
    return op.recipe(form, how=words.DIAGONAL)


def made(op: TokenOp) -> OpRecipe:
    """zeros_like(x) depends on no number of x."""
    if op.name.removeprefix("new_").removesuffix("_like") not in ("zeros", "ones", "full", "empty"):
        raise Refused("it makes numbers in a way that is not known")
    if isinstance(op.arg("fill_value"), str):
        raise Refused("it fills with a number that is computed")
    return op.recipe(WHOLE, (WHOLE,) * len(op.refs), words.MADE)


def repeated(op: TokenOp) -> OpRecipe:
    """repeat, tile: not along the tokens."""
    form, shape = op.forms[0], op.shapes[0]
    ahead = len(op.shape) - len(shape)
    if op.differing() or any(op.shape[layout.axis + ahead] != shape[layout.axis] for _, layout in form.roles()):
        raise Refused("it repeats tokens")
    return op.recipe(form.moved(lambda axis: axis + ahead))


def repeat_interleave(op: TokenOp) -> OpRecipe:
    """By a known number along an axis without tokens."""
    form = op.forms[0]
    axis = op.axis("dim", len(op.shape))
    known = type(op.arg("repeats")) is int and type(op.arg("dim")) is int and not op.differing()
    if not known or any(layout.axis == axis for _, layout in form.roles()):
        raise Refused("it repeats tokens")
    return op.recipe(form, (form, *([WHOLE] * (len(op.refs) - 1))))


def index(op: TokenOp) -> OpRecipe:
    """x[:, :, i] along axes without tokens; table[i] with an index for every token."""
    shape, form = op.shapes[0], op.forms[0]
    axes, names = zip(*sorted(op.picks(len(shape)).items()), strict=True)
    numbers = [op.refs.index(name[1:]) for name in names]
    start, moved = around_indices(axes, max(len(op.shapes[number]) for number in numbers))
    picked = [op.forms[number] for number in numbers if not op.forms[number].whole]
    if form.whole:
        if len(set(zip(op.forms[1:], op.shapes[1:], strict=True))) > 1:
            raise Refused("it picks by several indices, which do not all hold the tokens")
        if picked[0].queries is None or picked[0].keys is not None:
            raise Refused("it picks, for every two tokens, by an index")
        return op.recipe(picked[0].moved(lambda axis: start + axis))
    if picked or any(op.model.varying(op.refs[number]) for number in numbers) or op.differing():
        raise Refused("it picks, for every token, from the tokens")
    if any(layout.axis in axes for _, layout in form.roles()):
        raise Refused("it picks some of the tokens by an index")
    if any(op.model.dtype(ref) in ("bool", "uint8") for ref in op.refs[1:]) or len(shape) < len(axes):
        raise Refused("it indexes with a mask")
    return op.recipe(form.moved(moved))


def batch_norm(op: TokenOp) -> OpRecipe:
    """In training it uses statistics of all tokens."""
    if op.arg("training") is not False:
        raise Refused("it takes statistics over all tokens", "use a norm over features")
    return TokenLetters(op, allowed=("n", *(f".{n}" for n in range(8)))).recipe()


def broadcast(op: TokenOp) -> OpRecipe:
    """broadcast_tensors of operands that have one shape already: as a loss does with its operands."""
    form = next(form for form in op.forms if not form.whole)
    if any(shape != op.shape for shape in op.shapes):
        raise Refused("it spreads tokens over another shape")
    axes = tuple(sorted(layout.axis for _, layout in form.roles()))
    for ref, other in zip(op.refs, op.forms, strict=True):
        if other != form and not (other.whole and op.model.varying(ref) == axes):
            raise Refused("its operands hold the tokens in different orders")
    return op.recipe(form, (form,) * len(op.refs))


def embedding(op: TokenOp) -> OpRecipe:
    """Rows of a table by number."""
    if op.arg("scale_grad_by_freq") is True:
        raise Refused("it scales gradients by how often an index occurs in the whole batch")
    return by_letters(op)


def drawn(op: TokenOp, recipe: OpRecipe) -> OpRecipe:
    """A random op draws for the whole sequence, and takes what belongs to the slice.  recipe: of the op without its
    randomness."""
    reads = tuple(WHOLE if form.whole else read for form, read in zip(op.forms, recipe.reads, strict=True))
    sorts = any(form.order is not None for form in (*op.forms, *recipe.results.values()))
    if op.name not in _DRAWS_ALIKE or sorts:
        raise Refused("each slice would draw other random numbers", "switch it off, or use torch's dropout")
    return replace(recipe, reads=reads, how=words.DRAWN)


def loss(op: TokenOp) -> OpRecipe:
    """A loss function, of predictions and targets that hold the same tokens."""
    if op.row.averages not in ("classes", "elements"):
        raise Refused("it is not known how it averages over the tokens")
    form = next(form for form in op.forms if not form.whole)
    if form.queries is None or form.keys is not None:
        raise Refused("it takes a loss of values that do not belong to one token each")
    by_class = op.row.averages == "classes"
    if not by_class and len(set(op.shapes)) > 1:
        raise Refused("its operands differ in shape")
    numbers = range(len(op.refs))
    reads = _reads_of_classes(op) if by_class else tuple(_aligned(op, number, form) for number in numbers)
    reduction = op.number("reduction", _MEAN)
    if reduction == _NONE:
        return op.recipe(reads[by_class], reads)
    return op.recipe(Form(partial=op.op.name), reads, words.LOSS if reduction == _MEAN else words.PLAIN)


def _reads_of_classes(op: TokenOp) -> tuple[Form, ...]:
    """Classes lie along axis 1 (axis 0 of a single prediction)."""
    form, logits, target = op.forms[0], op.shapes[0], op.shapes[1]
    layout = form.queries
    classes = 1 if len(logits) > 1 else 0
    if layout is None or layout.axis == classes or len(target) != len(logits) - 1:
        raise Refused("its classes lie along the tokens, or its targets are probabilities")
    if op.ref("weight") is not None and op.number("reduction", _MEAN) == _MEAN and op.arg("label_smoothing", 0.0):
        raise Refused("it weighs classes and smooths them at once")
    axis = layout.axis if layout.axis < classes else layout.axis - 1
    aligned = TokenLayout(axis, layout.stride, layout.block, layout.short)
    return (form, _aligned(op, 1, Form(queries=aligned)), *((WHOLE,) * (len(op.refs) - 2)))


def _aligned(op: TokenOp, number: int, form: Form) -> Form:
    """What an operand has to hold beside one of this form."""
    own, layout = op.forms[number], form.queries
    assert layout is not None
    if own.whole:
        size = op.shapes[number][layout.axis]
        if op.model.varying(op.refs[number]) != (layout.axis,) or size != op.model.full_size(layout):
            raise Refused("its operands do not hold the same tokens")
        return form
    if own != form:
        raise Refused("its operands hold the tokens in different orders")
    return form


def of_sums(op: TokenOp) -> OpRecipe:
    """The rule for an op with an operand that is a sum over the tokens: linear ops keep it one."""
    first = next(form for form in op.forms if form.partial)
    partial = [bool(form.partial) for form in op.forms]
    not_linear = Refused(
        f"{op_name(op.model.ops[first.partial].target)} sums over all tokens, and {op.name} needs that sum as a whole",
        "take the loss token by token",
    )
    others = [form for form in op.forms if not form.partial]
    if op.op.random or op.model.varying(op.op.writes[0]) or any(not form.whole for form in others):
        raise not_linear
    reads = tuple(form if form.partial else WHOLE for form in op.forms)
    if op.name in ("add", "sub", "rsub", "stack", "cat"):
        if op.name in ("add", "sub", "rsub") and len(op.refs) < 2 and op.arg("other"):
            raise Refused("it adds a number to a sum over the tokens", "leave the number out: it has no gradient")
        return op.recipe(first, reads, words.PLAIN if all(partial) else words.ONCE)
    if op.name in ("mul", "div") and (sum(partial) > 1 or (op.name == "div" and not partial[0])):
        raise not_linear
    view = op.row.family == VIEW and op.name not in ("select", "unbind")
    if view or op.name in _LINEAR or (op.name == "mean" and not op.shape):
        return op.recipe(first, reads)
    raise not_linear


def opaque(op: TokenOp) -> OpRecipe:
    """An op without a rule, of one operand with tokens: running it on slices shows whether it keeps them apart."""
    form = next(form for form in op.forms if not form.whole)
    grows = {op.model.varying(name) for name in op.op.writes}
    plain = sum(not other.whole for other in op.forms) == 1 and form.queries is not None and form.keys is None
    if plain and not op.op.random and not op.differing() and len(grows) == 1:
        axes = grows.pop()
        found = form.moved(lambda _: axes[0]) if len(axes) == 1 else WHOLE
        fits = found is not WHOLE and all(op.model.fits(name, found) for name in op.op.writes)
        if fits and op.model.numbers.apart(op.op.name, tuple(op.forms), found):
            return op.recipe(found)
    raise Refused("no rule says how it treats tokens", "register it (autopart.register_op)")


RULES: dict[str, Callable[[TokenOp], OpRecipe]] = {
    **dict.fromkeys(("reshape", "view", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten"), reshape),
    **dict.fromkeys(("slice", "narrow", "split", "split_with_sizes", "chunk"), take),
    **dict.fromkeys(("cat", "stack"), join),
    "scaled_dot_product_attention": attention,
    "embedding": embedding,
    # a last axis of two real numbers is one complex number
    **dict.fromkeys(("view_as_complex", "view_as_real"), lambda op: op.recipe(op.forms[0])),
    "broadcast_tensors": broadcast,
    **dict.fromkeys(("softmax", "_softmax", "_safe_softmax"), softmax),
    "amax": largest,
    **dict.fromkeys(("tril", "triu"), triangle),
    **dict.fromkeys(("repeat", "tile"), repeated),
    "repeat_interleave": repeat_interleave,
    **dict.fromkeys(("index", "_unsafe_index", "index_select"), index),
    **STATE_RULES,
    **dict.fromkeys(("batch_norm", "native_batch_norm", "_native_batch_norm_legit_functional"), batch_norm),
}
"""Op name -> rule."""

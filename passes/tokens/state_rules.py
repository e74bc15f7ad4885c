"""Rules for what reaches a known number of tokens back: running sums, causal convolutions, shifts to the right."""

from __future__ import annotations

from dataclasses import replace

from autopart.passes.ops.letters import ints
from autopart.passes.tokens import recipe as words
from autopart.passes.tokens.context import Refused, TokenOp
from autopart.passes.tokens.propagation import by_letters
from autopart.passes.tokens.recipe import WHOLE, Form, OpRecipe, TokenLayout


def running_sum(op: TokenOp) -> OpRecipe:
    """cumsum along the tokens continues from the last token of the slice before."""
    form = op.forms[0]
    along = op.axis("dim", len(op.shape))
    if form.keys is not None and form.keys.axis == along:
        raise Refused("it sums along keys")
    if form.queries is None or form.queries.axis != along:
        return by_letters(op)
    if not _plain(form.queries) or form.keys is not None or form.halo:
        raise Refused("it sums along tokens that are merged with another axis")
    return op.recipe(form, how=words.CARRY, amount=1)


def _plain(layout: TokenLayout) -> bool:
    return (layout.stride, layout.block) == (1, 1)


def pad(op: TokenOp) -> OpRecipe:
    """In front of the tokens: the tokens before the slice stand there instead, except before the first token."""
    form, ndim = op.forms[0], len(op.shape)
    layout = form.queries
    amounts = ints(op.arg("pad"))
    padded = {ndim - 1 - place // 2 for place, amount in enumerate(amounts) if amount}
    if not form.halo and not any(held.axis in padded for _, held in form.roles()):
        return op.recipe(form)
    constant = op.arg("mode", "constant") == "constant"
    if layout is None or form.keys is not None or form.halo or not _plain(layout) or not constant or op.differing():
        raise Refused("it pads tokens")
    before, after = amounts[2 * (ndim - 1 - layout.axis) :][:2]
    if layout.short:  # pad(x[:, :-n], n in front): every token sees the n-th before it
        if (before, after) != (layout.short, 0):
            raise Refused("it pads tokens of which the last ones are cut off")
        return op.recipe(Form(queries=replace(layout, short=0)), [replace(form, halo=before)], words.SHIFT, before)
    if before < 1 or after not in (0, -before):
        raise Refused("it pads tokens behind the last one")
    found = form if after else replace(form, halo=before)
    return op.recipe(found, [replace(form, halo=before)], words.SHIFT if after else words.PADDED, before)


def convolution(op: TokenOp) -> OpRecipe:
    """Along tokens that were padded in front; or that it pads on both sides, where the end is cut off later."""
    form, layout, kernel = op.forms[0], op.forms[0].queries, op.shapes[1]
    if layout is None or layout.axis < len(op.shapes[0]) - 1 or len(kernel) != 3:
        return by_letters(op)
    if isinstance(op.arg("padding"), str):
        raise Refused("it pads its operand by itself")
    defaults = {"stride": 1, "padding": 0, "dilation": 1}
    stride, padding, dilation = (next(iter(ints(op.arg(key))), n) for key, n in defaults.items())
    reach = dilation * (kernel[-1] - 1)
    if form.keys is not None or not _plain(layout) or layout.short or stride != 1 or op.arg("transposed") is True:
        raise Refused("it convolves tokens with a stride, or with merged ones")
    rest = (WHOLE,) * (len(op.refs) - 1)
    if padding == 0 and form.halo >= reach:
        return op.recipe(replace(form, halo=form.halo - reach), (form, *rest))
    if padding == reach and not form.halo:
        return op.recipe(replace(form, halo=-reach), (replace(form, halo=reach), *rest), words.CONV, reach)
    raise Refused("it convolves a token with later ones", "pad in front only, by dilation * (kernel size - 1)")


def window(op: TokenOp, start: int, end: int, step: int) -> OpRecipe:
    """A slice along tokens that were padded in front, or convolved with padding on both sides."""
    form, layout = op.forms[0], op.forms[0].queries
    assert layout is not None
    size, tokens = end - start, op.model.tokens
    if step == 1 and op.model.growth(op.op.writes[0], layout.axis) == tokens - op.model.fewer:
        if form.halo < 0 and start == 0 and size <= tokens:
            return op.recipe(Form(queries=replace(layout, short=tokens - size)), how=words.WINDOW, amount=0)
        if 0 <= start <= form.halo and size == tokens:
            return op.recipe(Form(queries=layout), how=words.WINDOW, amount=start)
    raise Refused("it picks some of the tokens by their place")


def shifted(op: TokenOp, dim: int) -> OpRecipe:
    """cat((start, x[:, :-n])) along the tokens: every token sees the n-th before it."""
    form, layout = op.forms[-1], op.forms[-1].queries
    if len(op.refs) == 2 and op.forms[0].whole and layout is not None and form.keys is None:
        amount = op.shapes[0][dim]
        added = layout.axis == dim and _plain(layout) and amount == layout.short
        if added and not op.model.varying(op.refs[0]) and op.shape[dim] == op.model.tokens:
            reads = (WHOLE, replace(form, halo=amount))
            return op.recipe(Form(queries=replace(layout, short=0)), reads, words.SHIFT, amount)
    raise Refused("it appends to the tokens")


STATE_RULES = {
    "cumsum": running_sum,
    **dict.fromkeys(("pad", "constant_pad_nd"), pad),
    **dict.fromkeys(("conv1d", "convolution"), convolution),
}

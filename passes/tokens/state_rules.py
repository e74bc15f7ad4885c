"""Rules for what reaches a known number of tokens back: running sums, causal convolutions, shifts to the right."""

from __future__ import annotations

from dataclasses import replace

from autopart.passes.ops.letters import ints
from autopart.passes.tokens.causality import Causality
from autopart.passes.tokens.context import Found, Refused, TokenOp
from autopart.passes.tokens.propagation import by_letters
from autopart.passes.tokens.recipe import CARRY, CONV, PADDED, SHIFT, WHOLE, WINDOW, Form, Guard, TokenLayout


def running_sum(op: TokenOp, causality: Causality, guards: list[Guard]) -> Found:
    """cumsum along the tokens goes on from the last token of the slice before."""
    form = op.forms[0]
    along = op.axis("dim", len(op.out.shape))
    if form.queries is None or form.queries.axis != along:
        if form.keys is not None and form.keys.axis == along:
            raise Refused("it sums along keys")
        return by_letters(op, causality)
    if not _plain(form.queries) or form.keys is not None or form.halo:
        raise Refused("it sums along tokens that are merged with another axis")
    return op.found(form, (form,), CARRY, 1)


def _plain(layout: TokenLayout | None) -> bool:
    return layout is not None and (layout.stride, layout.block) == (1, 1)


def pad(op: TokenOp, causality: Causality, guards: list[Guard]) -> Found:
    """In front of the tokens: what the slice before has stands there instead, except before the first token."""
    form, ndim = op.forms[0], len(op.out.shape)
    layout = form.queries
    amounts = ints(op.arg("pad"))
    places = {ndim - 1 - place // 2 for place, amount in enumerate(amounts) if amount}
    if not any(held.axis in places for _, held in form.roles()):
        if form.partial or form.halo:
            raise Refused("it pads what is no value for each token")
        return op.found(form, (form,))
    constant = op.arg("mode", "constant") == "constant"
    if layout is None or form.keys is not None or form.halo or not _plain(layout) or not constant:
        raise Refused("it pads tokens")
    before, after = amounts[2 * (ndim - 1 - layout.axis) :][:2]
    if layout.short:  # pad(x[:, :-n], n in front): every token sees the n-th before it
        if (before, after) != (layout.short, 0) or op.differing():
            raise Refused("it pads tokens of which the last ones are cut off")
        return op.found(Form(queries=replace(layout, short=0)), (replace(form, halo=before),), SHIFT, before)
    if before < 1 or after not in (0, -before) or op.differing():
        raise Refused("it pads tokens behind the last one" if before < 1 or after > 0 else "it pads tokens")
    found = form if after else replace(form, halo=before)
    return op.found(found, (replace(form, halo=before),), SHIFT if after else PADDED, before)


def convolution(op: TokenOp, causality: Causality, guards: list[Guard]) -> Found:
    """Along the tokens of values that are padded in front; or padded on both sides, of which the end is cut off."""
    form, shape = op.forms[0], op.model.shape(op.refs[0])
    layout, ndim = form.queries, len(shape)
    if layout is None or layout.axis < ndim - 1 or len(op.model.shape(op.refs[1])) != 3:
        return by_letters(op, causality)
    stride, padding, dilation = (_one(op, key, n) for key, n in (("stride", 1), ("padding", 0), ("dilation", 1)))
    reach = dilation * (op.model.shape(op.refs[1])[-1] - 1)
    if form.keys is not None or not _plain(layout) or layout.short or stride != 1 or op.arg("transposed") is True:
        raise Refused("it convolves tokens with a stride, or with merged ones")
    rest = (WHOLE,) * (len(op.refs) - 1)
    if padding == 0 and form.halo >= reach:
        return op.found(replace(form, halo=form.halo - reach), (form, *rest))
    if padding == reach and not form.halo:
        return op.found(replace(form, halo=-reach), (replace(form, halo=reach), *rest), CONV, reach)
    raise Refused("it convolves a token with later ones", "pad in front only, by dilation * (kernel size - 1)")


def _one(op: TokenOp, key: str, default: int) -> int:
    found = ints(op.arg(key))
    if isinstance(op.arg(key), str):
        raise Refused("it pads its operand by itself")
    return found[0] if found else default


def window(op: TokenOp, start: int, end: int, step: int) -> Found:
    """A slice along tokens that were padded in front, or convolved with padding on both sides."""
    form, axis = op.forms[0], op.forms[0].queries
    assert axis is not None
    size, tokens = end - start, op.model.tokens
    varies = op.out.shape[axis.axis] - op.model.other_values[op.out.name].shape[axis.axis]
    if step != 1 or varies != tokens - op.model.fewer:
        raise Refused("it picks some of the tokens by their place")
    if form.halo < 0 and start == 0 and size <= tokens:
        return op.found(Form(queries=replace(axis, short=tokens - size)), (form,), WINDOW, 0)
    if 0 <= start <= form.halo and size == tokens:
        return op.found(Form(queries=axis), (form,), WINDOW, start)
    raise Refused("it picks some of the tokens by their place")


def shifted(op: TokenOp, dim: int) -> Found | None:
    """cat((start, x[:, :-n])): every token sees the n-th before it."""
    if len(op.refs) != 2 or not op.forms[0].whole:
        return None
    layout = op.forms[1].queries
    if layout is None or layout.axis != dim or not _plain(layout) or op.forms[1].halo or op.forms[1].keys is not None:
        return None
    amount = op.model.shape(op.refs[0])[dim]
    if amount != layout.short or op.model.varying(op.refs[0]) or op.out.shape[dim] != op.model.tokens:
        return None
    return op.found(Form(queries=replace(layout, short=0)), (WHOLE, replace(op.forms[1], halo=amount)), SHIFT, amount)


STATE_RULES = {
    "cumsum": running_sum,
    **dict.fromkeys(("pad", "constant_pad_nd"), pad),
    **dict.fromkeys(("conv1d", "convolution"), convolution),
}

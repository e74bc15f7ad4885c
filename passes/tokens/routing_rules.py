"""Rules for experts: tokens sorted by the expert that they go to, multiplied group by group, and put back.

Sorting mixes the tokens of a slice with each other, not with those of others, as long as all that is sorted is put back
by the same order: `Form.order` says which sort a value lies in the order of, and what it holds.  The groups of a
grouped product are those of the sorted keys, counted; so every token meets the weights of its own key, in a slice as in
the whole sequence.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autopart.passes.tokens.causality import Causality
from autopart.passes.tokens.context import Found, Refused, TokenOp
from autopart.passes.tokens.recipe import COUNTS, INVERSE, INVERT, KEYS, OFFSETS, PLACES, SORTED, WHOLE, Form, Guard

_UNKNOWN = "it uses tokens that were sorted in a way that is not known"


def sort(op: TokenOp) -> Found | None:
    """Of a vector with an entry, or several, for each token."""
    form = op.forms[0]
    if len(op.out.shape) != 1 or form.queries is None or form.keys is not None or form.halo or form.order is not None:
        return None
    if op.arg("descending") is True:
        return None
    kinds = [PLACES if op.name == "argsort" or op.model.numbers.which(name) == 1 else KEYS for name in op.op.writes]
    forms = tuple(replace(form, order=(op.op.name, kind, 1)) for kind in kinds)
    return Found(forms, op.found(form, (form,)).recipe)


def routed(op: TokenOp, causality: Causality, guards: list[Guard]) -> Found | None:
    """The rule for an op with an operand that is sorted, or says how others are; None where letters tell."""
    orders = {form.order for form in op.forms if form.order is not None}
    names = {order[0] for order in orders}
    if len(names) != 1 or any(form.partial or form.halo or form.keys is not None for form in op.forms):
        raise Refused(_UNKNOWN)
    kinds = {order[1] for order in orders}
    if kinds == {SORTED} and op.name not in ("index", "index_put", "_grouped_mm", "grouped_mm_fallback"):
        return None
    rule = _RULES.get(op.name)
    found = rule(op) if rule is not None else None
    if found is None:
        raise Refused(_UNKNOWN)
    return found


def _kind(form: Form) -> str:
    return form.order[1] if form.order is not None else ""


def _as(form: Form, kind: str, parts: int = 1) -> Form:
    assert form.order is not None
    return replace(form, order=(form.order[0], kind, parts))


def _parents(op: TokenOp) -> Found | None:
    """places // k: of a vector with k entries for each one, which of those it is."""
    form, parts = op.forms[0], op.arg("other")
    layout = form.queries
    floor = op.name == "floor_divide" or op.arg("rounding_mode") == "floor"
    if _kind(form) != PLACES or type(parts) is not int or not floor or layout is None or layout.block % parts:
        return None
    return op.found(_as(form, PLACES, parts), (form,))


def _copied(op: TokenOp) -> Found | None:
    form = op.forms[0]
    return op.found(form, (form, *((WHOLE,) * (len(op.refs) - 1)))) if _kind(form) in (KEYS, COUNTS, OFFSETS) else None


def _index(op: TokenOp) -> Found | None:
    """x[places] brings the tokens of x in order, sorted[inverse] brings them back."""
    if len(op.refs) != 2 or not isinstance(op.arg("indices"), tuple) or len(op.arg("indices")) != 1:  # type: ignore[arg-type]
        return None
    held, by = op.forms
    if by.order is None or by.queries is None or held.queries is None or held.queries.axis != 0:
        return None
    name, kind, parts = by.order
    if kind == PLACES and held.order is None:
        wanted = replace(by.queries, block=by.queries.block // parts)
        return (
            op.found(Form(queries=by.queries, order=(name, SORTED, 1)), (held, by)) if held.queries == wanted else None
        )
    if kind == INVERSE and held.order == (name, SORTED, 1) and held.queries == by.queries:
        return op.found(Form(queries=by.queries), (held, by))
    return None


def _counts(op: TokenOp) -> Found | None:
    """How many keys there are of each number from 0 on."""
    form, bins = op.forms[0], op.number("bins", 0)
    limits = (op.arg("min"), op.arg("max"))
    if _kind(form) != KEYS or limits != (0, bins - 1) or not _numbers_below(op, bins):
        return None
    return op.found(Form(order=(form.order[0], COUNTS, bins)), (form,)) if form.order is not None else None


def _numbers_below(op: TokenOp, bins: int) -> bool:
    """Whether the keys are places along an axis of so many entries at most."""
    assert op.forms[0].order is not None
    found = op.model.op_of(op.forms[0].order[0])
    while found is not None and found.reads:
        here = TokenOp(op.model, found)
        if here.name in ("topk", "argmax", "sort") and found.name != op.forms[0].order[0]:
            along = here.axis("dim", len(op.model.shape(here.refs[0])), -1)
            return op.model.shape(here.refs[0])[along] <= bins
        if here.name not in ("reshape", "view", "_to_copy", "clone", "flatten", "sort", "argsort", "contiguous"):
            return False
        found = op.model.writer.get(here.refs[0])
    return False


def _offsets(op: TokenOp) -> Found | None:
    form = op.forms[0]
    return (
        op.found(_as(form, OFFSETS, form.order[2]), (form,))
        if form.order is not None and _kind(form) == COUNTS
        else None
    )


def _product(op: TokenOp) -> Found | None:
    """Rows of each group by the weights of that group."""
    offsets = op.ref("offs")
    if offsets is None or len(op.refs) < 3:
        return None
    held, by = op.forms[0], op.forms[op.refs.index(offsets)]
    groups = op.model.shape(op.refs[1])[0]
    if by.order is None or held.order is None or _kind(by) != OFFSETS or by.order[2] != groups:
        return None
    others = [form for n, form in enumerate(op.forms) if n not in (0, op.refs.index(offsets))]
    if held.queries is None or held.queries.axis != 0 or len(op.model.shape(op.refs[0])) != 2:
        return None
    return op.found(held, tuple(op.forms)) if all(form.whole for form in others) and held.order[1] == SORTED else None


def _inverse(op: TokenOp) -> Found | None:
    """empty[places] = 0, 1, 2, ...; or argsort(places)."""
    if op.name == "argsort" or op.name == "sort":
        form = op.forms[0]
        plain = _kind(form) == PLACES and form.order is not None and form.order[2] == 1 and not op.arg("descending")
        return op.found(_as(form, INVERSE), (form,)) if plain and op.name == "argsort" else None
    picks = op.arg("indices")
    values = op.ref("values")
    if not isinstance(picks, tuple) or len(picks) != 1 or values not in op.model.fixed or op.arg("accumulate") is True:
        return None
    form, numbers = op.forms[1], op.model.numbers.of(values)
    if _kind(form) != PLACES or form.order is None or form.order[2] != 1 or not op.forms[0].whole or numbers is None:
        return None
    size = op.model.shape(op.refs[0])
    if len(size) != 1 or numbers.shape != size or not np.array_equal(numbers, np.arange(size[0])):
        return None
    return op.found(_as(form, INVERSE), (WHOLE, form, WHOLE), INVERT)


_RULES = {
    "floor_divide": _parents,
    "div": _parents,
    **dict.fromkeys(("_to_copy", "clone", "to", "contiguous"), _copied),
    "index": _index,
    "histc": _counts,
    "cumsum": _offsets,
    **dict.fromkeys(("_grouped_mm", "grouped_mm_fallback"), _product),
    **dict.fromkeys(("index_put", "argsort", "sort"), _inverse),
}

"""Rules for experts: tokens sorted by the expert that they go to, multiplied group by group, and put back.

Sorting mixes the tokens of a slice with each other, not with those of other slices, as long as all that is sorted is
put back by the same sort: `Form.order` names the sort that put a value in order, and says what the value holds.  The
groups of a grouped product are those of the sorted keys, counted; so every token meets the weights of its own key, in a
slice as in the whole sequence.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autopart.passes.tokens.context import Refused, TokenOp
from autopart.passes.tokens.recipe import COUNTS, INVERSE, INVERT, KEYS, OFFSETS, PLACES, SORTED, WHOLE, Form, OpRecipe


def sort(op: TokenOp) -> OpRecipe | None:
    """Of a vector with one or more entries for each token."""
    form = op.forms[0]
    if len(op.shape) != 1 or form.queries is None or op.arg("descending") is True:
        return None
    kinds = {n: PLACES if op.name == "argsort" or op.model.numbers.which(n) == 1 else KEYS for n in op.op.writes}
    results = {name: replace(form, order=(op.op.name, kind, 1)) for name, kind in kinds.items()}
    return replace(op.recipe(form), results=results)


def routed(op: TokenOp) -> OpRecipe | None:
    """The rule for an op with an operand that is sorted, or describes how others are; None where letters suffice."""
    orders = {form.order for form in op.forms if form.order is not None}
    kinds = {kind for _, kind, _ in orders}
    if kinds == {SORTED} and op.name not in ("index", "index_put", "_grouped_mm", "grouped_mm_fallback"):
        return None
    rule = _RULES.get(op.name)
    one_sort = len({name for name, *_ in orders}) == 1 and not any(form.halo or form.keys for form in op.forms)
    recipe = rule(op) if rule is not None and one_sort else None
    if recipe is None:
        raise Refused("it uses tokens that were sorted in a way that is not known")
    return recipe


def _order(form: Form) -> tuple[str, str, int]:
    return form.order or ("", "", 0)


def _as(form: Form, kind: str, parts: int = 1) -> Form:
    return replace(form, order=(_order(form)[0], kind, parts))


def _parents(op: TokenOp) -> OpRecipe | None:
    """places // k: indices into a vector with one entry for each k."""
    form, parts = op.forms[0], op.arg("other")
    floor = op.name == "floor_divide" or op.arg("rounding_mode") == "floor"
    if _order(form)[1] != PLACES or type(parts) is not int or not floor:
        return None
    return op.recipe(_as(form, PLACES, parts)) if form.queries and form.queries.block % parts == 0 else None


def _copied(op: TokenOp) -> OpRecipe | None:
    form = op.forms[0]
    reads = (form, *((WHOLE,) * (len(op.refs) - 1)))
    return op.recipe(form, reads) if _order(form)[1] in (KEYS, COUNTS, OFFSETS) else None


def _index(op: TokenOp) -> OpRecipe | None:
    """x[places] brings the tokens of x in order, sorted[inverse] brings them back."""
    indices = op.arg("indices")
    if len(op.refs) != 2 or not isinstance(indices, tuple) or len(indices) != 1:
        return None
    held, by = op.forms
    if by.queries is None or held.queries is None or held.queries.axis != 0:
        return None
    name, kind, parts = _order(by)
    if kind == PLACES and held.order is None:
        wanted = replace(by.queries, block=by.queries.block // parts)
        return op.recipe(Form(queries=by.queries, order=(name, SORTED, 1))) if held.queries == wanted else None
    back = kind == INVERSE and held.order == (name, SORTED, 1) and held.queries == by.queries
    return op.recipe(Form(queries=by.queries)) if back else None


def _counts(op: TokenOp) -> OpRecipe | None:
    """histc: the number of keys of each number from 0 on."""
    form, bins = op.forms[0], op.number("bins", 0)
    counted = _order(form)[1] == KEYS and (op.arg("min"), op.arg("max")) == (0, bins - 1) and _keys_below(op, bins)
    return op.recipe(Form(order=(_order(form)[0], COUNTS, bins))) if counted else None


def _keys_below(op: TokenOp, bins: int) -> bool:
    """Whether the keys are indices along an axis of at most this size."""
    sort = _order(op.forms[0])[0]
    found = op.model.ops.get(sort)
    while found is not None and found.reads:
        here = TokenOp(op.model, found)
        if here.name in ("topk", "argmax", "sort") and found.name != sort:
            return here.shapes[0][here.axis("dim", len(here.shapes[0]), -1)] <= bins
        if here.name not in ("reshape", "view", "_to_copy", "clone", "flatten", "sort", "argsort", "contiguous"):
            return False
        found = op.model.writer.get(here.refs[0])
    return False


def _offsets(op: TokenOp) -> OpRecipe | None:
    form = op.forms[0]
    _, kind, parts = _order(form)
    return op.recipe(_as(form, OFFSETS, parts)) if kind == COUNTS else None


def _product(op: TokenOp) -> OpRecipe | None:
    """Rows of each group by the weights of that group."""
    offsets = op.ref("offs")
    if offsets is None or len(op.refs) < 3:
        return None
    place, held = op.refs.index(offsets), op.forms[0]
    by_group = _order(op.forms[place])[1:] == (OFFSETS, op.shapes[1][0]) and _order(held)[1] == SORTED
    rows_first = held.queries is not None and held.queries.axis == 0 and len(op.shapes[0]) == 2
    others = [form for number, form in enumerate(op.forms) if number not in (0, place)]
    return op.recipe(held) if by_group and rows_first and all(form.whole for form in others) else None


def _inverse(op: TokenOp) -> OpRecipe | None:
    """argsort(places)."""
    plain = _order(op.forms[0])[1:] == (PLACES, 1) and not op.arg("descending")
    return op.recipe(_as(op.forms[0], INVERSE)) if plain else None


def _numbered(op: TokenOp) -> OpRecipe | None:
    """empty[places] = 0, 1, 2, ...: the inverse of the places."""
    picks, values = op.arg("indices"), op.ref("values")
    if not isinstance(picks, tuple) or len(picks) != 1 or values not in op.model.fixed or op.arg("accumulate") is True:
        return None
    (target, form, *_), size, numbers = op.forms, op.shapes[0], op.model.numbers.of(values)
    if _order(form)[1:] != (PLACES, 1) or not target.whole or numbers is None or len(size) != 1:
        return None
    if numbers.shape != size or not np.array_equal(numbers, np.arange(size[0])):
        return None
    return op.recipe(_as(form, INVERSE), (WHOLE, form, WHOLE), INVERT)


_RULES = {
    **dict.fromkeys(("floor_divide", "div"), _parents),
    **dict.fromkeys(("_to_copy", "clone", "to", "contiguous"), _copied),
    "index": _index,
    "histc": _counts,
    "cumsum": _offsets,
    **dict.fromkeys(("_grouped_mm", "grouped_mm_fallback"), _product),
    "argsort": _inverse,
    "index_put": _numbered,
}

"""Rules for what adds up over slices: loss functions, and what is done to a sum over the tokens afterwards."""

from __future__ import annotations

from autopart.passes.ops.row import VIEW
from autopart.passes.tokens.causality import Causality
from autopart.passes.tokens.context import Found, Refused, TokenOp
from autopart.passes.tokens.recipe import LOSS, ONCE, PLAIN, WHOLE, Form, Guard, TokenLayout

_NONE, _MEAN, _SUM = 0, 1, 2
_LINEAR = ("mul", "div", "neg", "_to_copy", "clone", "detach", "sum", "to", "alias")


def loss(op: TokenOp, causality: Causality, guards: list[Guard]) -> Found:
    """A loss function of predictions and targets that hold the same tokens."""
    if op.row.averages not in ("classes", "elements"):
        raise Refused("it is not known how it averages over the tokens")
    reads = _reads_of_classes(op) if op.row.averages == "classes" else _reads_of_elements(op, causality)
    reduction = op.number("reduction", _MEAN)
    if reduction == _NONE:
        form = reads[1] if op.row.averages == "classes" else reads[0]
        return op.found(form, reads)
    return op.found(Form(partial=True, origin=op.op.name), reads, LOSS if reduction == _MEAN else PLAIN)


def _reads_of_elements(op: TokenOp, causality: Causality) -> tuple[Form, ...]:
    if {op.model.shape(ref) for ref in op.refs} != {op.model.shape(op.refs[0])}:
        raise Refused("its operands are not of one shape")
    form = next(form for form in op.forms if not form.whole)
    if form.partial or form.halo or form.keys is not None:
        raise Refused("it takes a loss of what is no value for each token")
    return tuple(_aligned(op, number, form) for number in range(len(op.refs)))


def _reads_of_classes(op: TokenOp) -> tuple[Form, ...]:
    """Classes lie along axis 1 (axis 0 of a single prediction)."""
    form, target = op.forms[0], op.model.shape(op.refs[1])
    layout = form.queries
    if layout is None or form.keys is not None or form.halo:
        raise Refused("it takes a loss of what is no value for each token")
    classes = 1 if len(op.model.shape(op.refs[0])) > 1 else 0
    if layout.axis == classes or len(target) != len(op.model.shape(op.refs[0])) - 1:
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
        shape = op.model.shape(op.refs[number])
        if op.model.varying(op.refs[number]) != (layout.axis,) or shape[layout.axis] != op.model.full_size(layout):
            raise Refused("its operands do not hold the same tokens")
        return form
    if own != form:
        raise Refused("its operands hold the tokens in different orders")
    return form


def of_sums(op: TokenOp, causality: Causality, guards: list[Guard]) -> Found:
    """What keeps a sum over the tokens a sum: what is linear in it."""
    first = next(form for form in op.forms if form.partial)
    if op.model.varying(op.out.name) or any(not (form.partial or form.whole) for form in op.forms):
        raise _not_linear(op, first)
    reads = tuple(form if form.partial else WHOLE for form in op.forms)
    partial = [form.partial for form in op.forms]
    if op.name in ("add", "sub", "rsub", "stack", "cat"):
        number = op.name in ("add", "sub", "rsub") and len(op.refs) < 2 and bool(op.arg("other", op.arg("self")))
        if number and op.arg("other"):
            raise Refused("it adds a number to a sum over the tokens", "leave the number out: it has no gradient")
        return op.found(first, reads, PLAIN if all(partial) else ONCE)
    view = op.row.family == VIEW and op.name not in ("select", "unbind")
    if op.name in ("mul", "div") and (partial.count(True) > 1 or (op.name == "div" and not partial[0])):
        raise _not_linear(op, first)
    if view or op.name in _LINEAR or (op.name == "mean" and not op.out.shape):
        return op.found(first, reads)
    raise _not_linear(op, first)


def _not_linear(op: TokenOp, form: Form) -> Refused:
    origin = op.model.op_names.get(form.origin, form.origin)
    return Refused(
        f"{origin} sums over all tokens, and {op.name} needs that sum as a whole",
        "take the loss token by token",
    )

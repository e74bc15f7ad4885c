"""Rules for what adds up over slices: loss functions, and what is done to a sum over the tokens afterwards."""

from __future__ import annotations

from autopart.passes.ops.row import VIEW
from autopart.passes.ops.table import op_name
from autopart.passes.tokens.context import Refused, TokenOp
from autopart.passes.tokens.recipe import LOSS, ONCE, PLAIN, WHOLE, Form, OpRecipe, TokenLayout

_NONE, _MEAN = 0, 1
_LINEAR = ("mul", "div", "neg", "_to_copy", "clone", "detach", "sum", "to", "alias")


def loss(op: TokenOp) -> OpRecipe:
    """A loss function of predictions and targets that hold the same tokens."""
    if op.row.averages not in ("classes", "elements"):
        raise Refused("it is not known how it averages over the tokens")
    form = next(form for form in op.forms if not form.whole)
    if form.queries is None or form.keys is not None:
        raise Refused("it takes a loss of values that do not belong to one token each")
    by_class = op.row.averages == "classes"
    reads = _reads_of_classes(op) if by_class else _reads_of_elements(op, form)
    reduction = op.number("reduction", _MEAN)
    if reduction == _NONE:
        return op.recipe(reads[by_class], reads)
    return op.recipe(Form(partial=op.op.name), reads, LOSS if reduction == _MEAN else PLAIN)


def _reads_of_elements(op: TokenOp, form: Form) -> tuple[Form, ...]:
    if len(set(op.shapes)) > 1:
        raise Refused("its operands differ in shape")
    return tuple(_aligned(op, number, form) for number in range(len(op.refs)))


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
        return op.recipe(first, reads, PLAIN if all(partial) else ONCE)
    if op.name in ("mul", "div") and (sum(partial) > 1 or (op.name == "div" and not partial[0])):
        raise not_linear
    view = op.row.family == VIEW and op.name not in ("select", "unbind")
    if view or op.name in _LINEAR or (op.name == "mean" and not op.shape):
        return op.recipe(first, reads)
    raise not_linear

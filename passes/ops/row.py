"""A row of the table of ops: its columns, and how they are written.

Letters name axes, as in einsum: "mk, kn -> mn".  Operands stand in the order of the op's tensor arguments (lists of
tensors flattened), results behind the arrow; optional operands at the end may be missing.

    abc     one axis each; a letter that operands or results share is the same axis
    ...     any number of axes, aligned from the right and broadcast
    D       the axes that the argument `named_by` names, wherever they lie; behind the arrow "..." alone leaves them out
    ~...    behind the arrow: the axes of the operand in the order that the arguments say
    +mn     an operand that is added, broadcast: no factor of the product of the others
    *       any number of further operands without letters
    p | q   the first of several forms that has as many axes as the operands; "flag: p" only if argument flag is true

From the letters follows: rows of the batch along a letter of the result stay apart; along a letter that is summed over
they add up (`linear`), and along a letter in `mixes` every result depends on every row.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopart.ir.errors import UsageError

VIEW = "view"
POINTWISE = "pointwise"
REDUCTION = "reduction"
NORM = "norm"
MATMUL = "matmul"
INDEXING = "indexing"
CREATION = "creation"
LOSS = "loss"
WINDOW = "window"
ASSERTION = "assertion"
OTHER = "other"

FAMILIES = (VIEW, POINTWISE, REDUCTION, NORM, MATMUL, INDEXING, CREATION, LOSS, WINDOW, ASSERTION, OTHER)
LINEAR = ("", "each", "mean", "sum", "product")
SAVES = ("inputs", "output", "nothing", "factors", "quotient", "indices", "both", "mask")


@dataclass(frozen=True, slots=True)
class OpRow:
    """One op, by its own name: "add" for aten.add.Tensor, "mylib.f" for mylib.f.default.

    family: one of `FAMILIES`.
    axes: the letters of its operands and of its result, see above; "" when they are not known.
    mixes: letters along which every element of the result may depend on every element of the operands, for good.
        "." stands for the axes of "...".
    may_mix: the same where it depends on other arguments, or where a later op may undo it (a sort, undone by its own
        indices): a numeric test decides.
    linear: "" any function; "each" linear in its only operand, summing what the letters drop; "mean" the same,
        averaging; "sum" of its operands; "product" of its operands, summed over what the letters drop.
    named_by: the argument that names the axes D, and what it stands for when it is missing: "dim=-1", "dim=all".
    saves: what its derivative needs.  "inputs"; "output"; "nothing"; "both"; "factors": each factor that the gradient
        of another is multiplied by; "quotient": the divisor, and both operands for the gradient of the divisor;
        "indices": operands and results that are not floating point; "mask": its second result.
    hidden: what it keeps in tensors that are not values of the graph.  "mask": a byte per element unless the mask is a
        value; "log_softmax": of its first operand; "attention": normalisers or scores; "statistics": two per vector;
        "channels": two per channel; "indices": one per element of the result; "lstm", "gru", "rnn": gates and states of
        every token.
    flops: floating point operations of the forward.  "none"; "written", "read": one per element; "equation",
        "weights": read from the arguments (einsum, recurrent cells); else letters of the axes whose sizes multiply
        ("...mnk", terms separated by "+"), each counting two.
    storage: of a view, if `ops.storage` does not follow its strides: "in order", "out of order" or "reshape".
    same_elements: the result holds the elements of its operand and no others.
    looks_up: it reads of its operand only what it returns.
    averages: of a loss function, what the mean is over: "elements", "rows" or "classes".
    draws_unless_zero: of a random op, arguments of which one that is 0 or False switches the randomness off.
    off: (argument, value) that takes randomness, and the statistics of the batch, out of the op.
    stand_in: what its draws are replaced by where randomness is off.
    """

    name: str
    family: str
    axes: str = ""
    mixes: str = ""
    may_mix: str = ""
    linear: str = ""
    named_by: str = ""
    saves: str = "inputs"
    hidden: str = ""
    flops: str = "written"
    storage: str = ""
    same_elements: bool = False
    looks_up: bool = False
    averages: str = ""
    draws_unless_zero: tuple[str, ...] = ()
    off: tuple[tuple[str, bool | float], ...] = ()
    stand_in: float | None = None

    @property
    def free(self) -> bool:
        """Whether the op computes nothing: a view, or a constant."""
        return self.family in (VIEW, CREATION)


def check(row: OpRow) -> OpRow:
    """Check a row and return it: its words are known, and a letter that the result lacks is among the mixed ones, if
    the op is neither linear nor a loss that averages.  Raises UsageError."""
    for column, allowed in (("family", FAMILIES), ("linear", LINEAR), ("saves", SAVES)):
        value = getattr(row, column)
        if value not in allowed:
            raise _error(row, f"its {column} is {value!r}", f"use one of {', '.join(map(repr, allowed))}")
    for form in row.axes.split("|"):
        if row.axes not in ("", "equation") and form.count("->") != 1:
            raise _error(row, f"its axes {form.strip()!r} have no result", 'write them as in "mk, kn -> mn"')
        before, _, after = form.partition("->")
        letters = {letter for letter in before.split(":")[-1] if letter.isalpha()}
        lost = letters - set(after) - set(row.mixes + row.may_mix)
        if lost and not (row.linear or row.averages):
            raise _error(
                row,
                f"axis {min(lost)} of its operands is not in the result",
                "list that letter in mixes, or say how the op is linear",
            )
    if "D" in row.axes and not row.named_by:
        raise _error(row, "no argument names its axes D", 'set named_by, for example to "dim=-1"')
    return row


def _error(row: OpRow, what: str, fix: str) -> UsageError:
    return UsageError(f"the row of op {row.name!r} is not valid: {what}", fix=fix)

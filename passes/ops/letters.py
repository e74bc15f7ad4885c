"""The letters of one call: a name for every axis of its operands and results (`row.OpRow.axes`).

Axes with one name are the same axis.  The axes of "..." are named ".0", ".1", ... from the right, the axes D "D0",
"D1", ... from the left; "" is an axis of size 1 that is broadcast or new.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from autopart.ir.graph import Literal
from autopart.passes.ops.row import OpRow

Shape = tuple[int, ...]
Names = tuple[str, ...]
Arguments = Mapping[str, Literal]


@dataclass(frozen=True, slots=True)
class Letters:
    """The letters of one call.  operands, results: names of the axes of each; operands may be missing at the end, and
    a single result stands for all.  added: numbers of the operands that are added to the product of the others."""

    operands: tuple[Names, ...]
    results: tuple[Names, ...]
    added: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class _Form:
    """One of the alternatives in `OpRow.axes`.  open: further operands have no letters."""

    flag: str
    terms: tuple[str, ...]
    added: frozenset[int]
    open: bool
    results: tuple[str, ...]

    def fits(self, arguments: Arguments, shapes: Sequence[Shape], result: Shape) -> bool:
        """Whether a call has the operands and axes of the form."""
        if self.flag and arguments.get(self.flag) is not True:
            return False
        if len(shapes) > len(self.terms) and not self.open:
            return False
        pairs = enumerate(zip(self.terms, shapes, strict=False))
        operands = all(place in self.added or _has_axes(term, len(shape)) for place, (term, shape) in pairs)
        return operands and any(_has_axes(term, len(result)) for term in self.results)


def letters(row: OpRow, arguments: Arguments, shapes: Sequence[Shape], result: Shape) -> Letters | None:
    """The letters of a call; None if the row has none that fit.

    arguments: of the op, by name.  shapes: of its tensor arguments, in order.  result: shape of a result of it.
    O(axes).
    """
    if row.axes == "equation":
        equation = arguments.get("equation")
        found = einsum_letters(equation, shapes) if isinstance(equation, str) else None
        return Letters(tuple(map(tuple, found[0])), (tuple(found[1]),)) if found else None
    for form in _forms(row.axes, len(shapes)):
        if form.fits(arguments, shapes, result):
            if "D" in row.axes:
                return _with_named_axes(row, form, arguments, shapes, result)
            return _plain(row, form, arguments, shapes, result)
    return None


@lru_cache(maxsize=1024)
def _forms(axes: str, operands: int) -> tuple[_Form, ...]:
    if axes == "... -> ...":  # of as many operands as there are
        axes = ", ".join(["..."] * operands) + "-> ..."
    return tuple(_form(text) for text in axes.split("|")) if axes else ()


def added_operands(row: OpRow) -> frozenset[int]:
    """Numbers of the operands that are added to the product of the others."""
    forms = () if row.axes == "equation" else _forms(row.axes, 0)
    return forms[0].added if forms else frozenset()


def _form(text: str) -> _Form:
    flag, _, rest = text.rpartition(":")
    before, _, after = rest.partition("->")
    terms = [term.strip() for term in before.split(",")]
    lettered = [term for term in terms if term != "*"]
    added = frozenset(place for place, term in enumerate(lettered) if term.startswith("+"))
    plain = tuple(term.removeprefix("+") for term in lettered)
    results = tuple(term.strip() for term in after.split(","))
    return _Form(flag.strip(), plain, added, "*" in terms, results)


def _has_axes(term: str, ndim: int) -> bool:
    known = sum(letter.isalpha() and letter != "D" for letter in term)
    return ndim >= known if "..." in term or "D" in term else ndim == known


def _plain(row: OpRow, form: _Form, arguments: Arguments, shapes: Sequence[Shape], result: Shape) -> Letters:
    operands = [_names(term, len(shape)) for term, shape in zip(form.terms, shapes, strict=False)]
    if form.results == ("~...",):
        order = _order(row.name, arguments, len(shapes[0]))
        return Letters(tuple(operands), (tuple(operands[0][axis] for axis in order),))
    if len(form.results) == 1:
        results = [_names(form.results[0], len(result))]
    else:
        dots = {name for names in operands for name in names if name.startswith(".")}
        results = [_names(term, len(term.replace("...", "")) + len(dots)) for term in form.results]
    return Letters(_broadcast(operands, shapes), tuple(results), form.added)


def _names(term: str, ndim: int) -> Names:
    """ "...ab" with 4 axes -> (".1", ".0", "a", "b"): the axes of the dots are counted from the right.

    An operand that is added, and so broadcast to the letters of `term`, may lack the first ones.
    """
    before, _, after = term.partition("...")
    letters = before + after
    dots = ndim - len(letters)
    return (*before, *(f".{dots - 1 - axis}" for axis in range(dots)), *after) if dots > 0 else tuple(letters[-dots:])


def _broadcast(operands: Sequence[Names], shapes: Sequence[Shape]) -> tuple[Names, ...]:
    """Drop the name of an axis of size 1 where an axis of that name is larger in another operand."""
    pairs = list(zip(operands, shapes, strict=False))
    large = {name for names, shape in pairs for name, size in zip(names, shape, strict=True) if size != 1}

    def named(name: str, size: int) -> str:
        return "" if size == 1 and name.startswith(".") and name in large else name

    return tuple(tuple(named(n, s) for n, s in zip(names, shape, strict=True)) for names, shape in pairs)


def _with_named_axes(row: OpRow, form: _Form, arguments: Arguments, shapes: Sequence[Shape], result: Shape) -> Letters:
    ndim = max(len(shape) for term, shape in zip(form.terms, shapes, strict=False) if "..." in term)
    axes = named_axes(row, arguments, ndim)
    every = [f"D{axis}" if axis in axes else f".{ndim - 1 - axis}" for axis in range(ndim)]

    def names(term: str, size: int) -> Names:
        if "..." in term:
            return tuple(every[ndim - size :]) if "D" in term else tuple(every[axis] for axis in others)
        return tuple(every[axis] for axis in sorted(axes))[-size:] if size else ()

    others = [axis for axis in range(ndim) if axis not in axes]
    operands = [names(term, len(shape)) for term, shape in zip(form.terms, shapes, strict=False)]
    if form.results == ("...",) and len(result) == ndim:  # keepdim: dropped axes stay with size 1
        out = tuple("" if axis in axes else every[axis] for axis in range(ndim))
    else:
        out = names(form.results[0], ndim)
    return Letters(_broadcast(operands, shapes), (out,), form.added)


def named_axes(row: OpRow, arguments: Arguments, ndim: int) -> frozenset[int]:
    """The axes D of an operand of `ndim` axes."""
    argument, _, missing = row.named_by.partition("=")
    if argument == "normalized_shape":
        shape = arguments.get(argument)
        return frozenset(range(ndim - len(shape), ndim)) if isinstance(shape, tuple) else frozenset()
    if argument in ("pad", "padding"):  # amounts: before and after the last axis, then the one before it, ...
        amounts = ints(arguments.get(argument, arguments.get("pad")))
        return frozenset(ndim - 1 - place // 2 for place, amount in enumerate(amounts) if amount)
    given = next((arguments[key] for key in (argument, "dim", "dims", "axis") if key in arguments), None)
    listed = ints(given)
    if not listed and missing == "all":
        return frozenset(range(ndim))
    if given is None and missing:
        listed = (int(missing),)
    return frozenset(axis + ndim if axis < 0 else axis for axis in listed)


def _order(name: str, arguments: Arguments, ndim: int) -> list[int]:
    """The axes of the operand in the order of the result: permute, movedim, transpose, t, mT."""

    def positive(axis: Literal, missing: int) -> int:
        number = axis if isinstance(axis, int) else missing
        return number + ndim if number < 0 else number

    order = list(range(ndim))
    if name == "permute":
        return [positive(axis, 0) for axis in ints(arguments.get("dims"))]
    if name == "movedim":
        sources = [positive(axis, 0) for axis in ints(arguments.get("source"))]
        targets = [positive(axis, 0) for axis in ints(arguments.get("destination"))]
        order = [axis for axis in order if axis not in sources]
        for target, source in sorted(zip(targets, sources, strict=True)):
            order.insert(target, source)
    elif ndim > 1:
        first, second = ("axis0", "axis1") if name == "swapaxes" else ("dim0", "dim1")
        a, b = positive(arguments.get(first), -2), positive(arguments.get(second), -1)
        order[a], order[b] = order[b], order[a]
    return order


def ints(value: Literal) -> tuple[int, ...]:
    """An int or a tuple of ints as a tuple."""
    if isinstance(value, int):
        return (value,)
    return tuple(item for item in value if isinstance(item, int)) if isinstance(value, tuple) else ()


def bound(value: Literal, missing: int, size: int) -> int:
    """The start or end of a slice along an axis of this size, counted from the left; `missing` where there is none."""
    number = value if type(value) is int else missing
    return max(0, min(size, number + size if number < 0 else number))


def einsum_letters(equation: str, shapes: Sequence[Shape]) -> tuple[list[Names], Names] | None:
    """Names for the axes of each operand and of the result; None if the equation is not understood."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(shapes):
        return None
    named = [_names(term, len(shape)) for term, shape in zip(terms, shapes, strict=True)]
    if arrow:
        dots = max((sum(name.startswith(".") for name in names) for names in named), default=0)
        return named, _names(right, len(right.replace("...", "")) + (dots if "..." in right else 0))
    every = [name for names in named for name in names]
    batch = sorted({name for name in every if name.startswith(".")})
    return named, (*batch, *sorted(name for name in every if every.count(name) == 1 and name not in batch))

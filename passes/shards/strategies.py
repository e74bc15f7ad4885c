"""The ways in which the ranks of a shard group may run one op, each with the states of what it reads and writes.

whole: on every rank, all of it.  copy: the same, where what it writes is read in cut regions alone.  Along a letter:
operands that have it are cut, others are copies; results that have it are cut, results that sum over it are partial.
partial: a linear op of an addend gives an addend.  An op without letters runs whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from autopart.passes.ops.letters import Shape
from autopart.passes.ops.row import POINTWISE, REDUCTION, VIEW
from autopart.passes.shards.calls import ATTENTION, EMBEDDING, ENTROPY, EXPANDS, SLICES, Call, Sections, bounds_of
from autopart.passes.shards.factors import Factors
from autopart.passes.shards.states import COPY, PARTIAL, WHOLE, State, cut

PLAIN, SIZES, MEAN, SECTION, VOCABULARY, CLASSES, ROWS, DRAWN = (
    "", "sizes", "mean", "section", "vocabulary", "classes", "rows", "drawn"
)  # fmt: skip
NO_DIGIT = -1
DROPOUTS = ("dropout", "native_dropout")
"""Random ops whose numbers depend on the shape of their operand, and on the order of its axes in memory, alone."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run an op.

    reads, writes: states of its tensor arguments, each use once, and of its results.  digit: the factor that it cuts,
    `NO_DIGIT` for none.  how: what changes in its call besides the operands: "sizes": it names the sizes of its result;
    "mean": its result is an addend of the mean once it is divided by the ranks; "section": bounds of slices are those
    of a part; "vocabulary": rows of a table that other ranks have count as zeros; "classes": a cross entropy over
    classes of which each rank has some; "rows": its mean counts the rows of all ranks; "drawn": it draws for the whole
    tensor, of which each rank takes its part.
    """

    reads: tuple[State, ...]
    writes: tuple[State, ...]
    digit: int = NO_DIGIT
    how: str = PLAIN

    def is_like(self, other: Strategy) -> bool:
        """Return whether an op runs the same way, whatever the number of the factor."""
        return (self.reads, self.writes, self.how) == (other.reads, other.writes, other.how)


def uniform(call: Call, state: State) -> Strategy:
    """Return the way to run an op in which all that it reads and writes is in one state."""
    return Strategy((state,) * len(call.reads), (state,) * len(call.op.writes), how=SIZES if call.reshapes else PLAIN)


def strategies(call: Call, factors: Factors, shards: int) -> list[Strategy]:
    """Return all ways to run an op on so many ranks, the whole one first."""
    return [each for each in every_way(call, factors) if _divides(call, factors, each, shards)]


def _divides(call: Call, factors: Factors, strategy: Strategy, shards: int) -> bool:
    if strategy.digit == NO_DIGIT:
        return True
    pairs = (*zip(call.reads, strategy.reads, strict=True), *zip(call.op.writes, strategy.writes, strict=True))
    fits = all(state.fits(call.shape(name), shards) for name, state in pairs)
    return factors.size(strategy.digit) % shards == 0 and fits


def every_way(call: Call, factors: Factors) -> list[Strategy]:
    """Return all ways to run an op on some number of ranks.  Random ops run whole, or draw whole (`DROPOUTS`): a part
    alone would draw other numbers."""
    found = dict.fromkeys([uniform(call, WHOLE)])
    if not call.op.writes:
        return list(found)
    if call.op.random:
        drawn = call.name in DROPOUTS
        ways = (*found, *_along_letters(call, factors)) if drawn else found
        return [replace(each, how=DRAWN) for each in ways] if drawn else list(ways)
    found[uniform(call, COPY)] = None
    found.update(dict.fromkeys(_special(call, factors)))
    found.update(dict.fromkeys(_along_letters(call, factors)))
    found.update(dict.fromkeys(_along_sections(call, factors)))
    return [each for each in found if _divides(call, factors, each, 1)] + list(_of_addends(call))


def digits_of(call: Call, factors: Factors) -> set[int]:
    """Return the factors of all axes of an op."""
    return {digit for name in (*call.reads, *call.op.writes) for digit in factors.flat(name)}


def _along_letters(call: Call, factors: Factors) -> Iterator[Strategy]:
    if call.reshapes:
        yield from _reshaped(call, factors)
        return
    how = SIZES if call.name in EXPANDS else PLAIN
    row, added = call.row, call.letters.added if call.letters is not None else frozenset()
    for letter, places in call.axes().items():
        kept = [letter in own for own in call.results]
        if letter[:1] in row.mixes + row.may_mix or call.name == ENTROPY or (any(kept) and not all(kept)):
            continue
        if not any(kept) and row.linear not in ("each", "mean", "product"):
            continue
        without = COPY if all(kept) else PARTIAL
        for digit, before in factors.befores(*places[0]):
            reads = tuple(
                cut(own[letter], before) if letter in own else without if place in added else COPY
                for place, own in enumerate(call.operands)
            )
            writes = tuple(cut(own[letter], before) if letter in own else PARTIAL for own in call.results)
            summed = MEAN if row.linear == "mean" and not all(kept) else how
            yield Strategy(reads, writes, digit, summed)


def _reshaped(call: Call, factors: Factors) -> Iterator[Strategy]:
    """Yield the cuts that lie along one axis on both sides of a reshape."""
    source, target = call.shape(call.reads[0]), call.shape(call.op.writes[0])
    for axis in range(len(source)):
        for digit, before in factors.befores(call.reads[0], axis):
            found = _place(target, prod(source[:axis]) * before)
            if found is not None:
                others = (WHOLE,) * (len(call.reads) - 1)
                yield Strategy((cut(axis, before), *others), (found,), digit, SIZES)


def _place(shape: Shape, before: int) -> State | None:
    """Return the cut of a tensor that stands behind so many combinations of what lies before it, if there is one."""
    outer = 1
    for axis, size in enumerate(shape):
        if before % outer:
            return None
        if before < outer * size and size > 1:
            return cut(axis, before // outer)
        outer *= size
    return None


def _along_sections(call: Call, factors: Factors) -> Iterator[Strategy]:
    """Yield the cuts inside the sections that slices take out of an axis, or that cat joins to one."""
    sliced = call.name in SLICES
    found = [_aligned(call)] if sliced else [each for each in call.sections() if not each.major][:1]
    for each in found:
        if each is None:
            continue
        (part, own), (whole, axis) = each.part, each.whole
        count = call.shape(whole)[axis] // call.shape(part)[own]
        for digit, before in factors.befores(part, own):
            inner, outer = cut(own, before), cut(axis, count * before)
            if sliced:
                yield Strategy((outer,), (inner,) * len(call.op.writes), digit, SECTION)
            else:
                yield Strategy(tuple(inner if n in call.joined else COPY for n in call.reads), (outer,), digit)


def _aligned(call: Call) -> Sections | None:
    """Return how the results of a slice lie in its operand, if all are equal parts of it at multiples of their size."""
    found, dim, source = bounds_of(call), call.dim(), call.reads[0]
    if not found or not call.op.writes:
        return None
    length = found[0][1] - found[0][0]
    whole = call.shape(source)[dim]
    fits = length > 0 and whole % length == 0 and all(b - a == length and a % length == 0 for a, b in found)
    return Sections((call.op.writes[0], dim), (source, dim)) if fits else None


def _special(call: Call, factors: Factors) -> Iterator[Strategy]:
    if call.name == EMBEDDING and not any(call.arguments.get(flag) for flag in ("scale_grad_by_freq", "sparse")):
        for digit, before in factors.befores(call.reads[0], 0)[:1]:
            yield Strategy((cut(0, before), WHOLE), (PARTIAL,), digit, VOCABULARY)
    elif call.name == ENTROPY and call.letters is not None:
        yield from _entropies(call, factors)
    elif call.name == ATTENTION and call.arguments.get("enable_gqa") is True:
        yield from _grouped_heads(call, factors)


def _entropies(call: Call, factors: Factors) -> Iterator[Strategy]:
    logits = call.reads[0]
    reduced = call.arguments.get("reduction", 1) in (1, 2)
    if reduced and not call.arguments.get("label_smoothing"):
        for digit, before in factors.befores(logits, 1)[:1]:
            yield Strategy((cut(1, before), WHOLE), (WHOLE,), digit, CLASSES)
    for digit, before in factors.befores(logits, 0) if reduced else ():
        yield Strategy((cut(0, before), cut(0, before)), (PARTIAL,), digit, ROWS)


def _grouped_heads(call: Call, factors: Factors) -> Iterator[Strategy]:
    """Yield the cuts along heads of an attention whose keys have fewer heads: along groups of queries, or inside of
    these, where every rank has all keys."""
    query, key = call.reads[:2]
    axis, groups = len(call.shape(query)) - 3, call.shape(key)[len(call.shape(query)) - 3]
    for digit, before in factors.befores(query, axis):
        if before < groups and (groups % before or groups // before % factors.size(digit)):
            continue
        others = cut(axis, before) if before < groups else COPY
        masks = tuple(
            cut(len(call.shape(name)) - 3, before)
            if len(call.shape(name)) > 2 and call.shape(name)[-3] == call.shape(query)[axis]
            else COPY
            for name in call.reads[3:]
        )
        yield Strategy((cut(axis, before), others, others, *masks), (cut(axis, before),), digit)


def _of_addends(call: Call) -> Iterator[Strategy]:
    """Yield the ways to run a linear op on addends; numbers that it adds would be added by every rank."""
    reads, linear, same = len(call.reads), call.row.linear, call.name not in ("_to_copy", "to", "type_as")
    writes = (PARTIAL,) * len(call.op.writes)
    if not call.numbers.issuperset(call.op.writes):
        return
    if call.reshapes or (linear == "each" and call.row.family in (VIEW, POINTWISE, REDUCTION) and same):
        how = SIZES if call.reshapes else PLAIN
        yield Strategy((PARTIAL, *(WHOLE,) * (reads - 1)), writes, how=how)
    elif linear == "sum" and reads == 2:
        yield Strategy((PARTIAL, PARTIAL), writes)
    elif linear == "product" and call.row.family == POINTWISE:
        for place in range(reads):
            yield Strategy(tuple(PARTIAL if n == place else COPY for n in range(reads)), writes)

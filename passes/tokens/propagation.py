"""What follows from the letters of an op: where its results hold tokens, and what it needs of its operands.

Two operands whose tokens lie along different letters make every pair of two tokens: the first is the query, and the
other operand is needed with the tokens before it too.  Along a letter that is summed over, what a slice has of its own
tokens adds up to the whole (`partial`), and what it has of keys is all there is, if the rest is hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from autopart.passes.ops.letters import Names
from autopart.passes.ops.row import POINTWISE
from autopart.passes.tokens.causality import Causality
from autopart.passes.tokens.context import Found, Refused, TokenOp
from autopart.passes.tokens.places import ZERO, Place
from autopart.passes.tokens.recipe import MEAN, PLAIN, SIZES, WHOLE, Form, OpRecipe, TokenLayout

Role = tuple[bool, TokenLayout]
"""Of a letter: whether the tokens before the slice are there too, and how it holds them."""
_SIZE_ARGUMENTS = {"expand": {"size"}, "broadcast_to": {"size"}}
_ENDS = {"slice": {"end"}}
_UNKNOWN = "no rule says how it treats tokens"


class Letters:
    """One op by its letters.

    keys: letters that hold all tokens up to the last of the slice, where they hold tokens.  allowed: letters that the
    op may mix, which the caller has looked at.
    """

    def __init__(
        self, op: TokenOp, causality: Causality, keys: Collection[str] = (), allowed: Collection[str] = ()
    ) -> None:
        names = op.letters()
        if names is None:
            raise Refused(_UNKNOWN)
        self.op, self.causality, self.allowed = op, causality, allowed
        self.operands, self.results = names.operands, names.results
        self.added = names.added
        for ref, form in list(zip(op.refs, op.forms, strict=True))[len(self.operands) :]:
            if not form.whole or op.model.varying(ref):
                raise Refused(_UNKNOWN)
        self.order = self._order()
        self.roles = self._roles(keys)
        self._pair_up()
        self._spread_to_whole()

    def _order(self) -> tuple[str, str, int] | None:
        """Of operands that lie in the order of a sort: all that grows with the tokens must."""
        orders = {form.order for form in self.op.forms if not form.whole}
        if orders == {None} or not orders:
            return None
        if len(orders) > 1 or any(
            f.whole and self.op.model.varying(r) for r, f in zip(self.op.refs, self.op.forms, strict=True)
        ):
            raise Refused("it combines tokens that were sorted with others that were not")
        return orders.pop()

    def _roles(self, keys: Collection[str]) -> dict[str, Role]:
        found: dict[str, Role] = {}
        for names, form in zip(self.operands, self.op.forms, strict=False):
            if form.partial or form.halo:
                raise Refused("it does more than add up, with a sum over the tokens" if form.partial else _UNKNOWN)
            for prefix, layout in form.roles():
                name = names[layout.axis]
                if not name or names.count(name) > 1:
                    raise Refused(_UNKNOWN)
                before = found.get(name)
                if before is not None and _but_axis(before[1]) != _but_axis(layout):
                    raise Refused("its operands hold the tokens in different orders")
                found[name] = (prefix or name in keys or (before is not None and before[0]), layout)
        return found

    def _pair_up(self) -> None:
        """Of two letters with tokens one is that of the queries, the other that of the keys."""
        queries = [name for name, (prefix, _) in self.roles.items() if not prefix]
        keys = len(self.roles) - len(queries)
        if len(queries) <= 1 and keys <= 1:
            return
        result = self.results[0]
        if keys or len(queries) > 2 or any(name not in result for name in queries):
            raise Refused("it combines every token with every other")
        last = max(queries, key=result.index)
        self.roles[last] = (True, self.roles[last][1])

    def _spread_to_whole(self) -> None:
        """A whole operand may grow with the tokens along another letter: a matrix of weights for every two tokens."""
        fresh: dict[str, TokenLayout] = {}
        for ref, names, form in zip(self.op.refs, self.operands, self.op.forms, strict=False):
            if form.whole:
                for axis in self.op.model.varying(ref):
                    layout = self.op.model.layout(ref, axis)
                    if names[axis] not in self.roles and layout is not None:
                        fresh[names[axis]] = layout
        if not fresh or not self.roles:
            return
        if len(fresh) > 1 or len(self.roles) > 1:
            raise Refused("it combines every token with every other")
        ((name, layout),) = fresh.items()
        ((other, (_, held)),) = self.roles.items()
        summed = other not in self.results[0]
        if summed:
            self.roles[other] = (True, held)
        self.roles[name] = (not summed, layout)

    def found(self) -> Found:
        """The forms of the results, and what is read."""
        reads = tuple(
            self._read(ref, names, form)
            for ref, names, form in zip(self.op.refs, self.operands, self.op.forms, strict=False)
        )
        reads += (WHOLE,) * (len(self.op.refs) - len(reads))
        self._check_mixed()
        partial = self._check_summed()
        forms = [self._form(names, partial) for names in self.results]
        return Found(self._of_writes(forms), OpRecipe(reads, self._how(partial)))

    def _read(self, ref: str, names: Names, form: Form) -> Form:
        if not form.whole:
            for prefix, layout in form.roles():
                wants = self.roles[names[layout.axis]][0]
                if wants != prefix and (prefix or form.keys is not None):
                    raise Refused("it reads scores both by query and by key")
                if wants and not prefix:
                    return form.as_prefix()
            return form
        shape, read = self.op.model.shape(ref), WHOLE
        for axis, name in enumerate(names):
            if name not in self.roles or shape[axis] == 1:
                continue
            prefix, layout = self.roles[name]
            layout = replace(layout, axis=axis)
            if shape[axis] != self.op.model.full_size(layout) or axis not in self.op.model.varying(ref):
                raise Refused("one of its operands is as long as the tokens and does not grow with them")
            read = replace(read, keys=layout) if prefix else replace(read, queries=layout)
        return read

    def _check_mixed(self) -> None:
        for name in self.roles:
            if name[0] in self.op.row.mixes + self.op.row.may_mix and name not in self.allowed:
                doing = "picks some" if self.op.name in ("select", "unbind") else "mixes all"
                raise Refused(f"it {doing} of the tokens ({self.op.name} along them)")

    def _check_summed(self) -> bool:
        """What is summed over; True where that is the tokens of the slice, which add up with those of the others."""
        summed = [name for name in self.roles if name not in self.results[0] and name not in self.allowed]
        if not summed:
            return False
        if self.op.row.linear not in ("each", "mean", "product") or len(summed) > 1:
            raise Refused(f"it takes {self.op.name} over all tokens")
        prefix = self.roles[summed[0]][0]
        if not prefix:
            if len(self.roles) > 1 or self.added:
                raise Refused(f"it takes {self.op.name} over all tokens")
            return True
        if self.op.row.linear == "mean" or not self._hidden(summed[0]):
            raise Refused("it sums over keys, and it is not proven that those after the query count for nothing")
        return False

    def _hidden(self, name: str) -> bool:
        query = next((other for other, (prefix, _) in self.roles.items() if not prefix), None)
        if query is None or query not in self.results[0]:
            return False
        places = [
            Place(ref, names.index(query), names.index(name))
            for ref, names in zip(self.op.refs, self.operands, strict=False)
            if query in names and name in names
        ]
        return any(self.causality.relies(self.op, place, ZERO) for place in places)

    def _form(self, names: Sequence[str], partial: bool) -> Form:
        if partial and self.order is not None:
            raise Refused("it sums tokens that were sorted")
        form = Form(partial=partial, origin=self.op.op.name if partial else "", order=self.order)
        for name, (prefix, layout) in self.roles.items():
            if name in names:
                layout = replace(layout, axis=list(names).index(name))
                form = replace(form, keys=layout) if prefix else replace(form, queries=layout)
        return form

    def _of_writes(self, forms: Sequence[Form]) -> tuple[Form, ...]:
        op = self.op
        if len(forms) == 1:
            return tuple(forms) * len(op.op.writes)
        return tuple(next((f for f in forms if op.fits(written, f)), forms[0]) for written in op.op.writes)

    def _how(self, partial: bool) -> str:
        op = self.op
        if partial and op.row.linear == "mean":
            return MEAN
        if op.name in _SIZE_ARGUMENTS:
            return SIZES
        changing = op.differing() - _ENDS.get(op.name, set())
        if changing and op.row.family != POINTWISE:
            raise Refused(f"its argument {min(changing)} changes with the number of tokens")
        return PLAIN


def _but_axis(layout: TokenLayout) -> TokenLayout:
    return replace(layout, axis=0)


def by_letters(op: TokenOp, causality: Causality) -> Found:
    """The forms of the results of any op that has letters."""
    return Letters(op, causality).found()

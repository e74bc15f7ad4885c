"""The general rule: what the letters of an op say about the tokens of its results and operands.

Two operands whose tokens lie along different letters make every pair of two tokens: the first holds the queries, and
the other one is needed with the tokens before the slice too.  Along a letter that is summed over, own tokens of a slice
add up to the whole (`partial`); keys give the whole sum in every slice if later ones are hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from autopart.passes.ops.letters import Names
from autopart.passes.ops.row import POINTWISE
from autopart.passes.tokens import recipe as words
from autopart.passes.tokens.context import Refused, TokenOp
from autopart.passes.tokens.recipe import WHOLE, Claim, Form, OpRecipe, QueryKeyAxes, TokenLayout

Role = tuple[bool, TokenLayout]
"""Of a letter: whether the tokens before the slice are there too, and how it holds them."""
_SIZE_ARGUMENTS = {"expand": {"size"}, "broadcast_to": {"size"}}
_ENDS = {"slice": {"end"}}
_UNKNOWN = "no rule says how it treats tokens"


def by_letters(op: TokenOp) -> OpRecipe:
    """The recipe of any op that has letters."""
    return TokenLetters(op).recipe()


class TokenLetters:
    """The letters of one op that hold tokens.

    roles: of each such letter.  operands: the letters of the axes of each operand.
    """

    def __init__(self, op: TokenOp, keys: Collection[str] = (), allowed: Collection[str] = ()) -> None:
        """keys: letters that hold all tokens up to the last of the slice, where they hold tokens.  allowed: letters
        that the op may mix, since the caller has looked at them."""
        names = op.letters()
        if names is None:
            raise Refused(_UNKNOWN)
        self._op, self._allowed = op, allowed
        self.operands, self._results, self._added = names.operands, names.results, names.added
        for ref, form in list(zip(op.refs, op.forms, strict=True))[len(self.operands) :]:
            if not form.whole or op.model.varying(ref):
                raise Refused(_UNKNOWN)
        self._order = self._common_order()
        self.roles = self._roles(keys)
        self._pair_up()
        self._spread_to_whole()

    def _common_order(self) -> tuple[str, str, int] | None:
        """The sort that put the operands in order: all that grows with the tokens must be sorted by it."""
        orders = {form.order for form in self._op.forms if not form.whole}
        if orders == {None} or not orders:
            return None
        unsorted = [ref for ref, form in zip(self._op.refs, self._op.forms, strict=True) if form.whole]
        if len(orders) > 1 or any(self._op.model.varying(ref) for ref in unsorted):
            raise Refused("it combines tokens that were sorted with others that were not")
        return orders.pop()

    def _roles(self, keys: Collection[str]) -> dict[str, Role]:
        found: dict[str, Role] = {}
        for names, form in zip(self.operands, self._op.forms, strict=False):
            if form.partial or form.halo:
                raise Refused("it does more than add up, with a sum over the tokens" if form.partial else _UNKNOWN)
            for prefix, layout in form.roles():
                name = names[layout.axis]
                if not name or names.count(name) > 1:
                    raise Refused(_UNKNOWN)
                before = found.get(name)
                if before is not None and replace(before[1], axis=0) != replace(layout, axis=0):
                    raise Refused("its operands hold the tokens in different orders")
                found[name] = (prefix or name in keys or (before is not None and before[0]), layout)
        return found

    def _pair_up(self) -> None:
        """Of two letters with tokens one holds the queries, the other one the keys."""
        queries = [name for name, (prefix, _) in self.roles.items() if not prefix]
        keys = len(self.roles) - len(queries)
        if len(queries) <= 1 and keys <= 1:
            return
        result = self._results[0]
        if keys or len(queries) > 2 or any(name not in result for name in queries):
            raise Refused("it combines every token with every other")
        last = max(queries, key=result.index)
        self.roles[last] = (True, self.roles[last][1])

    def _spread_to_whole(self) -> None:
        """A whole operand may grow with the tokens along another letter: a matrix of weights for every two tokens."""
        fresh: dict[str, TokenLayout] = {}
        for ref, names, form in zip(self._op.refs, self.operands, self._op.forms, strict=False):
            if form.whole:
                for axis in self._op.model.varying(ref):
                    layout = self._op.model.layout(ref, axis)
                    if names[axis] not in self.roles and layout is not None:
                        fresh[names[axis]] = layout
        if not fresh or not self.roles:
            return
        if len(fresh) > 1 or len(self.roles) > 1:
            raise Refused("it combines every token with every other")
        ((name, layout),) = fresh.items()
        ((other, (_, held)),) = self.roles.items()
        summed = other not in self._results[0]
        if summed:
            self.roles[other] = (True, held)
        self.roles[name] = (not summed, layout)

    def recipe(self) -> OpRecipe:
        """The forms of the results, what is read, and what that relies on."""
        op = self._op
        reads = [self._read(*operand) for operand in zip(op.refs, self.operands, op.forms, strict=False)]
        reads += [WHOLE] * (len(op.refs) - len(reads))
        for name in self.roles:
            if name[0] in op.row.mixes + op.row.may_mix and name not in self._allowed:
                doing = "picks some" if op.name in ("select", "unbind") else "mixes all"
                raise Refused(f"it {doing} of the tokens ({op.name} along them)")
        summed = self._summed()
        partial = summed is not None and not self.roles[summed][0]
        relies_on = () if summed is None or partial else self._hidden(summed)
        forms = [self._form(names, partial) for names in self._results]
        results = {
            name: next((form for form in forms if len(forms) == 1 or op.model.fits(name, form)), forms[0])
            for name in op.op.writes
        }
        return OpRecipe(tuple(reads), results, self._how(partial), relies_on=relies_on)

    def _read(self, ref: str, names: Names, form: Form) -> Form:
        if not form.whole:
            for prefix, layout in form.roles():
                wants = self.roles[names[layout.axis]][0]
                if wants != prefix and (prefix or form.keys is not None):
                    raise Refused("it reads scores both by query and by key")
                if wants and not prefix:
                    return form.as_prefix()
            return form
        shape, read = self._op.model.shape(ref), WHOLE
        for axis, name in enumerate(names):
            if name not in self.roles or shape[axis] == 1:
                continue
            prefix, layout = self.roles[name]
            layout = replace(layout, axis=axis)
            if shape[axis] != self._op.model.full_size(layout) or axis not in self._op.model.varying(ref):
                raise Refused("one of its operands is as long as the tokens and does not grow with them")
            read = replace(read, keys=layout) if prefix else replace(read, queries=layout)
        return read

    def _summed(self) -> str | None:
        """The letter with tokens that is summed over."""
        summed = [name for name in self.roles if name not in self._results[0] and name not in self._allowed]
        if not summed:
            return None
        linear, keys = self._op.row.linear, self.roles[summed[0]][0]
        alone = keys or (len(self.roles) == 1 and not self._added)
        if linear not in ("each", "mean", "product") or len(summed) > 1 or not alone or (keys and linear == "mean"):
            raise Refused(f"it takes {self._op.name} over all tokens")
        return summed[0]

    def _hidden(self, keys: str) -> tuple[Claim, ...]:
        """A sum over keys counts no later one where an operand is 0 there."""
        query = next((name for name, (prefix, _) in self.roles.items() if not prefix), None)
        claims = [
            (QueryKeyAxes(ref, names.index(query), names.index(keys)), words.ZERO)
            for ref, names in zip(self._op.refs, self.operands, strict=False)
            if query in names and keys in names
        ]
        if query not in self._results[0] or not claims:
            raise Refused("it sums over keys, and it is not proven that those after the query count for nothing")
        return tuple(claims)

    def _form(self, names: Sequence[str], partial: bool) -> Form:
        if partial and self._order is not None:
            raise Refused("it sums tokens that were sorted")
        form = Form(partial=self._op.op.name if partial else "", order=self._order)
        for name, (prefix, layout) in self.roles.items():
            if name in names:
                layout = replace(layout, axis=list(names).index(name))
                form = replace(form, keys=layout) if prefix else replace(form, queries=layout)
        return form

    def _how(self, partial: bool) -> str:
        op = self._op
        if partial and op.row.linear == "mean":
            return words.MEAN
        if op.name in _SIZE_ARGUMENTS:
            return words.SIZES
        changing = op.differing() - _ENDS.get(op.name, set())
        if changing and op.row.family != POINTWISE:
            raise Refused(f"its argument {min(changing)} changes with the number of tokens")
        return words.PLAIN

"""What a slice of tokens holds of every value, op by op in topological order; or why the model cannot be cut.

Two captures at different numbers of tokens are read side by side: what grows between them is tokens, and every derived
form is checked against both shapes.  Ops that depend on inputs and constants alone belong to no slice: they run at full
length (the prologue), so they may mix tokens (masks, positions, shifted labels).  Ops that depend on parameters always
belong to slices, since their gradients would be lost otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from autopart.ir.errors import RefusedError
from autopart.ir.graph import Graph, Op
from autopart.passes.ops.flops import operands
from autopart.passes.ops.row import CREATION, LOSS, VIEW
from autopart.passes.ops.table import op_name, row_of
from autopart.passes.tokens.causality import Causality
from autopart.passes.tokens.context import Model, Numbers, Refused, TokenOp
from autopart.passes.tokens.propagation import by_letters
from autopart.passes.tokens.recipe import CAUSAL, DIAGONAL, PLAIN, SIZES, WHOLE, Claim, Form, OpRecipe, Recipe
from autopart.passes.tokens.routing_rules import routed, sort
from autopart.passes.tokens.rules import HALO, RULES, drawn, loss, made, of_sums, opaque

_FIX = "leave token_slices out: the model is then trained on whole sequences"
_ARRANGING = ("cat", "repeat", "tile", "repeat_interleave")
"""Ops that rearrange or repeat elements and are no views."""


def analyse(graph: Graph, shorter: Graph, tokens: int, fewer: int, numbers: Numbers) -> Recipe | RefusedError:
    """How a model runs slice by slice, or why it cannot.

    graph, shorter: captures at `tokens` and at `fewer` tokens.  numbers: of values that depend on constants alone, for
    the proof that masks are causal.  O(ops + reads), and for each mask its elements.
    """
    different = _different(graph, shorter)
    if different is not None:
        return different
    return _Analysis(Model(graph, shorter, tokens, fewer, numbers)).recipe()


def _different(graph: Graph, other: Graph) -> RefusedError | None:
    shapes = other.value_map()
    same = graph.structure_digest() == other.structure_digest()
    if same and all(len(v.shape) == len(shapes[v.name].shape) for v in graph.values):
        return None
    pairs = zip(graph.ops, other.ops, strict=False)
    op = next((a for a, b in pairs if (a.target, a.reads, a.params) != (b.target, b.reads, b.params)), None)
    return RefusedError(
        "the model runs other operations on shorter sequences",
        where=f"{op.target} in module {op.module} at {op.where}" if op else f"{len(graph.ops)} ops",
        why="one program has to fit every length",
        fix=_FIX,
    )


class _Analysis:
    def __init__(self, model: Model) -> None:
        self._model, self._graph = model, model.graph
        self._causality = Causality(model)
        self._ops: dict[str, OpRecipe] = {}
        self._refused: dict[str, RefusedError] = {}
        self._prologue: set[str] = set()
        self._chain: dict[str, str] = {}
        self._find_prologue()

    def _find_prologue(self) -> None:
        """Ops that depend on inputs, constants and buffers that stay, and draw no random numbers."""
        model, graph = self._model, self._graph
        updated = {buffer for buffer, _ in graph.updates}
        constant = {p.name for p in graph.params if p.kind != "param" and not p.trainable} - updated
        model.full.update(graph.inputs)
        model.fixed.update(constant)
        for op in graph.ops:
            if op.random or not constant.issuperset(op.params) or not model.full.issuperset(op.reads):
                continue
            self._prologue.add(op.name)
            model.full.update(op.writes)
            if model.fixed.issuperset(op.reads):
                model.fixed.update(op.writes)

    def recipe(self) -> Recipe | RefusedError:
        """The recipe; or why the loss cannot be computed slice by slice."""
        for op in self._graph.ops:
            if op.name not in self._prologue:
                self._see(op)
        graph, model = self._graph, self._model
        output = graph.outputs[0]
        if output in self._refused:
            return self._refused[output]
        if graph.updates:
            buffer, value = self._changed()
            return _refusal(model.writer[value], f"it changes buffer {buffer}, once for every slice")
        if not model.form(output).partial:
            return _refusal(model.writer[output], "the loss does not add up over the tokens")
        ops, reach = _limit_windows(self._graph, self._ops, self._chain, self._causality.reach_of)
        guards = tuple(self._causality.checks.values())
        return Recipe(self._model.tokens, frozenset(self._prologue), ops, self._chain, guards, reach)

    def _changed(self) -> tuple[str, str]:
        """Return the (buffer, new value) to name: the first that depends on the batch, else the first, a counter."""
        moving = set(self._graph.inputs)
        for op in self._graph.ops:
            if not moving.isdisjoint(op.reads):
                moving.update(op.writes)
        return min(self._graph.updates, key=lambda update: update[1] not in moving)

    def _see(self, op: Op) -> None:
        model = self._model
        created = row_of(op.target).family == CREATION and not op.random  # reads nothing but shapes
        earlier = next((self._refused[ref] for ref in op.reads if ref in self._refused), None)
        if earlier is not None and not created:
            self._refused.update(dict.fromkeys(op.writes, earlier))
            return
        try:
            recipe = self._recipe_of(TokenOp(model, op))
            if not all(form.halo or model.fits(name, form) for name, form in recipe.results.items()):
                raise Refused("its shape does not follow the rule for this op")
            recipe = replace(recipe, relies_on=self._causality.proven(op.name, recipe))
        except Refused as end:
            self._refused.update(dict.fromkeys(op.writes, _refusal(op, end.why, end.fix)))
            return
        self._ops[op.name] = recipe
        model.forms.update(recipe.results)
        self._note_chain(op, recipe)

    def _recipe_of(self, op: TokenOp) -> OpRecipe:
        if op.row.family == CREATION and not op.op.random:
            return made(op)
        if any(form.partial for form in op.forms):
            return of_sums(op)
        if op.op.random:
            whole = all(form.whole for form in op.forms)  # then every slice draws the same
            return op.recipe(WHOLE) if whole else drawn(op, self._by_rule(op))
        if all(form.whole for form in op.forms):
            return self._of_whole(op)
        recipe = None
        if any(form.order is not None for form in op.forms):
            recipe = routed(op)
        elif op.name in ("sort", "argsort"):
            recipe = sort(op)
        return recipe or self._by_rule(op)

    def _by_rule(self, op: TokenOp) -> OpRecipe:
        if any(form.halo for form in op.forms) and op.name not in HALO:
            raise Refused("it uses values that hold tokens before their slice too")
        if op.row.averages or op.row.family == LOSS:
            return loss(op)
        rule = RULES.get(op.name) or (by_letters if op.row.axes else opaque)
        return rule(op)

    def _of_whole(self, op: TokenOp) -> OpRecipe:
        """For operands that are parameters or made by the prologue: token by token where possible, else every slice
        computes the whole result."""
        model = self._model
        axes = {ref: model.varying(ref) if ref in model.full else () for ref in op.refs}
        layouts = [model.layout(ref, axes[ref][0]) if len(axes[ref]) == 1 else None for ref in op.refs]
        seeds = [None if layout is None else Form(queries=layout) for layout in layouts]
        if any(model.varying(name) for name in op.op.writes) and any(seeds):
            op.forms = [seed or WHOLE for seed in seeds]
            with suppress(Refused):
                recipe = self._by_rule(op)
                if all(not form.partial and model.fits(name, form) for name, form in recipe.results.items()):
                    self._causality.proven(op.op.name, recipe)
                    return recipe
        return op.recipe(WHOLE, (WHOLE,) * len(op.refs))

    def _note_chain(self, op: Op, recipe: OpRecipe) -> None:
        """Note a value that only rearranges another one, of which its earlier tokens can be made too."""
        model, held = self._model, [name for name in op.reads if self._model.form(name).queries is not None]
        here = TokenOp(model, op)
        arranges = here.row.family == VIEW or here.name in _ARRANGING
        if len(held) != 1 or not arranges or recipe.how not in (PLAIN, SIZES) or recipe.amount:
            return
        source = model.form(held[0])
        if source.order is not None or source.keys is not None:
            return
        if here.name == "cat" and any(model.varying(ref) for ref in here.refs if ref != held[0]):
            return
        for name, form in recipe.results.items():
            if form.keys is None and form.queries is not None:
                self._chain[name] = held[0]


def _refusal(op: Op, why: str, fix: str = "") -> RefusedError:
    module = f"module {op.module} at " if op.module else ""
    return RefusedError(
        f"{op_name(op.target)} ({op.name}) cannot be run slice by slice of the tokens",
        where=f"{module}{op.where}",
        why=why,
        fix=f"{fix}, or {_FIX}" if fix else _FIX,
    )


def _limit_windows(
    graph: Graph,
    ops: Mapping[str, OpRecipe],
    chain: Mapping[str, str],
    reach_of: Callable[[Sequence[Claim]], int | None],
) -> tuple[dict[str, OpRecipe], dict[str, int]]:
    """The recipes with their keys limited to windows, and the reach of values that are read with earlier tokens.

    Where masks hide old keys too, slices neither keep nor read them.  Ops that share an axis of keys form a group,
    which reads back as far as all its masks show: what was proven of later keys (`causality`) is asked again of old
    ones.  A group reads all keys where it relies on anything else.
    chain: see `Recipe`.  reach_of: the window that claims prove, None for all keys.  O(ops + windows * masks).
    """
    changed, reach = dict(ops), dict[str, int]()
    for members, values in _groups(graph, ops, chain):
        claims = [claim for name in members for claim in ops[name].relies_on]
        own = None if any(ops[name].how in (CAUSAL, DIAGONAL) for name in members) else reach_of(claims)
        if own is None:
            continue
        for name in members:
            recipe = ops[name]
            reads = tuple(form.reaching(own) for form in recipe.reads)
            results = {result: form.reaching(own) for result, form in recipe.results.items()}
            changed[name] = replace(recipe, reads=reads, results=results)
        reach.update(dict.fromkeys(values, own))
    return changed, reach


def _groups(
    graph: Graph, ops: Mapping[str, OpRecipe], chain: Mapping[str, str]
) -> Iterator[tuple[list[str], list[str]]]:
    """(ops, values of own tokens that they read with earlier ones) that share an axis of keys."""
    forms: dict[str, Form] = {name: form for recipe in ops.values() for name, form in recipe.results.items()}
    groups: dict[tuple[str, str], set[tuple[str, str]]] = {}  # of ("op", name) and ("value", name)

    def join(a: tuple[str, str], b: tuple[str, str]) -> None:
        small, large = sorted((groups.get(a, {a}), groups.get(b, {b})), key=len)
        large |= small
        groups.update(dict.fromkeys((a, b, *small), large))

    for op in graph.ops:
        if op.name not in ops:
            continue
        refs = [ref[1:] for ref in operands(op)]
        held = [name for name in (*refs, *op.writes) if name in forms and forms[name].keys is not None]
        for ref, read in zip(refs, ops[op.name].reads, strict=True):
            if read.keys is not None and ref in forms and forms[ref].keys is None:
                held.append(ref)
                while ref in chain:  # what a value is made of shares its axis too
                    join(("value", ref), ("value", chain[ref]))
                    ref = chain[ref]
        for name in held:
            join(("op", op.name), ("value", name))
    for joined in {id(group): group for group in groups.values()}.values():
        group = sorted(joined)  # the order of a set differs between processes
        values = [name for kind, name in group if kind == "value" and forms[name].keys is None]
        yield [name for kind, name in group if kind == "op"], values

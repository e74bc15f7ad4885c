"""What a slice of tokens holds of every value, op by op in topological order; or why the model cannot be cut.

Two captures at different numbers of tokens are read side by side: what grows between them is tokens, and every derived
form is checked against both shapes.  Ops that depend on inputs and constants alone belong to no slice: they run at full
length (the prologue), so they may mix tokens (masks, positions, shifted labels).  Ops that depend on parameters always
belong to slices, since their gradients would be lost otherwise.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from autopart.ir.errors import RefusedError
from autopart.ir.graph import Graph, Op
from autopart.passes.ops.row import CREATION, LOSS, VIEW
from autopart.passes.ops.table import op_name, row_of
from autopart.passes.tokens.causality import Causality
from autopart.passes.tokens.context import Model, Numbers, Refused, TokenOp
from autopart.passes.tokens.loss_rules import loss, of_sums
from autopart.passes.tokens.propagation import by_letters
from autopart.passes.tokens.recipe import PLAIN, SIZES, WHOLE, Form, OpRecipe, Recipe
from autopart.passes.tokens.routing_rules import routed, sort
from autopart.passes.tokens.rules import HALO, RULES, drawn, made, opaque
from autopart.passes.tokens.windows import limit_windows

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
        refused = self._refusal()
        if refused is not None:
            return refused
        ops, reach = limit_windows(self._graph, self._ops, self._chain, self._causality.reach_of)
        guards = tuple(self._causality.checks.values())
        return Recipe(self._model.tokens, frozenset(self._prologue), ops, self._chain, guards, reach)

    def _refusal(self) -> RefusedError | None:
        graph, model = self._graph, self._model
        output = graph.outputs[0]
        if output in self._refused:
            return self._refused[output]
        if graph.updates:
            buffer, value = graph.updates[0]
            return _refusal(model.writer[value], f"it changes buffer {buffer}, once for every slice")
        if not model.form(output).partial:
            return _refusal(model.writer[output], "the loss does not add up over the tokens")
        return None

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
        seeds = [self._seed(ref) for ref in op.refs]
        if any(model.varying(name) for name in op.op.writes) and any(seeds):
            op.forms = [seed or WHOLE for seed in seeds]
            with suppress(Refused):
                recipe = self._by_rule(op)
                if all(not form.partial and model.fits(name, form) for name, form in recipe.results.items()):
                    self._causality.proven(op.op.name, recipe)
                    return recipe
        return op.recipe(WHOLE, (WHOLE,) * len(op.refs))

    def _seed(self, ref: str) -> Form | None:
        axes = self._model.varying(ref)
        layout = self._model.layout(ref, axes[0]) if ref in self._model.full and len(axes) == 1 else None
        return Form(queries=layout) if layout is not None else None

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

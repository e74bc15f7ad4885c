"""What a slice of tokens holds of every value, op by op in topological order; or why the model cannot be cut.

Two captures at different numbers of tokens are read side by side: what grows between them is tokens, and every derived
form is checked against both shapes.  What depends on inputs and constants alone is no part of a slice: it is computed
at full length (the prologue), so it may mix tokens as it likes (masks, positions, shifted labels).  What depends on
parameters never is, for its gradient would be lost.
"""

from __future__ import annotations

from autopart.ir.errors import RefusedError
from autopart.ir.graph import Graph, Op
from autopart.passes.ops.row import CREATION, LOSS, VIEW
from autopart.passes.ops.table import op_name
from autopart.passes.tokens.causality import Causality
from autopart.passes.tokens.context import Found, Model, Numbers, Refused, TokenOp
from autopart.passes.tokens.loss_rules import loss, of_sums
from autopart.passes.tokens.propagation import by_letters
from autopart.passes.tokens.recipe import PLAIN, SIZES, WHOLE, Form, Guard, OpRecipe, Recipe
from autopart.passes.tokens.routing_rules import routed, sort
from autopart.passes.tokens.rules import RULES, drawn, made, opaque
from autopart.passes.tokens.windows import windows

_FIX = "leave token_slices out: the model is then trained on whole sequences"


def analyse(graph: Graph, shorter: Graph, tokens: int, fewer: int, numbers: Numbers) -> Recipe | RefusedError:
    """How a model runs slice by slice, or why not.

    graph, shorter: captures at `tokens` and at `fewer` tokens.  numbers: of values that depend on constants
    alone, for the proof that masks are causal.  O(ops + reads), and for each mask its elements.
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
        why="code for a slice is made from one program for every length",
        fix=_FIX,
    )


class _Analysis:
    def __init__(self, model: Model) -> None:
        self._model, self._graph = model, model.graph
        self._causality = Causality(model)
        self._ops: dict[str, OpRecipe] = {}
        self._guards: list[Guard] = []
        self._prologue: set[str] = set()
        self._chain: dict[str, str] = {}
        self._find_prologue()

    def _find_prologue(self) -> None:
        """What follows from inputs, constants and buffers that stay, without random numbers."""
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
        """The recipe; or what keeps the loss from being computed slice by slice."""
        for op in self._graph.ops:
            if op.name not in self._prologue:
                self._see(op)
        refused = self._refusal()
        if refused is not None:
            return refused
        model = self._model
        guards = tuple(self._guards)
        found = windows(model, self._ops, self._chain, self._causality)
        prologue = frozenset(self._prologue)
        return Recipe(model.tokens, found.forms, prologue, found.ops, self._chain, guards, found.reach)

    def _refusal(self) -> RefusedError | None:
        graph, model = self._graph, self._model
        output = graph.outputs[0]
        if output in model.refused:
            return model.refused[output]
        if graph.updates:
            buffer, value = graph.updates[0]
            op = model.writer[value]
            return _refusal(op, f"it changes buffer {buffer}, once for every slice")
        form = model.forms.get(output, WHOLE)
        if not form.partial:
            op = model.writer[output]
            return _refusal(op, "the loss does not add up over the tokens")
        return None

    def _see(self, op: Op) -> None:
        model = self._model
        try:
            found = self._found(TokenOp(model, op))
            for name, form in zip(op.writes, found.forms, strict=True):
                if not form.halo and not model.fits(name, form):
                    raise Refused("its shape does not follow the rule for this op")
        except Refused as end:
            for name in op.writes:
                model.refused[name] = _refusal(op, end.why, end.fix)
            return
        except _Earlier as earlier:
            for name in op.writes:
                model.refused[name] = earlier.refusal
            return
        self._ops[op.name] = found.recipe
        model.forms.update(zip(op.writes, found.forms, strict=True))
        self._note_chain(op, found)

    def _found(self, op: TokenOp) -> Found:
        model = self._model
        if op.row.family == CREATION and (op.refs or not op.model.full.issuperset(op.refs)) and not op.op.random:
            return made(op, self._causality, self._guards)
        for ref in op.refs:
            if ref in model.refused:
                raise _Earlier(model.refused[ref])
        if op.op.random:
            whole = all(form.whole for form in op.forms)  # then every slice draws the same
            return op.found(WHOLE, (WHOLE,) * len(op.refs)) if whole else drawn(op, self._by_rule(op))
        if any(form.partial for form in op.forms):
            return of_sums(op, self._causality, self._guards)
        if all(form.whole for form in op.forms):
            return self._of_whole(op)
        if any(form.order is not None for form in op.forms):
            found = routed(op, self._causality, self._guards)
            return found if found is not None else self._by_rule(op)
        if op.name in ("sort", "argsort"):
            found = sort(op)
            if found is not None:
                return found
        return self._by_rule(op)

    def _by_rule(self, op: TokenOp) -> Found:
        if op.row.averages or op.row.family == LOSS:
            return loss(op, self._causality, self._guards)
        rule = RULES.get(op.name)
        if rule is None and not op.row.axes:
            return opaque(op)
        return rule(op, self._causality, self._guards) if rule is not None else by_letters(op, self._causality)

    def _of_whole(self, op: TokenOp) -> Found:
        """Of parameters and the prologue: token by token where that is possible, else in every slice all of it."""
        model = self._model
        whole = op.found(WHOLE, (WHOLE,) * len(op.refs))
        if not any(model.varying(name) for name in op.op.writes):
            return whole
        seeds = [self._seed(ref) for ref in op.refs]
        if not any(seeds):
            return whole
        op.forms = [seed or WHOLE for seed in seeds]
        try:
            found = self._by_rule(op)
        except Refused:
            return whole
        fits = zip(op.op.writes, found.forms, strict=True)
        return found if all(not form.partial and op.fits(name, form) for name, form in fits) else whole

    def _seed(self, ref: str) -> Form | None:
        axes = self._model.varying(ref)
        layout = self._model.layout(ref, axes[0]) if ref in self._model.full and len(axes) == 1 else None
        return Form(queries=layout) if layout is not None else None

    def _note_chain(self, op: Op, found: Found) -> None:
        """What only rearranges one value that holds tokens can be made of that value's tokens before the slice too."""
        model, how = self._model, found.recipe.how
        held = [name for name in op.reads if model.form(name).queries is not None]
        arranges = TokenOp(model, op).row.family == VIEW or op_name(op.target) in _ARRANGING
        if len(held) != 1 or model.form(held[0]).order is not None or not arranges:
            return
        if how not in (PLAIN, SIZES) or found.recipe.amount:
            return
        if op_name(op.target) == "cat" and any(model.varying(ref) for ref in TokenOp(model, op).refs if ref != held[0]):
            return
        for name in op.writes:
            form = model.forms[name]
            if form.keys is None and form.queries is not None and model.form(held[0]).keys is None:
                self._chain[name] = held[0]


_ARRANGING = ("cat", "repeat", "tile", "repeat_interleave")
"""Ops that rearrange or repeat elements and are no views."""


class _Earlier(Exception):
    """An operand was refused."""

    def __init__(self, refusal: RefusedError) -> None:
        self.refusal = refusal
        super().__init__(refusal.what)


def _refusal(op: Op, why: str, fix: str = "") -> RefusedError:
    module = f"module {op.module} at " if op.module else ""
    return RefusedError(
        f"{op_name(op.target)} ({op.name}) cannot be run slice by slice of the tokens",
        where=f"{module}{op.where}",
        why=why,
        fix=f"{fix}, or {_FIX}" if fix else _FIX,
    )

"""Token slices executed in one process: the reference for the analysis and for the generated slice code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from autopart.batch.batch import flatten
from autopart.capture import Captured
from autopart.capture.cache import CaptureCache
from autopart.ir.actions import Slot
from autopart.ir.errors import RefusedError
from autopart.ir.graph import Graph, Size
from autopart.ir.plan import Stage
from autopart.ir.shares import Window
from autopart.passes.tokens.analysis import analyse
from autopart.passes.tokens.recipe import Recipe, TokenLayout
from autopart.planning.derive.token_axis import Probed, fewer_tokens, sequence_length, shortened, token_recipe
from autopart.rng import current_key
from autopart.runtime.stages.stage import StageRunner
from autopart.runtime.stages.stage_module import StageSlices
from autopart.stagecode.slicing import every_query_sees
from autopart.stagecode.token_slices import slice_stage

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Analysed:
    """A captured model and the result of the token analysis."""

    model: nn.Module
    batch: Any
    captured: Captured
    recipe: Recipe | RefusedError


def analysed(model: nn.Module, batch: Any, loss_fn: Any = None) -> Analysed:
    flat = flatten(batch, with_target=loss_fn is not None)
    captures = CaptureCache(model, loss_fn)
    size = Size(flat.rows or 1)
    recipe = token_recipe(captures, flat, size)
    return Analysed(model, batch, captures(flat, size), recipe)


def judged(model: nn.Module, batch: Any) -> tuple[Analysed, list[Recipe | RefusedError]]:
    """Return the analysis of a model whose loss is a sum over a stack of losses, and of each loss separately."""
    flat, captures = flatten(batch), CaptureCache(model, None)
    size, tokens = Size(flat.rows or 1), sequence_length(flat)
    assert tokens is not None
    fewer = fewer_tokens(tokens)
    captured = captures(flat, size)
    known = replace(flat, masks=captured.masks)
    whole, short = captured.graph, captures(shortened(known, tokens, fewer), size).graph
    stack = next(op for op in reversed(whole.ops) if "stack" in op.target)
    numbers = Probed(captured)
    each = [analyse(_only(whole, loss), _only(short, loss), tokens, fewer, numbers) for loss in stack.reads]
    return Analysed(model, batch, captured, analyse(whole, short, tokens, fewer, numbers)), each


def _only(graph: Graph, output: str) -> Graph:
    """Return the part of a graph that computes one value."""
    needed, ops = {output}, []
    for op in reversed(graph.ops):
        if needed.intersection(op.writes):
            ops.append(op)
            needed.update(op.reads)
            needed.update(op.writes)
    values = tuple(value for value in graph.values if value.name in needed or value.name in graph.inputs)
    return replace(graph, ops=tuple(reversed(ops)), values=values, outputs=(output,))


def run_sliced(
    found: Analysed, inputs: Mapping[str, torch.Tensor], lengths: Sequence[int], cut_at: Sequence[int] = ()
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return loss and gradients of one micro-batch, with slices forward in order through all stages and then backward.

    cut_at: positions in the list of ops at which stages begin.
    """
    captured, recipe = found.captured, found.recipe
    assert isinstance(recipe, Recipe), recipe
    assert checks_hold(found, inputs)
    params = {n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in captured.tensors.items()}
    return play_sliced(captured.graph, sliced_stages(captured, recipe, lengths, cut_at), params, inputs)


def play_sliced(
    graph: Graph, codes: Sequence[StageSlices], params: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return loss and gradients of a micro-batch, with slices forward through this code of stages and then backward."""
    (output,) = graph.outputs
    runners = [_runner(code, params, graph) for code in codes]
    window, loss, full = Window(0, 1, 1), torch.zeros((), dtype=torch.float64), dict(inputs)
    count = len(codes[0][1])
    for number in range(count):
        sent: dict[str, torch.Tensor] = {}
        for place, ((_, slices), runner) in enumerate(zip(codes, runners, strict=True)):
            given = {name: sent[name] for name in slices[number].inputs if name in sent}
            values = given if number else {**full, **given}
            sent.update(runner.forward(Slot(place, 0, number), window, values, current_key()[:2], train=True))
        loss += sent[output].detach().double()
        last = sent[output]
    for number in reversed(range(count)):
        grads = {output: torch.ones_like(last)}
        for place, runner in reversed(list(enumerate(runners))):
            for name, grad in runner.backward(Slot(place, 0, number), grads).items():
                grads[name] = grads[name] + grad if name in grads else grad
    return loss, {name: p.grad for name, p in params.items() if p.grad is not None}


def _runner(code: StageSlices, params: Mapping[str, torch.Tensor], graph: Graph) -> StageRunner:
    differentiable = {value.name for value in graph.values if value.grad}
    _, slices = code
    received = differentiable.intersection(slices[0].inputs)
    return StageRunner({1: code}, params, frozenset(received), frozenset(slices[0].outputs))


def sliced_stages(
    captured: Captured,
    recipe: Recipe,
    lengths: Sequence[int],
    cut_at: Sequence[int],
    shard: Any = None,
    again: float = 0.0,
) -> list[StageSlices]:
    """Return the code of stages.  shard: as for `slice_stage`.  again: the part of each stage's ops that run again."""
    ops, ends = captured.graph.ops, [0, *cut_at, len(captured.graph.ops)]
    stages = []
    for place, end in enumerate(ends[1:]):
        inside = ops[ends[place] : end]
        written = {name for op in inside for name in op.writes}
        later = {read for op in ops[end:] for read in op.reads if op.name in recipe.ops}
        outputs = [v.name for v in captured.graph.values if v.name in written & (later | {captured.graph.outputs[0]})]
        names = tuple([op.name for op in inside])
        group = names[: round(again * len(names))]
        stage = Stage(names, (0,), (group,) if group else ())
        stages.append(slice_stage(captured, recipe, stage, outputs, lengths, CPU, shard=shard))
    return stages


def unsliced(found: Analysed, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return loss and gradients of the captured program on whole sequences."""
    captured = found.captured
    params = {n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in captured.tensors.items()}
    names = captured.names
    args = []
    for node in captured.module.graph.nodes:
        if node.op == "placeholder":
            args.append(params[names.params[node.name]] if node.name in names.params else inputs[names.value(node)])
    results = captured.module(*args)
    values = [node.name for node in captured.module.graph.find_nodes(op="output")[0].args[0]]
    loss = results[values.index(captured.graph.outputs[0])]
    loss.backward()
    return loss.detach().double(), {name: p.grad for name, p in params.items() if p.grad is not None}


def inputs_of(found: Analysed, batch: Any = None, *, with_target: bool = False) -> dict[str, torch.Tensor]:
    flat = flatten(found.batch if batch is None else batch, with_target=with_target)
    return dict(zip(found.captured.graph.inputs, flat.tensors, strict=True))


def worst_error(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Return the largest relative error of a gradient. All parameters must have one."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    errors = [
        float((found[name] - wanted).norm() / wanted.norm().clamp(min=1e-30))
        if wanted.norm() > 1e-12
        else float(found[name].norm())
        for name, wanted in expected.items()
    ]
    return max(errors)


def future_shows(found: Analysed, inputs: Mapping[str, torch.Tensor], token: int, tolerance: float = 1e-9) -> list[str]:
    """Return values in which a token is visible at earlier positions, or whose later tokens get gradients from earlier
    ones.

    All tokens from `token` on are changed and earlier positions compared; this check does not use the rules of the
    analysis. tolerance: relative and absolute.
    """
    recipe = found.recipe
    assert isinstance(recipe, Recipe)
    changed = {}
    for name, value in inputs.items():
        other = value.clone()
        if "label" not in name and not value.is_floating_point() and value.shape[1:2] == (recipe.tokens,):
            other[:, token:] = (value[:, token:] + 1) % max(2, int(value.max()) + 1)
        changed[name] = other
    if not checks_hold(found, changed):  # a query that sees nothing yields NaN everywhere
        changed |= {name: value for name, value in inputs.items() if "mask" in name}
    first, second = (_Recorded(found.captured).run_on(given) for given in (inputs, changed))
    held = {
        name: form.queries
        for name, form in recipe.forms.items()
        if form.queries is not None and form.keys is None and not form.halo and form.order is None and name in first
    }

    def part(value: torch.Tensor, layout: TokenLayout, *, later: bool = False) -> torch.Tensor:
        own = recipe.tokens - layout.short
        parts = value.unflatten(layout.axis, (layout.stride, own, layout.block))
        ends = (min(token, own), own) if later else (0, min(token, own))
        return parts.narrow(layout.axis + 1, ends[0], ends[1] - ends[0])

    shown = [
        n for n, at in held.items() if not torch.allclose(part(first[n], at), part(second[n], at), tolerance, tolerance)
    ]
    last = [name for name in held if first[name].requires_grad][-1]
    part(first[last], held[last]).sum().backward()
    grads = {name: first[name].grad for name in held if first[name].grad is not None}
    return shown + [name for name, grad in grads.items() if part(grad, held[name], later=True).abs().sum() > tolerance]


def checks_hold(found: Analysed, inputs: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a batch passes the checks that the recipe requires of each batch."""
    recipe = found.recipe
    assert isinstance(recipe, Recipe)
    values = _Recorded(found.captured).run_on(inputs)
    return all(every_query_sees(guard, values, recipe.tokens) for guard in recipe.guards)


class _Recorded(fx.Interpreter):
    """Runs a captured program and keeps every value and its gradient."""

    def __init__(self, captured: Captured) -> None:
        super().__init__(captured.module)
        self._captured = captured
        self.values: dict[str, torch.Tensor] = {}

    def run_on(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        names, args = self._captured.names, []
        for node in self._captured.module.graph.find_nodes(op="placeholder"):
            name = names.params.get(node.name)
            own = self._captured.tensors[name] if name is not None else inputs[names.value(node)]
            args.append(own.detach().clone().requires_grad_(own.requires_grad))
        self.run(*args)
        return self.values

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        if isinstance(made, torch.Tensor):
            if made.requires_grad:
                made.retain_grad()
            self.values[self._captured.names.value(n)] = made
        return made

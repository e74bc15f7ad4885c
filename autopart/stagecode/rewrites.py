"""Rewrites of the code of a stage: products with a weight get the form that adds its gradient into `.grad`; ops that
compute the same from inputs and constants, and counters, are merged; random ops of a stage with replicas draw for the
whole micro-batch, of which each replica takes its own rows."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from autopart.capture import Captured
from autopart.capture.trace.lower import is_random
from autopart.ir.errors import RefusedError
from autopart.passes.ops.table import op_name
from autopart.planning.derive.reduction import Layouts
from autopart.rng import keyed
from autopart.runtime.stages import adding_products
from autopart.runtime.stages.adding_products import is_weight, let_products_add
from autopart.runtime.stages.slice_functions import Rows
from autopart.runtime.stages.stage_module import StageModule
from autopart.stagecode.stage_graph import Draws

_aten = torch.ops.aten
_COUNTS = {_aten.add.Tensor, _aten.add.Scalar}


def accumulate_in_place(
    code: StageModule, tensors: Mapping[str, torch.Tensor], *, deferrable: bool = False, eager: bool = True
) -> StageModule:
    """Let products with a large trainable parameter, or a cast of one, add its gradient into `.grad`; return the code.

    Other uses of a parameter, and parameters with another layout than that of their gradient, stay as they are.
    tensors: the model's, by name.  deferrable: whether a backward of weights is to compute these products: then small
    parameters count too, since what is not rewritten runs in the backward of inputs.  eager: whether other products
    take the faster kernel too, as costs expect; a compiler has its own.  O(nodes).
    """
    least = 0 if deferrable else adding_products.LEAST_ELEMENTS
    given = code.module.graph.find_nodes(op="placeholder")
    weights = {
        node
        for node, name in zip(given, code.params, strict=False)
        if is_weight(tensors[code.casts[name][0] if name in code.casts else name], least)
    }
    let_products_add(code.module, weights, eager=eager)
    return code


def merge_ops(code: StageModule, inputs: Collection[str]) -> StageModule:
    """Merge ops of the top level of a stage's code, in place; every result keeps its bits.  Return the code.

    Each layer of a model may build its own attention mask from the same padding, and count its own batches.
    inputs: names of the batch's inputs, which need no gradient, like constants.  O(nodes).
    """
    graph = code.module.graph
    ops = [node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    if any(op._schema.is_mutable for op in ops):  # perhaps writes to memory that equal ops would share
        return code
    given = zip(graph.find_nodes(op="placeholder"), (*code.params, *code.inputs), strict=False)
    _merge_equal(graph, {node for node, name in given if name in inputs or name in code.constants})
    _merge_counters(graph, len(code.updates))
    code.module.recompile()
    return code


def _merge_equal(graph: fx.Graph, plain: set[fx.Node]) -> None:
    """Let ops without gradients that are equal run once.  plain: gets the nodes that depend on plain ones alone."""
    known: dict[tuple[Any, ...], fx.Node] = {}
    for node in list(graph.nodes):
        if not _is_pure(node) or not plain.issuperset(node.all_input_nodes):
            continue
        first = known.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        if first is node:
            plain.add(node)
        else:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _is_pure(node: fx.Node) -> bool:
    """Return whether an op computes the same from the same arguments each time; none of them writes."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace == "aten" and not is_random(node)
    return target is operator.getitem


def _merge_counters(graph: fx.Graph, updates: int) -> None:
    """Add to all counters at once: buffers whose new value is their sum with a number.

    updates: number of buffers that the code returns new values of, after its other results.
    """
    end = graph.output_node()
    results: Any = end.args[0]
    counters: dict[int, list[fx.Node]] = defaultdict(list)
    for result in dict.fromkeys(results[len(results) - updates :]):
        if result.target in _COUNTS and set(result.users) == {end} and not result.kwargs:
            buffer, step = result.args
            if type(step) is int and buffer.op == "placeholder":
                counters[step].append(result)
    for step, sums in counters.items():
        if len(sums) < 2:
            continue
        with graph.inserting_before(end):
            together = graph.call_function(_aten._foreach_add.Scalar, ([each.args[0] for each in sums], step))
            for place, each in enumerate(sums):
                each.replace_all_uses_with(graph.call_function(operator.getitem, (together, place)))
                graph.erase_node(each)


BY_SHAPE = frozenset(
    (
        *("dropout", "native_dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"),
        *("scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu", "rrelu", "rrelu_with_noise"),
        *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like"),
        *("bernoulli", "normal", "normal_functional", "uniform", "exponential", "multinomial"),
    )
)
"""Ops that draw the same count of numbers whatever the values are, so the rows of other replicas may hold anything."""


def draws_of(captured: Captured, ops: Collection[str], layouts: Layouts) -> Draws:
    """Return how the random ops among `ops` take their rows.  layouts: of the values that they read and write.

    Raises RefusedError for an op whose count of numbers may depend on values.  O(nodes).
    """
    found: dict[fx.Node, Rows] = {}
    for node in captured.module.graph.nodes:
        if node.op != "call_function" or node.target is not keyed or node.name not in ops:
            continue
        rows = _rows(captured, node, layouts)
        if any(rows[0]) or any(rows[1]):
            if op_name(str(node.args[0])) not in BY_SHAPE:
                op = captured.graph.op_map()[node.name]
                raise RefusedError(
                    f"{op_name(op.target)} cannot be run by replicas of a stage",
                    where=f"module {op.module} at {op.where}",
                    why="how many random numbers it draws may depend on values that other replicas have",
                    fix="use replicas=1, or draw the numbers with torch.rand or torch.randn",
                )
            found[node] = rows
    return found


def _rows(captured: Captured, node: fx.Node, layouts: Layouts) -> Rows:
    names = captured.names
    given: list[tuple[int, int] | None] = []

    def see(arg: fx.Node) -> fx.Node:
        given.append(None if arg.name in names.params else _pair(layouts, names.value(arg)))
        return arg

    target: Any
    target, _, *args = node.args
    fx.node.map_arg((tuple(args), node.kwargs), see)
    example = node.meta["val"]
    made: list[tuple[int, int] | None]
    if isinstance(example, torch.Tensor):
        made = [_pair(layouts, names.value(node))]
    else:
        made = [None] * len(example)
        for user in node.users:
            if user.target is operator.getitem:
                made[user.args[1]] = _pair(layouts, names.value(user))  # type: ignore[index]
    arguments = [argument.name for argument in target._schema.arguments]
    return tuple(given), tuple(made), arguments.index("size") if "size" in arguments else None


def _pair(layouts: Layouts, value: str) -> tuple[int, int] | None:
    layout = layouts[value]
    return None if layout is None else (layout.axis, layout.stride)

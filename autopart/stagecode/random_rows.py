"""Random ops of a stage with replicas: each replica draws for the whole micro-batch, and takes its own rows."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from autopart.capture import Captured
from autopart.ir.errors import RefusedError
from autopart.passes.ops.table import op_name
from autopart.planning.derive.reduction import Layouts
from autopart.rng import keyed
from autopart.runtime.stages.slice_functions import Rows
from autopart.stagecode.stage_graph import Draws

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

"""Through which values a gradient flows, found by running the graph on fake tensors with autograd enabled.

Export's metadata does not tell, since it traces without gradients.  Equal calls are run once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.utils import _pytree as pytree

from autopart.capture.python.reads.questions import made_of
from autopart.capture.source_location import user_line_of_text
from autopart.capture.trace.export import JVP_FIX
from autopart.capture.trace.functional import call_key, tensor_kind
from autopart.ir.errors import RefusedError
from autopart.ir.graph import Graph
from autopart.rng import keyed


def gradient_nodes(module: fx.GraphModule, trainable: set[str], loss: fx.Node) -> set[str]:
    """Return the names of the nodes that need a gradient and reach the loss.  O(nodes).

    trainable: names of the placeholders of trainable parameters.  Raises RefusedError for an op without a derivative.
    """
    nodes = list(module.graph.nodes)
    mode = detect_fake_mode([n.meta.get("val") for n in nodes])
    needs: set[str] = set()
    env: dict[fx.Node, Any] = {}
    known: dict[Hashable, Any] = {}
    with mode or contextlib.nullcontext(), torch.enable_grad():
        for node in nodes:
            if node.op == "placeholder":
                env[node] = _leaf(node.meta["val"], node.name in trainable)
            elif node.op == "call_function":
                key = _key(node, env)
                env[node] = result = known[key] if key in known else _call(node, env)
                known[key] = result
            if any(t.requires_grad for t in _tensors(env.get(node))):
                needs.add(node.name)
    return {node.name for node in made_of([loss], {node for node in nodes if node.name not in needs})}


def _leaf(value: torch.Tensor, trainable: bool) -> torch.Tensor:
    fresh = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return fresh.requires_grad_(trainable)


def _key(node: fx.Node, env: dict[fx.Node, Any]) -> Hashable:
    args = node.args if node.target is not keyed else (node.args[0], *node.args[2:])
    try:
        return call_key(node.target, args, node.kwargs, lambda n: (tensor_kind(env[n]), env[n].requires_grad))[0]
    except NotImplementedError:
        return node


def _call(node: fx.Node, env: dict[fx.Node, Any]) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
    target: Any = node.target
    if target is keyed:
        target, args = args[0], args[2:]
    result = target(*args, **kwargs)
    for tensor in _tensors(result):
        if tensor.grad_fn is not None and tensor.grad_fn.name().endswith("NotImplemented"):
            derived = "_backward" in str(target)
            raise RefusedError(
                f"{target} has no derivative",
                where=user_line_of_text(node.meta.get("stack_trace")),
                why="it is the derivative of an op, which forward() takes, and torch has no derivative of it"
                if derived
                else "it stands where the model changes a tensor in place, and a gradient has to flow through it",
                fix=JVP_FIX if derived else "write that line without changing a tensor in place",
            )
    return result


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    return (t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor))


def require_something_to_train(graph: Graph) -> None:
    """Raise RefusedError if no gradient flows from the loss to any parameter, unless the model has no parameters."""
    parameters = [param for param in graph.params if param.kind == "param"]
    if graph.value_map()[graph.outputs[0]].grad or not parameters:
        return
    frozen = not any(param.trainable for param in parameters)
    raise RefusedError(
        "there is nothing to train: no gradient flows from the loss to any parameter",
        why="every parameter that it depends on has requires_grad=False"
        if frozen
        else "it is computed under torch.no_grad(), or from what is detached",
        fix="set requires_grad_(True) on the parameters to train"
        if frozen
        else "compute the loss with gradients enabled in forward()",
    )

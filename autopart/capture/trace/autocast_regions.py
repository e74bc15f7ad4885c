"""Autocast regions of an exported program taken apart: each op that autocast casts for gets a region of its own.

Decomposing a region as a whole makes its casts explicit, but forgets where in the user's code its ops stand.  A region
around one op stands where the op stands.  Other ops need none: autocast leaves them as they are.  Needed only where
`run_decompositions` is asked for the whole program (`functional` keeps places by itself).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.wrap import wrap_with_autocast
from torch.export import ExportedProgram

from autopart.capture.trace.autocast import Autocast, decomposed_under, has_kernel, inner_autocast

Env = dict[fx.Node, Any]


def spread_autocast(program: ExportedProgram) -> None:
    """Replace every autocast region in the program, in place, by regions of single ops.  O(nodes)."""
    module = program.graph_module
    regions = [node for node in module.graph.nodes if node.target is wrap_with_autocast]
    for region in regions:
        with module.graph.inserting_before(region):
            results = _Spread(module)(module, region, lambda node: node, None)
        for pick in list(region.users):
            assert pick.target is operator.getitem, pick
            result = results[pick.args[1]]
            program.graph_signature.replace_all_uses(pick.name, result.name)
            pick.replace_all_uses_with(result)
            module.graph.erase_node(pick)
        module.graph.erase_node(region)
    if regions:
        module.graph.eliminate_dead_code(is_impure_node=lambda node: node.op != "get_attr")
        module.graph.lint()
        module.recompile()


class _Spread:
    """Copies what a region holds into the graph of `home`, where it is inserting."""

    def __init__(self, home: fx.GraphModule) -> None:
        self._home = home

    def __call__(
        self, owner: fx.GraphModule, region: fx.Node, outer: Callable[[fx.Node], Any], around: Autocast | None
    ) -> list[Any]:
        """The results of a region of `owner`; outer: what stands for its operands; around: the autocast around it."""
        device_type, dtype, enabled, _, body, *operands = region.args
        assert isinstance(body, fx.Node)
        state = inner_autocast(around, device_type, dtype, enabled)
        inner: fx.GraphModule = getattr(owner, str(body.target))
        places = [node for node in inner.graph.nodes if node.op == "placeholder"]
        env: Env = {p: fx.map_arg(o, outer) for p, o in zip(places, operands, strict=True)}
        for node in inner.graph.nodes:
            if node.op == "output":
                return list(fx.map_arg(node.args[0], env.__getitem__))
            if node.op != "placeholder":
                env[node] = self._copied(inner, node, env, state)
        raise AssertionError("a region without results")

    def _copied(self, owner: fx.GraphModule, node: fx.Node, env: Env, state: Autocast | None) -> Any:
        target: Any = node.target
        if target is wrap_with_autocast:
            return tuple(self(owner, node, env.__getitem__, state))
        if target is operator.getitem and isinstance(source := env[node.args[0]], tuple):  # type: ignore[index]
            return source[node.args[1]]  # type: ignore[index]
        if node.op == "get_attr":
            return self._held(getattr(owner, str(target)))
        known = isinstance(target, torch._ops.OpOverload)
        if state is None or not (known or isinstance(target, torch._ops.HigherOrderOperator)):
            return self._plain(node, env)
        if not known or has_kernel(target, state):
            return self._in_region(node, env, state)
        if (made := self._made_of(node, env, state)) is not None:
            return made
        return self._plain(node, env)

    def _held(self, value: Any) -> fx.Node:
        name = f"_region_{len(list(self._home.children()))}"
        self._home.add_module(name, value)
        return self._home.graph.get_attr(name)

    def _plain(self, node: fx.Node, env: Env) -> fx.Node:
        return self._home.graph.node_copy(node, env.__getitem__)

    def _in_region(self, node: fx.Node, env: Env, state: Autocast) -> Any:
        """The op in a region of its own, which stands where the op stands."""
        body = fx.Graph()
        reads = node.all_input_nodes
        inside: Env = {}
        for read in reads:
            if read.op == "get_attr":
                inside[read] = body.get_attr(str(read.target))
            else:
                inside[read] = body.placeholder(f"x{len(inside)}")
                inside[read].meta = dict(read.meta)
        op = body.node_copy(node, inside.__getitem__)
        results = [op]
        if not isinstance(node.meta["val"], torch.Tensor):
            results = [body.call_function(operator.getitem, (op, i)) for i in range(len(node.meta["val"]))]
            for result, value in zip(results, node.meta["val"], strict=True):
                result.meta = dict(node.meta, val=value)
        body.output(tuple(results))
        held = {str(r.target): self._value(env[r]) for r in reads if r.op == "get_attr"}
        region = self._held(fx.GraphModule(held, body))
        given = [env[read] for read in reads if read.op != "get_attr"]
        settings = (state.device_type, state.dtype, True, False)
        whole = self._home.graph.call_function(wrap_with_autocast, (*settings, region, *given))
        whole.meta = dict(node.meta, val=tuple(result.meta["val"] for result in results))
        picks = []
        for place, result in enumerate(results):
            picks.append(self._home.graph.call_function(operator.getitem, (whole, place)))
            picks[-1].meta = dict(result.meta)
        return picks[0] if isinstance(node.meta["val"], torch.Tensor) else tuple(picks)

    def _value(self, get: fx.Node) -> Any:
        return getattr(self._home, str(get.target))

    def _made_of(self, node: fx.Node, env: Env, state: Autocast) -> Any:
        """Results of the ops that a composite op is made of, where kept whole it would lose casts; else None."""
        target: Any = node.target
        reads = node.all_input_nodes
        fakes = [fake for read in reads if isinstance(fake := read.meta.get("val"), torch.Tensor)]
        if target._schema.is_mutable or len(fakes) < len(reads):
            return None
        graph = decomposed_under(state, target, node.args, node.kwargs, fakes)
        if graph is None:
            return None
        own: Env = dict(zip((n for n in graph.nodes if n.op == "placeholder"), (env[r] for r in reads), strict=True))
        for inner in graph.nodes:
            if inner.op == "call_function":
                own[inner] = self._home.graph.node_copy(inner, own.__getitem__)
                own[inner].meta = dict(node.meta, val=inner.meta["val"])
            elif inner.op == "output":
                results = fx.map_arg(inner.args[0], own.__getitem__)
                return tuple(results) if isinstance(results, (tuple, list)) else results
        return None

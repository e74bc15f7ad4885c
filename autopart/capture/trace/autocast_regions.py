"""Autocast regions of an exported program split up: each op that autocast casts for gets a region of its own.

torch.export keeps an autocast region as one call, without casts.  Decomposing a region makes its casts explicit, each
as an op (`_to_copy`), but forgets the user's line of the ops inside; a region around one op has the line of that op.
Ops that autocast does not cast for need no region.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._higher_order_ops.wrap import wrap_with_autocast
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from autopart.capture.trace.autocast import Autocast
from autopart.capture.trace.equal_calls import call_key, tensor_kind

Env = dict[fx.Node, Any]


def spread_autocast(program: ExportedProgram) -> None:
    """Replace every autocast region in the program, in place, by regions of single ops.  O(nodes).

    Raises NotImplementedError for nested regions of two device types.
    """
    module = program.graph_module
    regions = [node for node in module.graph.nodes if node.target is wrap_with_autocast]
    made: dict[Hashable, fx.Graph | None] = {}
    for region in regions:
        with module.graph.inserting_before(region):
            results = _Spread(module, made)(module, region, lambda node: node, None)
        replace_region(region, results, program.graph_signature)
    if regions:
        module.graph.eliminate_dead_code(is_impure_node=lambda node: node.op != "get_attr")
        module.graph.lint()
        module.recompile()


def replace_region(region: fx.Node, results: Sequence[Any], signature: ExportGraphSignature | None) -> None:
    """Put `results` in the places of a region's results.  signature: of the program whose graph holds the region."""
    for pick in list(region.users):
        assert pick.target is operator.getitem, pick
        result = results[pick.args[1]]  # type: ignore[index]
        if signature is not None:
            signature.replace_all_uses(pick.name, result.name)
        pick.replace_all_uses_with(result)
        region.graph.erase_node(pick)
    region.graph.erase_node(region)


class _Spread:
    """Copies what a region holds into the graph of `home`, at its current insertion point.

    made: gets what composite ops become, for each distinct call.
    """

    def __init__(self, home: fx.GraphModule, made: dict[Hashable, fx.Graph | None]) -> None:
        self._home, self._made = home, made

    def __call__(
        self, owner: fx.GraphModule, region: fx.Node, outer: Callable[[fx.Node], Any], around: Autocast | None
    ) -> list[Any]:
        """Copy a region of `owner`; return its results.  outer: maps its operands; around: the autocast around it."""
        device_type, dtype, enabled, _, body, *operands = region.args
        assert isinstance(body, fx.Node)
        state = _inner_autocast(around, device_type, dtype, enabled)
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
        if not known or _casts(target, state):
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
        """Copy the op into a region of its own, which gets the op's line."""
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
        held = {str(r.target): getattr(self._home, str(env[r].target)) for r in reads if r.op == "get_attr"}
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

    def _made_of(self, node: fx.Node, env: Env, state: Autocast) -> Any:
        """Return the results of a composite op split into its ops, if it would lose casts as a whole; else None."""
        target: Any = node.target
        reads = node.all_input_nodes
        fakes = [fake for read in reads if isinstance(fake := read.meta.get("val"), torch.Tensor)]
        if target._schema.is_mutable or len(fakes) < len(reads):
            return None
        key: Hashable = node
        with contextlib.suppress(NotImplementedError):
            key, _ = call_key(target, node.args, node.kwargs, lambda read: tensor_kind(read.meta["val"]))
        if (state, key) not in self._made:
            self._made[state, key] = _decomposed_under(state, target, node.args, node.kwargs, fakes)
        graph = self._made[state, key]
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


def _inner_autocast(outer: Autocast | None, device_type: Any, dtype: Any, enabled: Any) -> Autocast | None:
    """Return the autocast inside a region that is nested in another one."""
    if outer is not None and outer.device_type != device_type:
        raise NotImplementedError
    return Autocast(device_type, dtype or torch.get_autocast_dtype(device_type)) if enabled else None


def _has_kernel(target: Any, key: str) -> bool:
    """Return whether torch's dispatcher has a kernel for an op under a key."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), key)


def _casts(target: Any, state: Autocast) -> bool:
    """Return whether autocast casts for this op."""
    return _has_kernel(target, f"Autocast{state.device_type.upper()}")


def _decomposed_under(
    state: Autocast, target: torch._ops.OpOverload, args: Any, kwargs: Any, operands: Sequence[torch.Tensor]
) -> fx.Graph | None:
    """Return the ops of a composite op (einsum, an LSTM) if autocast casts for some of them but not for the whole.

    Returns None if no cast would be lost.  args, kwargs: with fx nodes for the tensors; operands: fake tensors for
    those nodes, in order of their first use.
    """
    if _casts(target, state) or not _has_kernel(target, "CompositeImplicitAutograd"):
        return None
    nodes = list(dict.fromkeys(a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, fx.Node)))

    def call(*tensors: torch.Tensor) -> Any:
        given = dict(zip(nodes, tensors, strict=True))
        return target(*fx.map_arg(args, given.__getitem__), **fx.map_arg(kwargs, given.__getitem__))

    cast = _traced(call, operands, state)
    try:
        plain = _traced(call, operands, None)
    except RuntimeError:  # without casts the operands do not fit each other
        return cast
    return cast if _targets(plain) != _targets(cast) else None


def _traced(call: Callable[..., Any], operands: Sequence[torch.Tensor], state: Autocast | None) -> fx.Graph:
    mode = detect_fake_mode(list(operands))
    with mode or contextlib.nullcontext(), state.region() if state else contextlib.nullcontext():
        traced: fx.GraphModule = make_fx(call)(*operands)
    return traced.graph


def _targets(graph: fx.Graph) -> list[Any]:
    return [node.target for node in graph.nodes if node.op == "call_function"]

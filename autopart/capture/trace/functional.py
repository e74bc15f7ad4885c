"""An exported program without in-place ops made functional, each distinct op once.

`run_decompositions` traces the whole program anew to find what becomes of its ops, though a deep model repeats a few
dozen of them.  Where no op writes to memory, calls that are alike become the same (`alike`).  So a small program that
holds each distinct op once, on operands of its own, is decomposed by torch itself, and its answers are put in place of
the ops of the large one.

A call in an autocast region is alike only to others in such a region: they are decomposed inside of one, which makes
their casts ops, and so keep their place in the user's code.

Anything else (an op that changes a tensor, a higher-order op other than a switch of the gradient mode or an autocast,
sizes that depend on data, a complex or quantized operand) is left to `run_decompositions`.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind

from autopart.capture.source_location import user_line_of_text
from autopart.capture.trace.autocast import Autocast, inner_autocast
from autopart.capture.trace.call_signature import call_key, tensor_kind
from autopart.capture.trace.decomposed import Answer, Call, answers
from autopart.ir.errors import RefusedError
from autopart.passes.ops.row import ASSERTION
from autopart.passes.ops.table import row_of

_aten = torch.ops.aten
_GRAD_REGION = "wrap_with_set_grad_enabled"
_AUTOCAST_REGION = "wrap_with_autocast"


def functional_graph(program: ExportedProgram) -> fx.Graph | None:
    """The graph of the program, functional, as `run_decompositions({})` makes it, or None when that has to be asked.

    Holds after: parameters, inputs and results stand in the order of the program's signature.  O(nodes), and one
    decomposition of the distinct ops.
    """
    if any(spec.kind is not OutputKind.USER_OUTPUT for spec in program.graph_signature.output_specs):
        return None
    graph = _Inlined()
    try:
        graph.take(program.graph_module)
        found = answers(graph.calls)
    except NotImplementedError:
        return None
    program.graph_signature.input_specs.sort(key=_place_in_signature)
    order = {spec.arg.name: place for place, spec in enumerate(program.graph_signature.input_specs)}
    graph.placeholders.sort(key=lambda node: order[node.name])
    return _spliced(graph, found)


def _place_in_signature(spec: InputSpec) -> int:
    """Buffers that are not saved stand behind the constants, as after `run_decompositions` in most models (there the
    order of modules decides; the order of parameters has no meaning)."""
    if spec.kind is InputKind.BUFFER and spec.persistent is False:
        return 2
    return {InputKind.PARAMETER: 0, InputKind.BUFFER: 0, InputKind.CONSTANT_TENSOR: 1}.get(spec.kind, 3)


class _Inlined:
    """The calls of a program in order, regions inlined.  same: which node stands for a node that is no op."""

    def __init__(self) -> None:
        self.placeholders: list[fx.Node] = []
        self.calls: list[Call] = []
        self.results: tuple[Any, ...] = ()
        self._same: dict[fx.Node, Any] = {}
        self._kinds: dict[fx.Node, Hashable] = {}
        self._autocast: Autocast | None = None

    def take(self, module: fx.GraphModule) -> None:
        """Read a whole program.  Raises NotImplementedError."""
        self.placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        self.results = self._walk(module)

    def _walk(self, module: fx.GraphModule) -> tuple[Any, ...]:
        for node in module.graph.nodes:
            if node.op == "output":
                results = self._resolve(node.args[0])
                return tuple(results) if isinstance(results, (tuple, list)) else (results,)
            if node.op == "call_function":
                self._call(module, node)
            elif node.op == "get_attr" and not isinstance(getattr(module, str(node.target), None), fx.GraphModule):
                raise NotImplementedError
        raise NotImplementedError

    def _call(self, module: fx.GraphModule, node: fx.Node) -> None:
        target: Any = node.target
        if row_of(str(target)).family == ASSERTION:
            return
        if target is operator.getitem:
            source = self._resolve(node.args[0])
            if isinstance(source, tuple):  # a region's result
                self._same[node] = source[_number(node)]
        elif isinstance(target, torch._ops.HigherOrderOperator):
            self._same[node] = self._region(module, node)
        elif target is _aten.detach_.default and _is_fresh(node.args[0]):
            self._same[node] = self._resolve(node.args[0])
        elif isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable:
            self._record(node)
        else:
            raise NotImplementedError

    def _region(self, module: fx.GraphModule, node: fx.Node) -> tuple[Any, ...]:
        target: Any = node.target
        settings = {_GRAD_REGION: 1, _AUTOCAST_REGION: 4}.get(target.name(), len(node.args))
        region = node.args[settings] if len(node.args) > settings else None
        if not isinstance(region, fx.Node) or node.kwargs:
            raise NotImplementedError
        inner = getattr(module, str(region.target))
        places = [n for n in inner.graph.nodes if n.op == "placeholder"]
        self._same.update(zip(places, (self._resolve(arg) for arg in node.args[settings + 1 :]), strict=True))
        outer = self._autocast
        if target.name() == _AUTOCAST_REGION:
            self._autocast = inner_autocast(outer, *node.args[:3])
        results = self._walk(inner)
        self._autocast = outer
        return results

    def _resolve(self, value: Any) -> Any:
        """An argument with the nodes that stand for its nodes; the result of a region is a tuple of them."""
        if isinstance(value, fx.Node):
            return self._same.get(value, value)
        return fx.map_arg(value, lambda node: self._same.get(node, node))

    def _record(self, node: fx.Node) -> None:
        args, kwargs = self._resolve(node.args), self._resolve(dict(node.kwargs))
        key, operands = call_key(node.target, args, kwargs, self._kind_of)
        self.calls.append(Call(node, args, kwargs, operands, (self._autocast, key), self._autocast))

    def _kind_of(self, node: fx.Node) -> Hashable:
        if node not in self._kinds:
            self._kinds[node] = _kind(node)
        return self._kinds[node]


def _number(pick: fx.Node) -> int:
    """Which of several results a node picks."""
    number = pick.args[1]
    assert isinstance(number, int)
    return number


def _is_fresh(node: Any) -> bool:
    """True for a tensor that forward() made of numbers: nothing else shares its memory."""
    return isinstance(node, fx.Node) and node.target is _aten.lift_fresh_copy.default


def _kind(node: fx.Node) -> Hashable:
    value = node.meta.get("val")
    return (tensor_kind(value), node.op == "placeholder" and value is not None and value.requires_grad)


# -- the whole program -------------------------------------------------------------------------------------------


def _spliced(program: _Inlined, found: Mapping[Hashable, Answer]) -> fx.Graph:
    """The program with every call replaced by what becomes of it."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in program.placeholders:
        env[node] = graph.create_node("placeholder", node.target, node.args, name=node.name)
        env[node].meta = dict(node.meta)
    for call in program.calls:
        answer = found[call.key]
        local = dict(zip(answer.operands, (env[operand] for operand in call.operands), strict=True))
        for node in answer.nodes:
            if node not in local:
                _copied(graph, node, local, call.node.meta)
        results = [local[result] for result in answer.results]
        _check_precision(call, results)
        env |= _named(call.node, results)
    graph.output(fx.map_arg(program.results, env.__getitem__))
    return graph


def _check_precision(call: Call, results: list[fx.Node]) -> None:
    """Raises RefusedError for an op whose results came out in another precision than autocast gave them."""
    seen = call.node.meta["val"]
    wanted = [seen] if isinstance(seen, torch.Tensor) else list(seen)
    for tensor, result in zip(wanted, results, strict=True):
        if tensor.dtype != result.meta["val"].dtype:
            raise RefusedError(
                f"{call.node.target} cannot be captured under autocast",
                where=user_line_of_text(call.node.meta.get("stack_trace")),
                why=f"its result is of {tensor.dtype} there, and of {result.meta['val'].dtype} as an op of its own",
                fix="run it in a torch.autocast(device_type, enabled=False) region of forward(), on inputs of the "
                "precision it is to have",
            )


def _copied(graph: fx.Graph, node: fx.Node, env: dict[fx.Node, fx.Node], meta: Mapping[str, Any]) -> None:
    """An op copied, under the name that torch gives it; of several results every one, as torch does."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
    target: Any = node.target
    name = graph._target_to_str(target.overloadpacket.__name__)
    env[node] = copy = graph.create_node("call_function", target, args, kwargs, name=name)
    copy.meta = dict(meta, val=node.meta["val"])
    if isinstance(node.meta["val"], torch.Tensor):
        return
    read = {user.args[1]: user for user in node.users}
    for place, part in enumerate(node.meta["val"]):
        picked = graph.call_function(operator.getitem, (copy, place))
        picked.meta = dict(meta, val=part)
        if place in read:
            env[read[place]] = picked


def _named(node: fx.Node, results: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """The nodes of the program that stand for an op's results."""
    if isinstance(node.meta["val"], torch.Tensor):
        return {node: results[0]}
    return {user: results[_number(user)] for user in node.users if user.target is operator.getitem}

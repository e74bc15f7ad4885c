"""An exported program without in-place ops made functional, with each distinct op decomposed once.

`run_decompositions` traces the whole program again to find what becomes of its ops, though a deep model repeats a few
dozen of them.  Where no op writes to memory, equal calls (`call_key`) become the same ops, and most stay what they are,
since torch's dispatcher does not compose them of others (`_stays`).  So torch decomposes a small program that holds
each of the other distinct calls once, on operands of its own, and its answers replace the calls of the large one.
They are remembered, because models are captured again.

An op in an autocast region of its own (`autocast`) counts as one call, whose casts become ops.  Any other
program (an op that changes a tensor, another higher-order op, sizes that depend on data, a complex or quantized
operand) is left to `run_decompositions`.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.wrap import wrap_with_autocast
from torch.export import ExportedProgram, exported_program
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.utils import _pytree as pytree

from autopart.capture.python.reads.questions import Operand, made_of
from autopart.capture.source_location import line_of
from autopart.ir.errors import RefusedError
from autopart.passes.ops.row import ASSERTION
from autopart.passes.ops.table import row_of

_aten = torch.ops.aten
_KEY: Any = torch._C.DispatchKey
_BY_PYTHON = {_KEY.CompositeImplicitAutograd, _KEY.Autograd, _KEY.AutogradCPU, _KEY.AutogradCUDA, _KEY.Functionalize}
"""Dispatch keys under which an op may be written in Python, of other ops."""
_FORMS = {
    "float": float,
    "int": int,
    "bool": bool,
    "List[int]": list,
    "List[Tensor]": list,
    "List[Optional[Tensor]]": list,
}
"""What the dispatcher makes of an argument of a type."""


def call_key(
    target: Any, args: Any, kwargs: Any, kind_of: Callable[[fx.Node], Hashable]
) -> tuple[Hashable, tuple[fx.Node, ...]]:
    """Return a key that is equal for calls with equal effects, and the operands of this call.

    The key holds the op, its arguments, and shapes, strides and types of its operands.  Raises NotImplementedError for
    sizes that depend on data, and for complex or quantized operands.
    """
    operands: dict[fx.Node, int] = {}
    number: Any = lambda operand: Operand(operands.setdefault(operand, len(operands)))  # noqa: E731
    shape = fx.map_arg((args, kwargs), number)
    return (target, frozen(shape), tuple(map(kind_of, operands))), tuple(operands)


def tensor_kind(value: Any) -> Hashable:
    """Return the part of a key for one operand.  Raises NotImplementedError."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_quantized:
        raise NotImplementedError
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    if value.is_complex() or value.is_conj() or value.is_neg() or not all(type(size) is int for size in sizes):
        raise NotImplementedError
    return (sizes, value.dim(), value.dtype, value.device)


def frozen(value: Any) -> Hashable:
    """Return an argument as a key, equal for arguments that no op can tell apart."""
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *map(frozen, value))
    if isinstance(value, dict):
        return tuple((name, frozen(item)) for name, item in value.items())
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise NotImplementedError
    return (type(value), repr(value))


def picks_of(call: fx.Node, values: Sequence[Any]) -> list[fx.Node]:
    """Add a node for each of the results of a call to its graph; return them.  values: fake tensors of the results."""
    picks = []
    for place, value in enumerate(values):
        picks.append(call.graph.call_function(operator.getitem, (call, place)))
        picks[-1].meta = dict(call.meta, val=value)
    return picks


@dataclass(frozen=True)
class _Call:
    """One op of the program.

    operands: the tensors that it reads; key: equal for calls that become the same ops; body: of an autocast region.
    """

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: tuple[fx.Node, ...]
    key: Hashable
    body: fx.GraphModule | None = None


@dataclass(frozen=True)
class _Answer:
    """What a call becomes.  operands: placeholders for its operands; nodes: the ops, in order; results: among both."""

    operands: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]


def functional_graph(program: ExportedProgram) -> fx.Graph | None:
    """Return the functional graph of a program, equal to that of `run_decompositions({})`; None if that has to make it.

    Parameters, inputs and results are in the order of the program's signature.  O(nodes), and one decomposition of the
    distinct calls.
    """
    if any(spec.kind is not OutputKind.USER_OUTPUT for spec in program.graph_signature.output_specs):
        return None
    try:
        calls, results = _calls(program.graph_module)
        found = _answers(calls)
    except NotImplementedError:
        return None
    program.graph_signature.input_specs.sort(key=_place_in_signature)
    places = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    return _spliced([places[spec.arg.name] for spec in program.graph_signature.input_specs], calls, found, results)


def _place_in_signature(spec: InputSpec) -> int:
    """Return the sort key of an input: buffers that are not saved come after the constants, as in torch."""
    if spec.kind is InputKind.BUFFER and spec.persistent is False:
        return 2
    return {InputKind.PARAMETER: 0, InputKind.BUFFER: 0, InputKind.CONSTANT_TENSOR: 1}.get(spec.kind, 3)


def _calls(module: fx.GraphModule) -> tuple[list[_Call], Any]:
    """Return the calls of a program in order, and its results.

    Raises NotImplementedError if `run_decompositions` has to be used.
    """
    calls: list[_Call] = []
    same: dict[fx.Node, fx.Node] = {}

    @functools.cache
    def kind_of(node: fx.Node) -> Hashable:
        value: Any = node.meta.get("val")
        return (tensor_kind(value), node.op == "placeholder" and value.requires_grad)

    def resolved(value: Any) -> Any:
        return fx.map_arg(value, lambda node: same.get(node, node))

    for node in module.graph.nodes:
        target: Any = node.target
        if node.op == "get_attr" and not isinstance(getattr(module, str(target), None), fx.GraphModule):
            raise NotImplementedError
        if not _is_op(node) or row_of(str(target)).family == ASSERTION:
            continue
        args, kwargs = resolved(node.args), resolved(dict(node.kwargs))
        if target is _aten.detach_.default and node.args[0].target is _aten.lift_fresh_copy.default:
            same[node] = args[0]  # made from numbers in forward(): nothing else shares its memory
        elif target is wrap_with_autocast:
            body = getattr(module, str(args[4].target))
            args = (*args[:4], *args[5:])
            key, operands = call_key(target, args, {}, kind_of)
            calls.append(_Call(node, args, {}, operands, (key, _body_key(body)), body))
        elif isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable:
            key, operands = call_key(target, args, kwargs, kind_of)
            calls.append(_Call(node, args, kwargs, operands, key))
        else:
            raise NotImplementedError
    return calls, resolved(module.graph.output_node().args[0])


def _body_key(body: fx.GraphModule) -> Hashable:
    """Return a key that is equal for autocast regions of equal ops.  Raises NotImplementedError for other regions."""
    numbers: dict[fx.Node, Any] = {}
    parts = []
    for node in body.graph.nodes:
        target: Any = node.target
        if node.op == "get_attr" or (
            _is_op(node) and (not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable)
        ):
            raise NotImplementedError
        args, kwargs = fx.map_arg((node.args, node.kwargs), numbers.__getitem__)
        parts.append((str(target), frozen(args), frozen(kwargs)))
        numbers[node] = Operand(len(numbers))
    return tuple(parts)


def _is_op(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not operator.getitem


# -- the whole program -------------------------------------------------------------------------------------------


def _spliced(
    placeholders: Iterable[fx.Node], calls: Iterable[_Call], found: Mapping[Hashable, _Answer], results: Any
) -> fx.Graph:
    """Return the program with every call replaced by what it becomes."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in placeholders:
        env[node] = graph.create_node("placeholder", node.target, node.args, name=node.name)
        env[node].meta = dict(node.meta)
    for call in calls:
        answer = found.get(call.key)
        if answer is None:  # it stays what it is
            _copied(graph, call.node, env, call.node.meta, (call.args, call.kwargs))
            continue
        local = dict(zip(answer.operands, (env[operand] for operand in call.operands), strict=True))
        for node in answer.nodes:
            if node not in local:
                _copied(graph, node, local, call.node.meta)
        made = [local[result] for result in answer.results]
        if call.body is not None:
            _check_precision(call.node, call.body, made)
        if isinstance(call.node.meta["val"], torch.Tensor):
            env[call.node] = made[0]
        else:
            env |= {user: made[user.args[1]] for user in call.node.users if user.target is operator.getitem}  # type: ignore[index]
    graph.output(fx.map_arg(results, env.__getitem__))
    return graph


def _check_precision(region: fx.Node, body: fx.GraphModule, results: list[fx.Node]) -> None:
    """Raise RefusedError for the op of an autocast region if its results have another dtype than autocast gave them."""
    for seen, result in zip(region.meta["val"], results, strict=True):
        if seen.dtype != result.meta["val"].dtype:
            raise RefusedError(
                f"{next(node.target for node in body.graph.nodes if _is_op(node))} cannot be captured under autocast",
                where=line_of(region),
                why=f"its result is {seen.dtype} there, and {result.meta['val'].dtype} as an op of its own",
                fix="run it in a torch.autocast(device_type, enabled=False) region of forward(), on inputs of the "
                "precision it is to have",
            )


def _copied(
    graph: fx.Graph, node: fx.Node, env: dict[fx.Node, fx.Node], meta: Mapping[str, Any], given: Any = None
) -> None:
    """Copy an op and pick each of its results, under the names that torch gives them.  given: its arguments, if they
    are not those of the node."""
    args, kwargs = fx.map_arg(given or (node.args, node.kwargs), env.__getitem__)
    target: Any = node.target
    name = graph._target_to_str(target.overloadpacket.__name__)
    env[node] = copy = graph.create_node("call_function", target, args, kwargs, name=name)
    mode = pytree.tree_leaves(meta["val"])[0].fake_mode
    value = pytree.tree_map_only(torch.Tensor, lambda tensor: _fake(tensor, mode), node.meta["val"])
    copy.meta = dict(meta, val=value)
    if isinstance(value, torch.Tensor):
        return
    picks = picks_of(copy, value)
    env |= {user: picks[user.args[1]] for user in node.users}  # type: ignore[index]


# -- what torch makes of each distinct call -------------------------------------------------------------------------

_KNOWN: dict[Hashable, _Answer] = {}
"""What earlier captures found, by state of torch and key: models are captured again for other plans and switches."""
_MOST_KNOWN = 1000
"""Entries, of some 10 KB each, from which on all are forgotten."""


def _answers(calls: list[_Call]) -> dict[Hashable, _Answer]:
    """Return what torch makes of each distinct call that does not stay as it is, by decomposing one program that holds
    those not seen before.

    Raises NotImplementedError if `run_decompositions` has to be used for the whole program.
    """
    composite: Any = exported_program
    kept: set[Any] = composite._collect_all_valid_cia_ops()
    switches = (torch.are_deterministic_algorithms_enabled, torch._C._get_mkldnn_enabled, torch._C._get_cudnn_enabled)
    state = (torch.get_default_dtype(), torch.is_grad_enabled(), *(switch() for switch in switches))
    distinct = {call.key: call for call in calls if not _stays(call, kept)}
    found = {key: _KNOWN[state, key] for key in distinct if (state, key) in _KNOWN}
    distinct = {key: call for key, call in distinct.items() if key not in found}
    if not distinct:
        return found
    graph, bodies = fx.Graph(), dict[str, fx.GraphModule]()
    operands = {key: [_operand(graph, operand) for operand in call.operands] for key, call in distinct.items()}
    results = {key: _put(graph, call, operands[key], bodies) for key, call in distinct.items()}
    graph.output(tuple(node for key in distinct for node in results[key]))
    made = _program(graph, bodies).run_decompositions({}).graph_module.graph
    places, returned = iter(made.find_nodes(op="placeholder")), iter(made.output_node().args[0])
    if len(_KNOWN) > _MOST_KNOWN:
        _KNOWN.clear()
    for key in distinct:  # each call gets the ops between its operands and its results
        own = tuple(itertools.islice(places, len(operands[key])))
        out = tuple(itertools.islice(returned, len(results[key])))
        nodes = made_of(out, own)
        if any(node.op != "call_function" for node in nodes):
            raise NotImplementedError
        found[key] = _KNOWN[state, key] = _Answer(own, tuple(sorted(nodes)), out)
    return found


def _stays(call: _Call, kept: Container[Any]) -> bool:
    """Return whether a call stays what it is: the op has a kernel of its own, or torch is told to keep it, and
    nothing written in Python stands in for it.  An op of a library may have any kernel: it is decomposed.

    A kernel made of other ops that only stands in for a device's (CompositeExplicitAutograd and its NonFunctional kind)
    runs below all that records ops; functionalization has its own rule for one with the latter, `lift_fresh_copy`.
    kept: the composite ops that torch is told to keep."""
    target: Any = call.node.target
    if call.body is not None or target.namespace != "aten" or _BY_PYTHON.intersection(target.py_kernels):
        return False
    has, name = torch._C._dispatch_has_kernel_for_dispatch_key, target.name()
    own_rule = has(name, "CompositeExplicitAutogradNonFunctional") and has(name, "Functionalize")
    return not own_rule and _as_dispatched(call) and (target in kept or not has(name, "CompositeImplicitAutograd"))


def _as_dispatched(call: _Call) -> bool:
    """Return whether the arguments of a call have the form that torch's dispatcher gives them: in order, of the types
    of the schema, without defaults at the end.  Python that calls an op by name may give them in any form."""
    target: Any = call.node.target
    arguments = target._schema.arguments
    given = [
        *zip(arguments, call.args, strict=False),
        *((a, call.kwargs[a.name]) for a in arguments if a.name in call.kwargs),
    ]
    if any(a.has_default_value() and value == a.default_value for a, value in given[-1:]):
        return False
    if any(not a.kwarg_only or value == a.default_value for a, value in given[len(call.args) :]):
        return False
    return all(isinstance(value, _FORMS.get(str(a.real_type), object)) for a, value in given)


def _put(graph: fx.Graph, call: _Call, operands: list[fx.Node], bodies: dict[str, fx.GraphModule]) -> list[fx.Node]:
    """Copy a call into a graph, on operands of its own; return its results.  bodies: gets an autocast region's body."""
    env = dict(zip(call.operands, operands, strict=True))
    args, kwargs = fx.map_arg((call.args, call.kwargs), env.__getitem__)
    if call.body is not None:
        name = f"region_{len(bodies)}"
        bodies[name] = call.body
        args = (*args[:4], graph.get_attr(name), *args[4:])
    node = graph.create_node("call_function", call.node.target, args, kwargs)
    node.meta = dict(call.node.meta)
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return [node]
    if not isinstance(value, (tuple, list)) or not all(isinstance(part, torch.Tensor) for part in value):
        raise NotImplementedError
    return picks_of(node, value)


def _operand(graph: fx.Graph, like: fx.Node) -> fx.Node:
    value = like.meta["val"]
    node = graph.placeholder(f"x{len(graph.nodes)}")
    fresh = _fake(value, value.fake_mode, own=True)
    node.meta["val"] = fresh.requires_grad_(like.op == "placeholder" and value.requires_grad)
    return node


def _fake(value: Any, mode: Any, *, own: bool = False) -> Any:
    """Return a fake tensor like another one in the mode of this capture: a new one if it has to be `own`."""
    if value.fake_mode is mode and not own:
        return value
    with mode:
        fresh = torch.empty(0, dtype=value.dtype, device=value.device)
        return fresh.as_strided(value.shape, value.stride(), value.storage_offset())


def _program(graph: fx.Graph, bodies: Mapping[str, fx.GraphModule]) -> ExportedProgram:
    from torch._export.verifier import TrainingIRVerifier

    places: Any = graph.find_nodes(op="placeholder")
    results: Any = graph.output_node().args[0]
    given, made = ([TensorArgument(node.name) for node in nodes] for nodes in (places, results))
    in_spec = pytree.tree_structure(((0,) * len(given), {}))
    out_spec = pytree.tree_structure((0,) * len(made))
    return ExportedProgram(
        root=fx.GraphModule(dict(bodies), graph),
        graph=graph,
        graph_signature=ExportGraphSignature(
            [InputSpec(InputKind.USER_INPUT, arg, None) for arg in given],
            [OutputSpec(OutputKind.USER_OUTPUT, arg, None) for arg in made],
        ),
        state_dict={},
        range_constraints={},
        module_call_graph=[ModuleCallEntry("", ModuleCallSignature([], [], in_spec, out_spec))],
        constants={},
        verifiers=[TrainingIRVerifier],
    )

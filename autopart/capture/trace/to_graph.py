"""The captured fx graph as our `Graph`: names, shapes, arguments, module paths and lines; no torch object.

Parameters and buffers keep the user's names, tied ones the first of them.  Inputs are called `input.NAME` after their
place in the batch; every other value has the name of its fx node.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from autopart.batch.batch import Batch
from autopart.capture.python.guards import tied_names
from autopart.capture.python.reads.questions import made_of
from autopart.capture.python.reads.sizes import BY_ROWS, SIZE_FIX, is_by_rows
from autopart.capture.source_location import line_of
from autopart.capture.trace.export import JVP_FIX
from autopart.capture.trace.functional import call_key, tensor_kind
from autopart.ir.errors import CaptureError, RefusedError
from autopart.ir.graph import Graph, Literal, Op, Param, Size, Value, check
from autopart.passes.ops.casts import with_copies
from autopart.rng import keyed

_PREFIX = "model."


@dataclass(frozen=True)
class Names:
    """Names of what enters and leaves a program.

    params: node name of a placeholder to the user's name; inputs: node name to value name; by the user's name, tensors:
    the real tensors, kinds: "param", "buffer" or "constant", updates: node name of a buffer's new value.
    """

    params: dict[str, str]
    inputs: dict[str, str]
    tensors: dict[str, torch.Tensor]
    kinds: dict[str, str]
    updates: dict[str, str]

    def value(self, node: fx.Node) -> str:
        """Return the name of the value that a node makes."""
        return self.inputs.get(node.name, node.name)


def strip(target: str) -> str:
    """Return the user's name of a name inside the wrapper."""
    return target.removeprefix(_PREFIX)


def read_names(program: ExportedProgram, module: fx.GraphModule, wrapper: torch.nn.Module, batch: Batch) -> Names:
    """Name everything that enters or leaves the program.  Raises RefusedError if an input is changed in place."""
    tied = {strip(name): strip(owner) for name, owner in tied_names(wrapper).items()}
    named = {
        strip(name): tensor for pairs in (wrapper.named_parameters(), wrapper.named_buffers()) for name, tensor in pairs
    }
    leaves = [name for name, leaf in zip(batch.names, batch.leaves, strict=True) if isinstance(leaf, torch.Tensor)]
    queue = iter(leaves)
    params: dict[str, str] = {}
    inputs: dict[str, str] = {}
    kinds: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    for spec in program.graph_signature.input_specs:
        node = str(getattr(spec.arg, "name", ""))
        if spec.kind is InputKind.CUSTOM_OBJ:
            raise RefusedError(
                f"forward() uses a {type(program.constants.get(str(spec.target))).__name__} of its own",
                where=next((line_of(n) for n in module.graph.nodes if node in {i.name for i in n.all_input_nodes}), ""),
                why="a torch object other than a tensor has a state that stages cannot share",
                fix="leave generator= out: random numbers are drawn by key, and seed= of compile chooses them; use "
                "other objects outside of forward()",
            )
        if spec.kind is InputKind.USER_INPUT:
            inputs[node] = f"input.{next(queue)}"
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            name = strip(str(spec.target))
            params[node] = name = tied.get(name, name)
            kinds[name] = "param" if spec.kind is InputKind.PARAMETER else "buffer"
            tensors[name] = named[name]
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            params[node] = name = f"constant.{spec.target}"
            kinds[name], tensors[name] = "constant", program.constants[str(spec.target)]
    return Names(params, inputs, tensors, kinds, _updates(program, module, inputs, tied))


def _updates(
    program: ExportedProgram, module: fx.GraphModule, inputs: dict[str, str], tied: dict[str, str]
) -> dict[str, str]:
    updates: dict[str, str] = {}
    results: Any = module.graph.output_node().args[0]
    for spec, node in zip(program.graph_signature.output_specs, results, strict=True):
        if spec.kind is OutputKind.USER_INPUT_MUTATION:
            raise RefusedError(
                f"the model changes its {inputs.get(str(spec.target), spec.target).replace('.', ' ')} in place",
                why="your batch would be changed on one rank only",
                fix="clone the input in forward() before changing it",
            )
        if spec.kind is OutputKind.BUFFER_MUTATION and node.op != "placeholder":
            name = strip(str(spec.target))
            updates[tied.get(name, name)] = node.name
    return updates


class NumberOfData(CaptureError):
    """A Python number that depends on tensor data is part of the program."""


def read_graph(module: fx.GraphModule, names: Names, outputs: list[fx.Node], size: Size, *, backward: bool) -> Graph:
    """Return a lowered graph as a `Graph`.  O(nodes).

    outputs: the nodes of the user outputs, the loss first.  backward: mark the values that a gradient flows through.
    """
    grads = _gradient_nodes(module, names, outputs[0]) if backward else set()
    calls = [n for n in module.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    input_nodes = [n for n in module.graph.nodes if n.op == "placeholder" and n.name in names.inputs]
    results = [node for call in calls for node in results_of(call)]
    values = tuple(_value(n, names, n.name in grads) for n in input_nodes + results)
    ops = tuple(_op(call, names) for call in calls)
    params = tuple(
        Param(name, tuple(p.shape), dtype_name(p.dtype), p.nbytes, p.requires_grad, names.kinds[name])
        for name, p in names.tensors.items()
    )
    return check(
        Graph(
            size=size,
            values=values,
            params=with_copies(params, ops, values),
            ops=ops,
            inputs=tuple(names.value(n) for n in input_nodes),
            outputs=tuple(names.value(n) for n in outputs),
            updates=tuple(names.updates.items()),
        )
    )


def results_of(call: fx.Node) -> list[fx.Node]:
    """Return the tensor nodes that an op makes: itself, or for a tuple the nodes that pick from it."""
    if isinstance(call.meta.get("val"), (tuple, list)):
        return [user for user in call.users if user.target is operator.getitem]
    return [call]


def _gradient_nodes(module: fx.GraphModule, names: Names, loss: fx.Node) -> set[str]:
    """Return the names of the nodes that need a gradient and reach the loss.  O(nodes).

    They are found by running the graph on fake tensors with autograd enabled, equal calls once; export's metadata does
    not tell, since it traces without gradients.  Raises RefusedError for an op without a derivative.
    """
    trainable = {node for node, name in names.params.items() if names.tensors[name].requires_grad}
    nodes = list(module.graph.nodes)
    mode = detect_fake_mode([n.meta.get("val") for n in nodes])
    needs: set[str] = set()
    env: dict[fx.Node, Any] = {}
    known: dict[Hashable, Any] = {}
    with mode or contextlib.nullcontext(), torch.enable_grad():
        for node in nodes:
            if node.op == "placeholder":
                like = node.meta["val"]
                fresh = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
                env[node] = fresh.requires_grad_(node.name in trainable)
            elif node.op == "call_function":
                target, args = _called(node)
                key: Hashable = node
                with contextlib.suppress(NotImplementedError):
                    key, _ = call_key(target, args, node.kwargs, lambda n: (tensor_kind(env[n]), env[n].requires_grad))
                if key not in known:
                    known[key] = target(*fx.map_arg(args, env.__getitem__), **fx.map_arg(node.kwargs, env.__getitem__))
                    _refuse_underived(target, node, known[key])
                env[node] = known[key]
            if any(t.requires_grad for t in _tensors(env.get(node))):
                needs.add(node.name)
    return {node.name for node in made_of([loss], {node for node in nodes if node.name not in needs})}


def _called(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Return the op that a node calls and its arguments, without the key of random numbers."""
    return (node.args[0], node.args[2:]) if node.target is keyed else (node.target, node.args)


def _refuse_underived(target: Any, node: fx.Node, result: Any) -> None:
    """Raise RefusedError for a result of an op that has no derivative where one is needed."""
    for tensor in _tensors(result):
        if tensor.grad_fn is not None and tensor.grad_fn.name().endswith("NotImplemented"):
            derived = "_backward" in str(target)
            raise RefusedError(
                f"{target} has no derivative",
                where=line_of(node),
                why="it is the derivative of an op, which forward() takes, and torch has no derivative of it"
                if derived
                else "it stands where the model changes a tensor in place, and a gradient has to flow through it",
                fix=JVP_FIX if derived else "write that line without changing a tensor in place",
            )


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


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: torch.float32 -> "float32"."""
    return str(dtype).removeprefix("torch.")


def _value(node: fx.Node, names: Names, grad: bool) -> Value:
    example = node.meta.get("val")
    where = line_of(node)
    if not isinstance(example, torch.Tensor):
        raise NumberOfData(
            f"{node.target} makes a {type(example).__name__}, not a tensor",
            where=where,
            why="a Python number that depends on tensor data cannot be part of the program",
            fix="keep it a tensor: no .item(), .tolist() or int(tensor) in forward()",
        )
    if not all(isinstance(size, int) for size in example.shape):
        raise CaptureError(
            f"{node.target} makes a tensor whose shape depends on tensor data",
            where=where,
            fix=SIZE_FIX,
        )
    size = example.numel() * example.element_size()
    return Value(names.value(node), tuple(example.shape), dtype_name(example.dtype), size, grad)


def _op(call: fx.Node, names: Names) -> Op:
    target, args = _called(call)
    read = call.all_input_nodes
    labels = [a.name for a in target._schema.arguments] if isinstance(target, torch._ops.OpOverload) else []
    labels += [f"arg{i}" for i in range(len(labels), len(args))]
    pairs = [*zip(labels, args, strict=False), *call.kwargs.items()]
    attrs = [(name, _literal(value, names)) for name, value in pairs]
    return Op(
        name=call.name,
        target=str(target),
        reads=tuple(dict.fromkeys(names.value(node) for node in read if node.name not in names.params)),
        writes=tuple(names.value(n) for n in results_of(call)),
        params=tuple(dict.fromkeys(names.params[node.name] for node in read if node.name in names.params)),
        attrs=(*attrs, (BY_ROWS, True)) if is_by_rows(call) else tuple(attrs),
        module=module_path(call),
        where=line_of(call),
        random=call.target is keyed,
        parts=(call.name,),
    )


def module_path(node: fx.Node) -> str:
    """Return the module path that an op comes from, as the user names it."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return strip(paths[-1]) if paths and paths[-1] not in ("", "model") else ""


def _literal(value: Any, names: Names) -> Literal:
    if isinstance(value, fx.Node):
        return "%" + names.params.get(value.name, names.value(value))
    if isinstance(value, (tuple, list)):
        return tuple(_literal(item, names) for item in value)
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, torch.device):
        return "device"  # the plan decides where it runs
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)

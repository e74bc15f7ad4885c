"""The captured fx graph as our `Graph`: names, shapes, arguments, module paths and lines; no torch object.

Parameters and buffers keep the user's names, tied ones the first of them.  Inputs are called `input.NAME` after their
place in the batch; every other value has the name of its fx node.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from autopart.batch.batch import Batch
from autopart.capture.python.guards import tied_names
from autopart.capture.python.reads.data_dependent_errors import SIZE_FIX
from autopart.capture.python.reads.sizes import BY_ROWS, is_by_rows
from autopart.capture.source_location import user_line_of_text
from autopart.capture.trace.gradients import gradient_nodes
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
                where=_first_use(module, node),
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


def _first_use(module: fx.GraphModule, name: str) -> str:
    """Return the user's line where an input of the program is used first."""
    found = next((n for n in module.graph.nodes if name in {used.name for used in n.all_input_nodes}), None)
    return user_line_of_text(found.meta.get("stack_trace")) if found is not None else ""


def _updates(
    program: ExportedProgram, module: fx.GraphModule, inputs: dict[str, str], tied: dict[str, str]
) -> dict[str, str]:
    updates: dict[str, str] = {}
    results = next(node for node in module.graph.nodes if node.op == "output").args[0]
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
    grads = _gradients(module, names, outputs) if backward else set()
    calls = [n for n in module.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    input_nodes = [n for n in module.graph.nodes if n.op == "placeholder" and n.name in names.inputs]
    results = [node for call in calls for node in results_of(call)]
    values = tuple(_value(n, names, n.name in grads) for n in input_nodes + results)
    ops = tuple(_op(call, names) for call in calls)
    return check(
        Graph(
            size=size,
            values=values,
            params=with_copies(_params(names), ops, values),
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


def _gradients(module: fx.GraphModule, names: Names, outputs: list[fx.Node]) -> set[str]:
    trainable = {node for node, name in names.params.items() if names.tensors[name].requires_grad}
    return gradient_nodes(module, trainable, outputs[0])


def _params(names: Names) -> tuple[Param, ...]:
    seen = dict.fromkeys(names.params.values())
    return tuple(
        Param(
            name,
            tuple(names.tensors[name].shape),
            dtype_name(names.tensors[name].dtype),
            names.tensors[name].nbytes,
            names.tensors[name].requires_grad,
            names.kinds[name],
        )
        for name in seen
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: torch.float32 -> "float32"."""
    return str(dtype).removeprefix("torch.")


def _value(node: fx.Node, names: Names, grad: bool) -> Value:
    example = node.meta.get("val")
    where = user_line_of_text(node.meta.get("stack_trace"))
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
    target: Any = call.target
    args = call.args
    random = target is keyed
    if random:
        target, args = args[0], args[2:]
    reads: dict[str, None] = {}
    params: dict[str, None] = {}
    for node in call.all_input_nodes:
        if node.name in names.params:
            params[names.params[node.name]] = None
        else:
            reads[names.value(node)] = None
    return Op(
        name=call.name,
        target=str(target),
        reads=tuple(reads),
        writes=tuple(names.value(n) for n in results_of(call)),
        params=tuple(params),
        attrs=_attrs(target, args, dict(call.kwargs), names) + (((BY_ROWS, True),) if is_by_rows(call) else ()),
        module=module_path(call),
        where=user_line_of_text(call.meta.get("stack_trace")),
        random=random,
        parts=(call.name,),
    )


def module_path(node: fx.Node) -> str:
    """Return the module path that an op comes from, as the user names it."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return strip(paths[-1]) if paths and paths[-1] not in ("", "model") else ""


def _attrs(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: Names) -> tuple[tuple[str, Literal], ...]:
    labels = [a.name for a in target._schema.arguments] if isinstance(target, torch._ops.OpOverload) else []
    labels += [f"arg{i}" for i in range(len(labels), len(args))]
    pairs = [*zip(labels, args, strict=False), *kwargs.items()]
    return tuple((name, _literal(value, names)) for name, value in pairs)


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

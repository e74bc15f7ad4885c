"""Which name of ours stands for which node of the captured graph.

Parameters and buffers keep the user's fully qualified names, tied ones the first of them.  Inputs are called
`input.NAME` after their place in the batch; every other value has the name of its fx node.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from autopart.capture.batch.batch import Batch
from autopart.capture.guards import tied_names
from autopart.capture.source_location import user_line_of_text
from autopart.ir.errors import RefusedError

_PREFIX = "model."


@dataclass(frozen=True)
class Names:
    """params: node name of a placeholder to FQN;  inputs: node name to value name;  tensors: FQN to the real tensor;
    kinds: FQN to "param", "buffer" or "constant";  tied: every other name of a tensor to the first;  updates: buffer
    FQN to node name of its new value."""

    params: dict[str, str]
    inputs: dict[str, str]
    tensors: dict[str, torch.Tensor]
    kinds: dict[str, str]
    tied: dict[str, str]
    updates: dict[str, str]

    def value(self, node: fx.Node) -> str:
        """The name of the value that a node makes."""
        return self.inputs.get(node.name, node.name)


def strip(target: str) -> str:
    """The user's FQN of a name inside the wrapper."""
    return target.removeprefix(_PREFIX)


def read_names(program: ExportedProgram, module: fx.GraphModule, wrapper: torch.nn.Module, batch: Batch) -> Names:
    """Names of everything that enters or leaves the program.  Raises RefusedError when an input is changed in
    place."""
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
                why="a torch object that is no tensor has a state that stages cannot share",
                fix="of random numbers leave generator= out: they are drawn by key, and seed= of compile chooses them; "
                "any other object take out of forward()",
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
    return Names(params, inputs, tensors, kinds, tied, _updates(program, module, inputs, tied))


def _first_use(module: fx.GraphModule, name: str) -> str:
    """The user's line where an input of the program is used first."""
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
                why="the user's batch would be changed on one rank and not on the others",
                fix="clone the input in forward() before changing it",
            )
        if spec.kind is OutputKind.BUFFER_MUTATION and node.op != "placeholder":
            name = strip(str(spec.target))
            updates[tied.get(name, name)] = node.name
    return updates

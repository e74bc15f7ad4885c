"""Compiled stages: the segments of a stage's code, as kernels that TorchInductor makes.

Segments are runs of ops of one layer of the model.  Layers that are equal give equal segments, and the gradients of a
layer's parameters are complete when the backward of its segments has run, so that sums over replicas overlap with
earlier layers.  Ops that a compiler must not see stay between the segments, and run as without it: random ops, whose
key is set from outside; waits; sums over replicas; products whose weights get their gradients later; weights of losses,
which are Python numbers; ops that write to their arguments, or whose results' sizes depend on data; ops of other
libraries.

Segments are compiled as they are (`torch._inductor.standalone_compile`), without tracing Python again: a stage's code
is a pure function of flat tensors, and its parameters are arguments.  So segments with equal ops and tensors share one
code, and parameters stay the leaves that buckets and optimizers know.  TorchInductor keeps its kernels on disk, for
other ranks and later runs.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from autopart.capture.trace.lower import is_random
from autopart.ir.errors import RefusedError
from autopart.ir.graph import Op
from autopart.passes.ops.row import VIEW
from autopart.passes.ops.table import row_of
from autopart.runtime.activity import patient
from autopart.runtime.stages.compiled_segment import Code, CompiledSegment, Form, form_of
from autopart.runtime.stages.recomputation import RecomputedGroup
from autopart.runtime.stages.shard_group import Exchange
from autopart.runtime.stages.stage_module import StageModule
from autopart.stagecode.stage_graph import text_of

LEAST_KERNELS = 2
"""Of a segment; a call of compiled code costs more than it saves for fewer."""
_UNSUITED = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def segmented(
    module: fx.GraphModule, paths: Mapping[str, str], make: Callable[[fx.GraphModule], nn.Module]
) -> fx.GraphModule:
    """Return code in which each segment is one call of what `make` makes of its ops; also in recomputed groups.

    paths: the module path of each op.  Results and their order stay.  Raises RefusedError for a random op without a
    key, whose numbers would be drawn while compiling.  O(nodes).
    """
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    root = nn.ModuleDict()
    for node in module.graph.find_nodes(op="placeholder"):
        env[node] = graph.node_copy(node)
    for number, (nodes, compiled) in enumerate(_runs(module, paths)):
        if compiled:
            name = f"segment_{number}"
            body, reads, results = _body(nodes)
            root[name] = make(body)
            call = graph.call_module(name, tuple(env[node] for node in reads))
            env |= {node: graph.call_function(operator.getitem, (call, place)) for place, node in enumerate(results)}
            continue
        for node in nodes:
            env[node] = graph.node_copy(node, env.__getitem__)
            if node.op == "call_module":
                called = module.get_submodule(str(node.target))
                if isinstance(called, RecomputedGroup):
                    called = RecomputedGroup(segmented(called.body, paths, make))
                root[str(node.target)] = called
    (output,) = module.graph.find_nodes(op="output")
    graph.node_copy(output, env.__getitem__)
    return fx.GraphModule(root, graph)


def _runs(module: fx.GraphModule, paths: Mapping[str, str]) -> Iterator[tuple[list[fx.Node], bool]]:
    """Yield the nodes in an order that can run, cut where the layer changes, and whether each run is a segment."""
    runs: list[tuple[str | None, list[fx.Node]]] = []
    run_of: dict[fx.Node, list[fx.Node]] = {}
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.target is operator.getitem and node.args[0] in run_of:  # stays with the op whose result it picks from
            run = run_of[node.args[0]]
        else:
            layer = _layer(paths.get(node.name, "")) if _is_suited(node) else None
            if not runs or runs[-1][0] != layer:
                runs.append((layer, []))
            run = runs[-1][1]
        run.append(node)
        run_of[node] = run
    for layer, nodes in runs:
        yield nodes, layer is not None and sum(map(_is_kernel, nodes)) >= LEAST_KERNELS


def _layer(path: str) -> str:
    """Return the module path up to the first number: a layer in a list of layers; "" outside of lists."""
    parts = path.split(".")
    place = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    return "" if place is None else ".".join(parts[: place + 1])


def _is_suited(node: fx.Node) -> bool:
    """Return whether a compiler may see this op."""
    op = node.target
    if node.op != "call_function" or not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten":
        return False
    if is_random(node):
        raise RefusedError(
            f"{op} draws random numbers in compiled code",
            where=node.name,
            why="it has no key, so its numbers would depend on when the code is compiled; this is a bug in autopart",
            fix='use backend="eager"',
        )
    return not op._schema.is_mutable and not _UNSUITED.intersection(op.tags)


def _is_kernel(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and row_of(str(node.target)).family != VIEW


def _body(nodes: Sequence[fx.Node]) -> tuple[fx.GraphModule, list[fx.Node], list[fx.Node]]:
    """Return the ops of a segment as code of its own, what it reads, and the nodes whose results it returns."""
    inside = set(nodes)
    reads = list(dict.fromkeys(arg for node in nodes for arg in node.all_input_nodes if arg not in inside))
    results = [node for node in nodes if not inside.issuperset(node.users) and not _gives_several(node)]
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {node: graph.placeholder(f"arg_{place}") for place, node in enumerate(reads)}
    for node in nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[node] for node in results))
    return fx.GraphModule(nn.Module(), graph), reads, results


def _gives_several(node: fx.Node) -> bool:
    """Return whether an op gives several results, of which other nodes pick one each."""
    return bool(node.users) and all(user.target is operator.getitem for user in node.users)


class CompileWarning(UserWarning):
    """Ops that could not be compiled and run as they are."""


class Inductor:
    """Compiles the code of stages.  ops: of the captured graph, by name, for module paths and places of warnings."""

    def __init__(self, ops: Mapping[str, Op]) -> None:
        self._ops = ops
        self._made: dict[tuple[str, bool, Form], Code | None] = {}
        self._reasons: set[str] = set()

    def compile(
        self,
        code: StageModule,
        tensors: Mapping[str, torch.Tensor],
        specs: Mapping[str, torch.Tensor],
        trained: Collection[str],
        device: torch.device,
    ) -> StageModule:
        """Return the code with compiled segments, made for what it is given in a training step.

        tensors: what this rank holds of the model's.  specs: shapes of values, as meta tensors.  trained: inputs that
        get a gradient.  Segments that cannot be compiled run as they are, with a warning.  Raises RefusedError as
        `segmented`, and for such segments in code with exchanges between ranks.
        """
        paths = {name: op.module for name, op in self._ops.items()}
        together = any(isinstance(each, Exchange) for each in code.module.modules())

        def made(body: fx.GraphModule) -> nn.Module:
            return CompiledSegment(body, partial(self._code, text_of(body), together))

        module = segmented(code.module, paths, made)
        met: list[tuple[CompiledSegment, Sequence[torch.Tensor]]] = []
        with torch.enable_grad():
            with FakeTensorMode():
                given = [_like(*how, device) for how in _forms(code, tensors, specs, trained)]
                _Meeting(module, met, device).run(*given, *(1.0 for _ in code.numbers))
            for segment, inputs in met:
                segment.prepare(inputs)
        return replace(code, module=module)

    def _code(self, text: str, together: bool, body: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Code | None:
        """Return the code of a segment for tensors of this form.  text: of its ops, equal for equal segments.

        together: whether ranks exchange values around it.  A backward runs the exchanges before a compiled segment if
        any result of it needs them, and those before its ops only if theirs do: so all ranks run one or the other.
        """
        key = text, together, form_of(inputs)
        if key not in self._made:
            try:
                self._made[key] = _compiled(body, inputs)
            except Exception as error:  # of any kind: what a compiler raises is not documented
                if together:
                    raise self._refused(body, error) from error
                self._made[key] = None
                self._warn(body, error)
        return self._made[key]

    def _refused(self, body: fx.GraphModule, error: Exception) -> RefusedError:
        _, place, reason = self._uncompiled(body, error)
        return RefusedError(
            f"ops cannot be compiled, from {place} on",
            why=f"{reason}; on ranks that compute together, all of them run the same code",
            fix='use backend="eager", or tensor_parallel=1',
        )

    def _uncompiled(self, body: fx.GraphModule, error: Exception) -> tuple[int, str, str]:
        """Return how many ops of the model a segment has, the first that an error names, and what the error says."""
        names = [node.name for node in body.graph.nodes if node.name in self._ops]
        named = next((name for name in names if name in str(error)), names[0] if names else "")
        op = self._ops.get(named)
        place = f"{op.target} in {op.module or 'the model'} ({op.where})" if op is not None else "a segment"
        return len(names), place, (str(error) or type(error).__name__).strip().splitlines()[0]

    def _warn(self, body: fx.GraphModule, error: Exception) -> None:
        count, place, reason = self._uncompiled(body, error)
        if reason in self._reasons:  # equal layers may differ in which of their inputs need a gradient
            return
        self._reasons.add(reason)
        warnings.warn(f"{count} ops from {place} on run without compiling: {reason}", CompileWarning, stacklevel=2)


def _forms(
    code: StageModule,
    tensors: Mapping[str, torch.Tensor],
    specs: Mapping[str, torch.Tensor],
    trained: Collection[str],
) -> Iterator[tuple[torch.Tensor, torch.dtype, bool]]:
    """Yield for each tensor that the code takes: one of its shape and strides, its dtype, and whether it is trained."""
    for name in code.params:
        parameter, dtype = code.casts.get(name, (name, None))
        given = code.constants[name] if name in code.constants else tensors[parameter]
        yield given, dtype or given.dtype, given.requires_grad
    for name in code.inputs:
        yield specs[name], specs[name].dtype, name in trained


def _like(tensor: torch.Tensor, dtype: torch.dtype, trained: bool, device: torch.device) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
    return made.requires_grad_(trained)


def _compiled(body: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Code:
    from torch._inductor.standalone_compile import standalone_compile  # takes seconds to import

    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        given = [_like(tensor, tensor.dtype, tensor.requires_grad, tensor.device) for tensor in inputs]
    with patient("compiling the stages"):
        return standalone_compile(body, given, dynamic_shapes="from_example_inputs", fake_mode=mode, options={})


class _Meeting(fx.Interpreter):
    """Runs code on fake tensors, and notes what reaches each compiled segment.

    Ops that have another form in the code than in the capture (random ops; kernels that refuse fake tensors of some
    dtypes; what ranks compute together) are not run: the capture knows their results, or this rank's parts of them.
    """

    def __init__(
        self, module: fx.GraphModule, met: list[tuple[CompiledSegment, Sequence[torch.Tensor]]], device: torch.device
    ) -> None:
        super().__init__(module)
        self._met, self._device = met, device

    def run_node(self, n: fx.Node) -> Any:
        plain = isinstance(n.target, torch._ops.OpOverload) or n.target is operator.getitem
        known = n.meta.get("own", n.meta.get("val") if n.op == "call_function" else None)
        if known is not None and not plain:
            trained = any(getattr(self.env[arg], "requires_grad", False) for arg in n.all_input_nodes)
            return pytree.tree_map_only(torch.Tensor, partial(self._known, trained), known)
        return super().run_node(n)

    def _known(self, trained: bool, result: torch.Tensor) -> torch.Tensor:
        return _like(result, result.dtype, trained and result.is_floating_point(), self._device)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        called = self.fetch_attr(target)
        if isinstance(called, CompiledSegment):
            self._met.append((called, args))
        if isinstance(called, Exchange):
            return self._known(args[0].requires_grad, called.like(args[0]))
        body = getattr(called, "body", None)
        if isinstance(body, fx.GraphModule):  # of a segment or a recomputed group
            return _Meeting(body, self._met, self._device).run(*args)
        return called(*args, **kwargs)

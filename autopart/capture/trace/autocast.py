"""The autocast region that forward() and the loss run in, whose casts become ops of the program.

The program then runs alike in any autocast state of its caller.  Which op runs in which precision depends on the device
type: on CUDA, layer_norm and softmax run in fp32, on CPUs in the precision of their input.  So a program is captured
for one device type, and a model that lies elsewhere is traced as if it were there (`moved`).

torch.export keeps an autocast region as one call, without casts.  Decomposing a region makes its casts explicit, each
as an op (`_to_copy`), but forgets the user's line of the ops inside; a region around one op has the line of that op.
So each op that autocast casts for gets a region of its own (`spread_autocast`); others need none.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._guards import detect_fake_mode
from torch._higher_order_ops.wrap import wrap_with_autocast
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from autopart.batch.batch import Batch
from autopart.capture.trace.functional import call_key, picks_of, tensor_kind
from autopart.ir.plan import Precision

_DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
_Env = dict[fx.Node, Any]


@dataclass(frozen=True, slots=True)
class Autocast:
    """Autocast for tensors on devices of one type, to one dtype."""

    device_type: str
    dtype: torch.dtype

    def region(self) -> AbstractContextManager[Any]:
        """Return the region, without torch's cache of casts.

        Each use of a weight has its own cast, so gradients of several uses are summed in the parameter's precision.
        The runtime shares the casts (`runtime/stages/stage_module.py`).
        """
        return torch.autocast(self.device_type, self.dtype, cache_enabled=False)


def autocast_for(precision: Precision, device_type: str) -> Autocast | None:
    """Return the autocast for a precision on devices of a type; None for fp32.

    A torch that was built without CUDA can only plan for CUDA, with the casts of CPUs (`is_stand_in`).
    """
    kind = "cpu" if is_stand_in(precision, device_type) else device_type
    return Autocast(kind, _DTYPES[precision]) if precision in _DTYPES else None


def is_stand_in(precision: Precision, device_type: str) -> bool:
    """Return whether CPU autocast replaces that of CUDA, which this torch cannot trace."""
    return precision in _DTYPES and device_type == "cuda" and not torch._C._has_cuda


@contextlib.contextmanager
def moved(module: nn.Module, sample: Batch, device: torch.device) -> Iterator[Batch]:
    """Put fake parameters and buffers of `module` on `device` inside; yield the sample there.

    Autocast only casts tensors on devices of its own type.  This needs a torch that was built for that type of device,
    but no such device.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    known: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            data = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return nn.Parameter(data, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data

    registries = [r for part in module.modules() for r in (part._parameters, part._buffers)]
    before: list[tuple[dict[str, Any], str, torch.Tensor]] = [
        (registry, name, tensor) for registry in registries for name, tensor in registry.items() if tensor is not None
    ]
    for registry, name, tensor in before:
        registry[name] = known.setdefault(id(tensor), fake(tensor))
    try:
        yield sample.changed(lambda tensor, _: fake(tensor), sample.rows)
    finally:
        for registry, name, tensor in before:
            registry[name] = tensor


def brought_back(module: fx.GraphModule, device: torch.device) -> None:
    """Move a flat program that was traced for another device to `device`, in place.  O(nodes)."""
    mode = detect_fake_mode([node.meta.get("val") for node in module.graph.nodes])

    def here(value: Any) -> Any:
        if isinstance(value, torch.device):
            return device
        if not isinstance(value, FakeTensor) or mode is None:
            return value
        with mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)

    for node in module.graph.nodes:
        node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), here)
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map(here, node.meta["val"])


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
        settings: Any = region.args
        device_type, dtype, enabled, _, body, *operands = settings
        if around is not None and around.device_type != device_type:
            raise NotImplementedError
        state = Autocast(device_type, dtype or torch.get_autocast_dtype(device_type)) if enabled else None
        inner: fx.GraphModule = getattr(owner, str(body.target))
        places = inner.graph.find_nodes(op="placeholder")
        env: _Env = {p: fx.map_arg(o, outer) for p, o in zip(places, operands, strict=True)}
        for node in inner.graph.nodes:
            if node.op not in ("placeholder", "output"):
                env[node] = self._copied(inner, node, env, state)
        results: Any = inner.graph.output_node().args[0]
        return list(fx.map_arg(results, env.__getitem__))

    def _copied(self, owner: fx.GraphModule, node: fx.Node, env: _Env, state: Autocast | None) -> Any:
        target: Any = node.target
        if target is wrap_with_autocast:
            return tuple(self(owner, node, env.__getitem__, state))
        if target is operator.getitem and isinstance(source := env[node.args[0]], tuple):  # type: ignore[index]
            return source[node.args[1]]  # type: ignore[index]
        if node.op == "get_attr":
            return self._held(getattr(owner, str(target)))
        known = isinstance(target, torch._ops.OpOverload)
        if state is not None and (known or isinstance(target, torch._ops.HigherOrderOperator)):
            if not known or _casts(target, state):
                return self._in_region(node, env, state)
            if (made := self._made_of(node, env, state)) is not None:
                return made
        return self._home.graph.node_copy(node, env.__getitem__)

    def _held(self, value: Any) -> fx.Node:
        name = f"_region_{len(list(self._home.children()))}"
        self._home.add_module(name, value)
        return self._home.graph.get_attr(name)

    def _in_region(self, node: fx.Node, env: _Env, state: Autocast) -> Any:
        """Copy the op into a region of its own, which gets the op's line."""
        body = fx.Graph()
        reads = node.all_input_nodes
        inside: _Env = {}
        for read in reads:
            if read.op == "get_attr":
                inside[read] = body.get_attr(str(read.target))
            else:
                inside[read] = body.placeholder(f"x{len(inside)}")
                inside[read].meta = dict(read.meta)
        op = body.node_copy(node, inside.__getitem__)
        single = isinstance(node.meta["val"], torch.Tensor)
        values = (node.meta["val"],) if single else tuple(node.meta["val"])
        body.output((op,) if single else tuple(picks_of(op, values)))
        held = {str(r.target): getattr(self._home, str(env[r].target)) for r in reads if r.op == "get_attr"}
        region = self._held(fx.GraphModule(held, body))
        given = [env[read] for read in reads if read.op != "get_attr"]
        settings = (state.device_type, state.dtype, True, False)
        whole = self._home.graph.call_function(wrap_with_autocast, (*settings, region, *given))
        whole.meta = dict(node.meta, val=values)
        picks = picks_of(whole, values)
        return picks[0] if single else tuple(picks)

    def _made_of(self, node: fx.Node, env: _Env, state: Autocast) -> Any:
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
        own: _Env = dict(zip(graph.find_nodes(op="placeholder"), (env[read] for read in reads), strict=True))
        results = self._home.graph.graph_copy(graph, own)
        for inner, made in own.items():
            if inner.op == "call_function":
                made.meta = dict(node.meta, val=inner.meta["val"])
        return tuple(results) if isinstance(results, (tuple, list)) else results


def _has_kernel(target: Any, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), key)


def _casts(target: Any, state: Autocast) -> bool:
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

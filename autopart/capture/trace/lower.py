"""From an exported program to the flat graph that is cut into stages.

1. Regions under torch.no_grad become ordinary ops whose results are detached, so that no gradient flows back.
2. In-place ops are made functional; composite ops (attention, linear, cross entropy) stay whole.
3. Assertions about tensor metadata, aliases and copies are removed: in a functional graph a copy equals its original,
   and whether forward() makes one can depend on the number of rows (`.contiguous()` on a single row).  `view` becomes
   `reshape` to the whole shape, since the strides of the real kernel can differ from the traced ones; what
   `as_strided` reads is put in the order in which it lay.
4. Attention without mask takes keys and values as they were before they were only repeated for it.  Models repeat them
   to the number of query heads where attention has a mask; once that is gone (`reads.masks`), the copies, and the sums
   over them in the backward, are work for nothing.
5. Random ops are called by key, so that their numbers do not depend on the stage that runs them.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram, exported_program
from torch.export.graph_signature import ExportGraphSignature
from torch.fx._lazy_graph_module import _make_graph_module

from autopart.capture.python.habits.all_sizes import rejoined
from autopart.capture.source_location import line_of
from autopart.capture.trace.autocast import replace_region, spread_autocast
from autopart.capture.trace.export import JVP_FIX
from autopart.capture.trace.fresh_writes import without_fresh_writes
from autopart.capture.trace.functional import functional_graph
from autopart.ir.errors import RefusedError
from autopart.passes.ops.row import ASSERTION, POINTWISE, VIEW
from autopart.passes.ops.table import row_of
from autopart.rng import keyed, memory_order

_aten = torch.ops.aten
_SAME = {"alias", "lift_fresh"}
_VIEWS = {_aten.view.default, _aten._unsafe_view.default}
_SCATTERS = {_aten.slice_scatter.default, _aten.select_scatter.default}
_GRAD_REGION = "wrap_with_set_grad_enabled"
_LARGEST_HEAD = 256
"""Entries of a head up to which the kernels of attention take a key for a group of queries."""


def _name(target: Any) -> str:
    """Return the name of an op without its overload; "" for anything else."""
    return str(target.name()).split("::")[-1].split(".")[0] if hasattr(target, "name") else ""


def lower(program: ExportedProgram) -> tuple[ExportedProgram, fx.GraphModule]:
    """Return the functional program (for its signature) and its flat graph, lowered.  O(nodes)."""
    _refuse_lost_derivatives(program.graph)
    _inline_grad_regions(program.graph_module, program.graph_signature)
    with contextlib.suppress(NotImplementedError):  # then its ops have no line of the user's
        spread_autocast(program)
    if without_fresh_writes(program.graph):
        program.graph_module.recompile()
    graph = functional_graph(program)
    if graph is None:
        program = program.run_decompositions({})
        graph = program.graph_module.graph
    _refuse_higher_order(graph)
    for node in graph.find_nodes(op="call_function", target=_aten.as_strided.default):
        _lower_strided(graph, node)  # while copies show how its operand lies
    for node in list(graph.nodes):
        if node.op == "call_function":
            _lower_node(graph, node)
    _group_queries(graph)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    graph = rejoined(graph)
    random = [node for node in graph.nodes if node.op == "call_function" and is_random(node)]
    for number, node in enumerate(random):
        node.args = (node.target, number, *node.args)
        node.target = keyed
    held = {name: value for name, value in vars(program.graph_module).items() if isinstance(value, torch.Tensor)}
    module = _make_graph_module(held, graph)
    module.graph.lint()
    return program, module


def _inline_grad_regions(
    module: fx.GraphModule, signature: ExportGraphSignature | None, *, inside: bool = False
) -> None:
    """Put the ops of gradient mode regions in their places.  inside: whether the module runs under no_grad.

    signature: of the program whose graph it holds; None for that of a region.
    """
    for node in list(module.graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        switch = _name(node.target) == _GRAD_REGION
        off = switch and node.args[0] is False
        if inside and switch and not off:
            raise RefusedError(
                "torch.enable_grad inside torch.no_grad is used in forward()",
                where=line_of(node),
                why="which gradients it revives cannot be told from the captured graph",
                fix="move that computation out of the no_grad block",
            )
        for arg in node.args:
            region = getattr(module, str(arg.target), None) if isinstance(arg, fx.Node) else None
            if isinstance(region, fx.GraphModule):
                _inline_grad_regions(region, None, inside=inside or off)
                if off:
                    _detach_results(region)
                if switch:
                    replace_region(node, _inlined(module, node, region), signature)
                    module.graph.erase_node(arg)
    module.recompile()


def _inlined(module: fx.GraphModule, node: fx.Node, region: fx.GraphModule) -> Any:
    """Copy a region's ops in front of the node that runs it; return what its results become."""
    env = dict(zip(region.graph.find_nodes(op="placeholder"), node.args[2:], strict=True))
    with module.graph.inserting_before(node):
        for held in region.graph.find_nodes(op="get_attr"):
            name = f"_{node.name}_{held.name}"
            setattr(module, name, getattr(region, str(held.target)))
            env[held] = module.graph.get_attr(name)
        return module.graph.graph_copy(region.graph, env)


def _detach_results(region: fx.GraphModule) -> None:
    """Let no gradient flow back into a region.

    Raises RefusedError for an in-place op on an activation, which keeps the activation's gradient.
    """
    output = region.graph.output_node()
    buffers = {n for n in region.graph.nodes if n.op == "placeholder" and str(n.target).startswith(("b_", "c_"))}
    allowed = buffers | {n for n in region.graph.nodes if n.op == "call_function"}
    for node in region.graph.nodes:
        mutable = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        if mutable and node.args and node.args[0] not in allowed:
            raise RefusedError(
                f"{node.target} changes a tensor in place under torch.no_grad",
                where=line_of(node),
                why="its effect on gradients cannot be told from the captured graph",
                fix="write to a copy, or register the tensor as a buffer",
            )

    def detached(value: fx.Node) -> fx.Node:
        example = value.meta.get("val")
        if not isinstance(example, torch.Tensor) or not example.is_floating_point():
            return value
        with region.graph.inserting_before(output):
            node = region.graph.call_function(_aten.detach.default, (value,))
        node.meta.update(value.meta)
        return node

    output.args = fx.map_arg(output.args, detached)


def _refuse_lost_derivatives(graph: fx.Graph) -> None:
    """Refuse forward-mode derivatives through an op that torch keeps whole: it loses them, often in silence."""
    dual: set[fx.Node] = set()
    whole: set[Any] = set()
    for node in graph.nodes:
        name = str(getattr(node.target, "__name__", ""))
        if "_make_dual" in name:
            ops: Any = exported_program
            whole = whole or ops._collect_all_valid_cia_ops() - {_aten.linear.default}
            dual.add(node)
        elif not dual.isdisjoint(node.all_input_nodes) and "_unpack_dual" not in name:
            dual.add(node)
            if node.target in whole or isinstance(node.target, torch._ops.HigherOrderOperator):
                raise RefusedError(
                    f"torch.func.jvp cannot be captured through {_name(node.target)}",
                    where=line_of(node),
                    why="torch keeps this op whole while it captures, and loses its forward-mode derivative",
                    fix=JVP_FIX,
                )


def _refuse_higher_order(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator):
            raise RefusedError(
                f"higher-order op {_name(node.target)} is used in forward()",
                where=line_of(node),
                why="ops that own sub-graphs cannot be cut or differentiated exactly yet",
                fix='write it with plain tensor operations (attention: attn_implementation="sdpa" or "eager")',
            )


def _lower_node(graph: fx.Graph, node: fx.Node) -> None:
    target: Any = node.target
    name = _name(target)
    if row_of(str(target)).family == ASSERTION:
        graph.erase_node(node)
    elif name in _SAME or (target is _aten.clone.default and _is_plain_copy(node)):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node.replace_all_uses_with(source)
        graph.erase_node(node)
    elif target is _aten.copy.default:
        _lower_copy(graph, node)
    elif target in _SCATTERS and node.meta["val"].is_complex():
        _lower_complex_scatter(graph, node)
    elif target in _VIEWS:
        node.target, node.args = _aten.reshape.default, (node.args[0], list(node.meta["val"].shape))
        node._rename("reshape")


def _lower_strided(graph: fx.Graph, node: fx.Node) -> None:
    """Let as_strided, which reads memory, read all elements in the order in which they lay when it was traced: without
    copies, behind another stage or joined of parts, its operand may lie otherwise.  Raises RefusedError where it reads
    what is not in its operand."""
    given = _bound(node)
    source, sizes, strides = given["self"], given["size"], given["stride"]
    value = source.meta["val"]
    order, first = memory_order(value), given["storage_offset"]
    start = 0 if first is None else first - value.storage_offset()
    last = start + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if not value.permute(order).is_contiguous() or start < 0 or last >= max(1, value.numel()):
        raise RefusedError(
            "as_strided reads memory that is not in its operand",
            where=line_of(node),
            why="ranks hold tensors, and not what lies between or beside their elements",
            fix="call clone() on the tensor first, or use unfold or slices",
        )
    with graph.inserting_before(node):

        def add(target: Any, source: fx.Node, *args: Any) -> fx.Node:
            made = graph.call_function(target, (source, *args))
            made.meta.update(node.meta, val=target(source.meta["val"], *args))
            return made

        laid = source if order == tuple(range(value.dim())) else add(_aten.permute.default, source, list(order))
        flat = add(_aten.reshape.default, laid, [value.numel()])
        flat = add(_aten.slice.Tensor, flat, 0, start) if start else flat
    node.args, node.kwargs = (flat, sizes, strides), {}


def _lower_copy(graph: fx.Graph, node: fx.Node) -> None:
    """Replace copy(target, source) by the source in the target's shape and dtype: aten.copy has no derivative."""
    source = node.args[1]
    assert isinstance(source, fx.Node)
    result, value = node.meta["val"], source
    with graph.inserting_before(node):
        if source.meta["val"].dtype != result.dtype:
            value = graph.call_function(_aten._to_copy.default, (value,), {"dtype": result.dtype})
            value.meta.update(node.meta, val=source.meta["val"].to(result.dtype))
        if source.meta["val"].shape != result.shape:
            value = graph.call_function(_aten.expand.default, (value, list(result.shape)))
            value.meta.update(node.meta)
    node.replace_all_uses_with(value)
    graph.erase_node(node)


def _lower_complex_scatter(graph: fx.Graph, node: fx.Node) -> None:
    """Replace a scatter into a slice of a complex tensor by a join of the parts before, in and behind the slice.

    torch has no derivative of slice_scatter and select_scatter for complex numbers.
    """
    given = _bound(node)
    whole, part, dim = given["self"], given["src"], given["dim"] % node.meta["val"].dim()
    size = node.meta["val"].shape[dim]
    if given.get("step", 1) != 1:
        raise RefusedError(
            f"{node.target} writes into every {given['step']}th element of a complex tensor",
            where=line_of(node),
            why="torch has no derivative of it",
            fix="join the parts with torch.cat or torch.stack instead of writing into a slice",
        )
    single = node.target is _aten.select_scatter.default
    start, _, _ = slice(given["index"] if single else given["start"], None).indices(size)
    with graph.inserting_before(node):

        def add(target: Any, *args: Any) -> fx.Node:
            made = graph.call_function(target, args)
            inputs = fx.map_arg(args, lambda n: n.meta["val"])
            made.meta.update(node.meta, val=target(*inputs))
            return made

        if single:
            part = add(_aten.unsqueeze.default, part, dim)
        end = start + part.meta["val"].shape[dim]
        before = [add(_aten.slice.Tensor, whole, dim, 0, start)] if start else []
        behind = [add(_aten.slice.Tensor, whole, dim, end, size)] if end < size else []
        joined = add(_aten.cat.default, [*before, part, *behind], dim) if before or behind else part
    node.replace_all_uses_with(joined)
    graph.erase_node(node)


def _is_plain_copy(node: fx.Node) -> bool:
    """Return whether a copy is only read by ordinary ops and not made for its memory format.

    Kernels of oneDNN ignore strides, and view_as_complex takes pairs that lie side by side.  One dense copy that
    several ops read (packed queries, keys and values) stays, since each of them would otherwise make its own.
    """
    given = node.kwargs.get("memory_format")
    (source,) = node.all_input_nodes
    if given is torch.contiguous_format and len(node.users) > 1 and not source.meta["val"].is_contiguous():
        return False
    plain = given in (None, torch.contiguous_format, torch.preserve_format) and not _is_viewed_as_complex(node)
    return plain and all(u.op == "call_function" and not _name(u.target).startswith("mkldnn") for u in node.users)


def _is_viewed_as_complex(node: fx.Node) -> bool:
    """Return whether a value is viewed as complex, itself or behind views and functions of it alone."""
    found = [node]
    for each in found:
        if each.target is _aten.view_as_complex.default:
            return True
        found += [
            user
            for user in each.users
            if user.target is _aten.view_as_complex.default
            or (row_of(str(user.target)).family in (VIEW, POINTWISE) and len(user.all_input_nodes) == 1)
        ]
    return False


def _group_queries(graph: fx.Graph) -> None:
    """Let attention without mask take keys and values that are only repeated for it.  O(nodes)."""
    for node in graph.find_nodes(op="call_function", target=_aten.scaled_dot_product_attention.default):
        query, key, value = node.args[:3] if len(node.args) >= 3 else (None, None, None)
        mask = node.kwargs.get("attn_mask", node.args[3] if len(node.args) > 3 else None)
        if mask is not None or node.kwargs.get("enable_gqa") or not _takes_groups(query):
            continue
        (keys, key_cast), (values, value_cast) = _uncast(key), _uncast(value)
        keys, values = _repeated(keys), _repeated(values)
        if keys is not None and values is not None and keys.meta["val"].shape[1] == values.meta["val"].shape[1]:
            with graph.inserting_before(node):
                node.args = (query, _cast(keys, key_cast), _cast(values, value_cast), *node.args[3:])
            node.kwargs = {**node.kwargs, "enable_gqa": True}


def _uncast(node: Any) -> tuple[Any, fx.Node | None]:
    """Return what a cast was made of, and the cast; the node itself and None if it is not a cast.

    Under autocast the keys are cast after they were repeated; cast before, they are the same numbers.
    """
    if isinstance(node, fx.Node) and node.target is _aten._to_copy.default and set(node.kwargs) == {"dtype"}:
        return node.args[0], node
    return node, None


def _cast(node: fx.Node, like: fx.Node | None) -> fx.Node:
    """Return a node cast as another was; the node itself if that is None."""
    if like is None:
        return node
    made = node.graph.call_function(like.target, (node,), dict(like.kwargs))  # type: ignore[arg-type]
    made.meta.update(like.meta, val=node.meta["val"].to(like.meta["val"].dtype))
    return made


def _takes_groups(query: Any) -> bool:
    """Return whether the fused kernel of the device takes groups: on CUDA the one for half precision does."""
    if not isinstance(query, fx.Node) or query.meta["val"].dim() != 4 or query.meta["val"].shape[-1] > _LARGEST_HEAD:
        return False
    return query.meta["val"].device.type != "cuda" or query.meta["val"].dtype in (torch.float16, torch.bfloat16)


def _repeated(node: Any) -> fx.Node | None:
    """Return (rows, heads, tokens, entries) of which each head is repeated in place, next to itself, to make a node."""
    if not isinstance(node, fx.Node) or node.meta["val"].dim() != 4:
        return None
    found: Any = None
    if node.target is _aten.repeat_interleave.self_int and node.args[2:] == (1,):
        found = node.args[0]
    elif node.target is _aten.reshape.default:
        wide = node.args[0]
        if isinstance(wide, fx.Node) and wide.target is _aten.expand.default:
            narrow = wide.args[0]
            if isinstance(narrow, fx.Node) and narrow.target is _aten.unsqueeze.default and narrow.args[1] in (2, -3):
                found = narrow.args[0]
    if not isinstance(found, fx.Node) or found.meta["val"].dim() != 4:
        return None
    (rows, heads, *rest), repeated = found.meta["val"].shape, tuple(node.meta["val"].shape)
    whole = repeated[0] == rows and repeated[1] % heads == 0 and repeated[2:] == tuple(rest)
    return found if whole and math.prod(repeated) > found.meta["val"].numel() else None


def is_random(node: fx.Node) -> bool:
    """Return whether an op draws random numbers with its arguments."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is keyed
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    arguments = _bound(node)
    return all(arguments.get(key, 0) != 0 for key in row_of(str(target)).draws_unless_zero)


def _bound(node: fx.Node) -> dict[str, Any]:
    """Return the arguments by their names in the schema, with defaults."""
    assert isinstance(node.target, torch._ops.OpOverload)
    arguments = node.target._schema.arguments
    bound = {a.name: a.default_value for a in arguments if a.has_default_value()}
    bound.update({a.name: value for a, value in zip(arguments, node.args, strict=False)})
    return bound | dict(node.kwargs)

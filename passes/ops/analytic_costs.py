"""The analytic cost of an op: its time on a roofline, and the bytes that it saves for its backward.

Time is max(operations / rate of the op's dtype, bytes / memory bandwidth) plus a fixed time per launch, at the shares
of peak rates that kernels of the device reach (`Device.efficiency`).  A backward also adds the gradients of parameters
to their sums (`weight_parts`), and causal attention computes what it sees (`flops.seen_share`).  Wrong where an op runs
far below peak (small matrix products, transcendental functions on CPUs), where caches hold the operands, and where
kernels overlap or are fused; ratios between layers of one model are better than the times themselves.

Saved bytes follow autograd's derivative formulas: a matrix product saves the operand that the gradient of the other one
needs, `softmax`, `tanh`, `relu`, ... their output, `add`, `sum` and views nothing, any other op its inputs
(`OpRow.saves`).  Each storage counts once, for the first op that saves it, whatever its views; parameters, buffers and
casts of parameters (`casts`) do not count.  Tensors that are not values of the graph (dropout masks, the log-softmax
inside cross entropy, attention's normaliser or, without a fused kernel, its scores) count for the op itself.  Wrong
where a kernel saves more (cuDNN's workspaces, gates of RNNs).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopart.ir.cluster import DEVICE_KINDS, Device
from autopart.ir.graph import Cost, Graph, Literal, Op, Param, Size, Value
from autopart.passes.ops.casts import cast_parameter
from autopart.passes.ops.flops import backward_flops, flops, seen_share, shape_of
from autopart.passes.ops.letters import added_operands
from autopart.passes.ops.resize import resize
from autopart.passes.ops.row import CREATION, VIEW, OpRow
from autopart.passes.ops.storage import is_fused, names_of, storage
from autopart.passes.ops.table import row_of
from autopart.passes.ops.weight_parts import Addition, additions, weight_parts

_FLOATING = ("float", "bfloat", "complex")


def analytic_costs(graph: Graph, device: Device) -> Graph:
    """`graph` with a Cost on every op: roofline times on `device`, saved bytes, operations.  O(ops + values)."""
    pricing = Pricing(graph, graph)
    costs = pricing.costs(graph.size, device)
    ops = [replace(op, cost=costs[number]) for op, number in zip(graph.ops, pricing.classes, strict=True)]
    return replace(graph, ops=tuple(ops))


def added_ns(graph: Graph, device: Device) -> dict[str, int]:
    """Nanoseconds that the backward of each op takes to add gradients to their sums, however it is costed otherwise.

    Where a product adds by itself on a device that moves bytes while it computes, that pass is hidden.  O(ops).
    """
    hides = DEVICE_KINDS[device.kind].beside
    found = zip(graph.ops, additions(graph, weight_parts(graph, storage(graph))), strict=True)
    return {op.name: passing_ns(each.own + (0 if hides else each.inside), device) for op, each in found}


class Pricing:
    """Analytic costs of one model at any size, computed once for each class of equal ops (`op_classes`).

    classes: the number of the class of each op.  weight_parts: of each op.
    """

    def __init__(self, graph: Graph, other: Graph) -> None:
        """other: another capture of the model, or `graph` itself.  O(size of the graph)."""
        self._roots = storage(graph)
        keeps = _kept(graph, self._roots)
        self.weight_parts = weight_parts(graph, self._roots)
        self.additions = additions(graph, self.weight_parts)
        also = [  # what the cost of an op depends on: storage of its operands, what it saves, and keeps for W
            (*(self._roots.get(n, n) for n in op.reads + op.writes), *keeps[op.name], "", *part.kept, part.weight)
            for op, part in zip(graph.ops, self.weight_parts, strict=True)
        ]
        self.classes = op_classes(graph, other, also, self.additions)
        first = first_of(self.classes)
        self._keeps = [(keeps[graph.ops[i].name], self.weight_parts[i], self.additions[i]) for i in first]
        wanted = {name for i in first for op in [graph.ops[i]] for name in (*op.reads, *op.writes, *also[i])}
        places = [i for i, value in enumerate(graph.values) if value.name in wanted]
        self._few, self._twins = (
            replace(g, ops=tuple([g.ops[i] for i in first]), values=tuple([g.values[i] for i in places]))
            for g in (graph, other)
        )
        self._params = graph.param_map()

    def costs(self, size: Size, device: Device) -> list[Cost]:
        """The cost of an op of each class.  Raises GraphError where the program is not known at this size."""
        few = resize(self._few, self._twins, size)
        values = few.value_map()
        found = []
        for op, (kept, part, added) in zip(few.ops, self._keeps, strict=True):
            cost = _cost(op, values, self._params, self._roots, kept, device, added)
            found.append(part.of(cost, values, passing_ns(added.own, device)))
        return found


def _cost(
    op: Op,
    values: Mapping[str, Value],
    params: Mapping[str, Param],
    roots: Mapping[str, str],
    kept: tuple[str, ...],
    device: Device,
    added: Addition,
) -> Cost:
    work, moved = flops(op, values, params), _moved_bytes(op, values, params, roots)
    seen = seen_share(op, values, params, device.kind)
    dtypes = [*(values[name].dtype for name in op.writes + op.reads), *(params[name].dtype for name in op.params)]
    dtype = next((dtype for dtype in dtypes if dtype.startswith(_FLOATING)), "")  # in which it computes
    once = cast_parameter(op, params) is not None
    forward_ns = 0 if once else roofline_ns(int(work * seen), moved, device, dtype)
    if not any(values[w].grad for w in op.writes):
        return Cost(forward_ns, flops=work)
    back = backward_flops(op, values, params)
    passes = max(1, -(-back // work)) if work else 1
    backward_ns = roofline_ns(int(back * seen), moved * passes + added.inside, device, dtype)
    # held during the backward alone: the gradients of results and operands; that of a view holds none of its own
    scratch = sum(values[name].size_bytes for name in {*op.reads, *op.writes} if values[name].grad)
    scratch += sum(params[p].size_bytes for p in op.params if params[p].trainable)
    return Cost(
        forward_ns,
        backward_ns + passing_ns(added.own, device) if added.flows else 0,
        _hidden_bytes(op, values, params, device)
        + sum(values[name].size_bytes for name in kept if not _made_anew(name, op, values, roots, device)),
        0 if row_of(op.target).family == VIEW else scratch,
        work,
    )


def roofline_ns(work: int, moved: int, device: Device, dtype: str) -> int:
    """Nanoseconds of one op: the larger of computing in `dtype` and moving bytes, plus one launch."""
    compute = -(-work * 1_000_000_000 // device.reached(dtype))
    memory = -(-moved * 1_000_000_000 // device.reached_bytes_per_s)
    return max(compute, memory) + DEVICE_KINDS[device.kind].launch_ns


def passing_ns(size_bytes: int, device: Device) -> int:
    """Nanoseconds of passing memory of this size, read or written."""
    return -(-size_bytes * 1_000_000_000 // device.reached_bytes_per_s)


def _moved_bytes(op: Op, values: Mapping[str, Value], params: Mapping[str, Param], roots: Mapping[str, str]) -> int:
    """Bytes read and written.  Views move nothing; lookups read what they return; an expanded operand is read once."""
    row = row_of(op.target)
    written = sum(values[w].size_bytes for w in op.writes)
    if row.family == VIEW and not any(roots.get(w) == w for w in op.writes):
        return 0
    if row.family == CREATION:
        return written
    if row.looks_up:
        return 2 * written + sum(values[r].size_bytes for r in op.reads if "int" in values[r].dtype)
    read = sum(params[p].size_bytes for p in op.params)
    for name in op.reads:
        root = roots.get(name, name)
        size = values[name].size_bytes
        read += min(size, values[root].size_bytes) if root in values else size
    return read + written


def saved_values(op: Op, values: Mapping[str, Value], params: Mapping[str, Param]) -> tuple[str, ...]:
    """Names of the values (never parameters) that `op` saves for its backward; () if no gradient reaches it."""
    if not any(values[w].grad for w in op.writes):
        return ()
    row = row_of(op.target)
    match row.saves:
        case "nothing":
            return ()
        case "output":
            return tuple(w for w in op.writes if values[w].grad)
        case "both":
            return op.reads + op.writes
        case "indices":
            return tuple(n for n in op.reads + op.writes if not values[n].dtype.startswith(("float", "bfloat")))
        case "mask":  # one of the values when it is used, else see _hidden_bytes
            return op.writes[1:]
        case "factors" | "quotient":
            return _factors(op, row, values, params)
    return op.reads


def _factors(op: Op, row: OpRow, values: Mapping[str, Value], params: Mapping[str, Param]) -> tuple[str, ...]:
    """Operands by which the gradient of another one is multiplied: a*b saves `a` if b needs a gradient."""
    added = added_operands(row)
    refs = [ref for place, ref in enumerate(names_of(op)) if place not in added]
    learning = {name for name in refs if name in params and params[name].trainable}
    needing = {i for i, ref in enumerate(refs) if (values[ref].grad if ref in values else ref in learning)}
    if row.saves == "quotient":  # a/b: b for the gradient of a, both for the gradient of b
        kept = [ref for i, ref in enumerate(refs) if i == 1 or 1 in needing]
    else:
        kept = [ref for i, ref in enumerate(refs) if needing - {i}]
    return tuple(dict.fromkeys(ref for ref in kept if ref in values))


def _hidden_bytes(op: Op, values: Mapping[str, Value], params: Mapping[str, Param], device: Device) -> int:
    """Bytes saved for the backward in tensors that are not values of the graph."""
    attrs, out = dict(op.attrs), values[op.writes[0]]
    match row_of(op.target).hidden:
        case "mask":  # a byte per element
            return math.prod(out.shape) if len(op.writes) == 1 else 0
        case "log_softmax":
            logits = shape_of(attrs.get("self"), values, params)
            return math.prod(logits) * _item_bytes(out) if logits else 0
        case "attention":
            return _attention_bytes(op, values, params, device)
        case "lstm" | "gru" | "rnn" as cell:
            layers = int(str(attrs.get("num_layers", 1)))
            reversed_input = 0.5 if attrs.get("bidirectional") else 0.0
            return int(out.size_bytes * (layers * (_STATES[cell] + reversed_input) + layers - 1))
        case "indices":
            return math.prod(out.shape) * 8 if len(op.writes) == 1 else 0
        case "channels":
            return 2 * out.shape[1] * 4 if len(out.shape) > 1 else 0
        case "statistics":
            groups = attrs.get("num_groups", attrs.get("group"))
            if groups is not None:
                return 2 * out.shape[0] * int(str(groups)) * 4
            return 2 * (math.prod(out.shape) // max(1, out.shape[-1])) * 4 if out.shape else 0
    return 0


_STATES = {"lstm": 15.25, "gru": 7.0, "rnn": 1.0}
"""Tensors of the size of the hidden state that a recurrent layer keeps for each token: gates, states and their copies,
as counted on CPUs; besides the result, which an LSTM keeps too."""


def _attention_bytes(op: Op, values: Mapping[str, Value], params: Mapping[str, Param], device: Device) -> int:
    """One float32 per query for a fused kernel, which on CUDA draws dropout's mask again in the backward, and a mask of
    bools as numbers.  Op by op (`_op_by_op`) products keep scaled queries and keys and the softmax of the scores;
    dropout keeps its mask, in numbers, and its result."""
    attrs = dict(op.attrs)
    query, key, mask = (shape_of(attrs.get(name), values, params) for name in ("query", "key", "attn_mask"))
    if query is None or key is None:
        return 0
    queries, item = math.prod(query[:-1]), _item_bytes(values[op.writes[0]])
    scores = queries * key[-2]
    if _op_by_op(op, values, device):
        return item * (math.prod(query) + math.prod(key) + scores * (3 if op.random else 1))
    given = values.get(str(attrs.get("attn_mask"))[1:])
    return queries * 4 + (math.prod(mask) * item if mask and given and given.dtype == "bool" else 0)


def _op_by_op(op: Op, values: Mapping[str, Value], device: Device) -> bool:
    """Whether a device computes an attention without a fused kernel."""
    return row_of(op.target).hidden == "attention" and device.kind == "cpu" and not is_fused(op, values)


def _made_anew(name: str, op: Op, values: Mapping[str, Value], roots: Mapping[str, str], device: Device) -> bool:
    """Whether an attention that runs op by op keeps something else instead of this storage (`_attention_bytes`): all
    but that of its values."""
    own = str(dict(op.attrs).get("value"))[1:]
    return _op_by_op(op, values, device) and name != roots.get(own, own)


def _item_bytes(value: Value) -> int:
    return value.size_bytes // max(1, math.prod(value.shape))


def _kept(graph: Graph, roots: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """For each op, the storages that it saves for its backward and no op before it saves.  O(ops + values)."""
    values, params = graph.value_map(), graph.param_map()
    counted: set[str] = set()
    result: dict[str, tuple[str, ...]] = {}
    for op in graph.ops:
        fresh = dict.fromkeys(roots[name] for name in saved_values(op, values, params))
        result[op.name] = tuple(root for root in fresh if root in values and root not in counted)
        counted.update(result[op.name])
    return result


def op_classes(
    graph: Graph, other: Graph, also: Sequence[tuple[str, ...]], amounts: Sequence[object]
) -> tuple[int, ...]:
    """The class of each op: a number counted from 0 in order of appearance.

    Two ops are equal if they have the same target, arguments and shapes in both captures of the model, whatever the
    names; then they have at every number of rows, since every size lies on the line through the two captures
    (`resize`).  1, 1.0 and True are equal as arguments.

    graph, other: captures of one model, of equal structure.  also: for each op, further values and parameters that
    count as its operands.  amounts: for each op, what else its cost depends on.  O(size of the graph).
    """
    looks = _looks(graph, other)
    classes: dict[object, int] = {}
    found = []
    for op, twin, more, amount in zip(graph.ops, other.ops, also, amounts, strict=True):
        place: dict[str, int] = {}  # names in order of appearance
        operands = tuple(
            [
                (place.setdefault(name, len(place)), looks.get(name, -1))
                for names in (op.reads, op.writes, op.params, more)
                for name in names
            ]
        )
        arguments = nameless(op.attrs, place)
        there = arguments if twin.attrs == op.attrs else nameless(twin.attrs, place)
        counts = len(op.reads), len(op.writes), len(op.params)
        key = op.target, op.random, counts, operands, arguments, there, amount
        found.append(classes.setdefault(key, len(classes)))
    return tuple(found)


def first_of(classes: Sequence[int]) -> tuple[int, ...]:
    """The place of the first op of each class."""
    first = {number: place for place, number in reversed(list(enumerate(classes)))}
    return tuple(first[number] for number in range(len(first)))


def nameless(literal: Literal, place: dict[str, int]) -> Literal:
    """The literal with operands numbered in order of appearance instead of named."""
    if isinstance(literal, tuple):
        return tuple([nameless(item, place) for item in literal])
    if isinstance(literal, str) and literal[:1] == "%":
        return f"%{place.setdefault(literal[1:], len(place))}"
    return literal


def _looks(graph: Graph, other: Graph) -> dict[str, int]:
    """For each value and parameter, a number that stands for everything but its name."""
    pairs = zip(graph.values, other.values, strict=True)
    looks: dict[str, object] = {v.name: (v.shape, twin.shape, v.dtype, v.size_bytes, v.grad) for v, twin in pairs}
    looks |= {p.name: (p.shape, p.dtype, p.size_bytes, p.trainable, p.kind) for p in graph.params}
    numbers: dict[object, int] = {}
    return {name: numbers.setdefault(look, len(numbers)) for name, look in looks.items()}

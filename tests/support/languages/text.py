"""Write graphs and decisions as text (`parse` reads it back).

A graph is a list of statements, on lines of their own or parted by semicolons:

    <- x #100 y                 x (100 bytes) and y are inputs of the graph
    a:3 +w:40 @enc.0 <- x       op a reads x and the parameter w (40 bytes) and writes the value a in 3 ns
    b,c:5/7 #64 <- a y          op b writes b and c, of 64 bytes each; its backward takes 7 ns
    m- <- y                     no gradient flows back through m
    -> c m                      the outputs of the graph

An op is `name[:forward[/backward]] [marks] [<- reads] [-> writes]`.  Times are nanoseconds; the backward takes twice
the forward unless it is given.  Without `->` an op writes a value of its own name (`a,b` writes a and b).  Marks:

    #n  bytes of each value it writes (8)       ^n  bytes saved for the backward    $n  scratch bytes
    |n  FLOPs of its forward                    @p  path of its module              (t) its target ("layer")
    +p  uses the trainable parameter p          *p  uses the frozen parameter p     ~p  uses the buffer p
    %p  uses the constant p                     =p  its value replaces the buffer p !   draws random numbers
    {a,b}  stands for the captured ops a and b (itself)

A size is `bytes[:dtype[shape]]`, such as `#24:float32[2*,3]`, where `*` marks the axis that grows with the rows;
without a dtype it is so many uint8 in one axis, of a parameter in one number.  Parameters give theirs after a colon,
where they are first named: `+w:100:float32[5,5]`.  What is read but never written is an input of 8 bytes.  The last
op's value is the output.  Statements of their own, where these defaults do not do:

    rows 4                      the graph was captured at 4 rows (1)
    tokens 128                  and at 128 tokens of each (whole sequences)
    +w:8 ~mean +v:8=w           parameters in this order; v is tied to w
    +w:8&4                      during a step 4 bytes of copies of w are held, as under autocast
    =mean c                     the value c replaces the buffer mean

Covered: all of a graph but the arguments and source lines of its ops, as long as names hold neither blanks nor the
signs above, values stand in the order of inputs and writes, and no gradient flows to inputs.

A decision is a head and a line for each stage and each group of ops that is recomputed:

    schedule 1f1b, micro-batches of 4 4 3 rows, world 3
    stage on 0 1: a b c
      recompute a b
    stage on 2: d

Covered: every decision whose names hold no blanks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from autopart.ir.decision import Decision
from autopart.ir.graph import Graph, Op, Param, Value
from autopart.ir.program import BUCKET_BYTES

DEFAULT_BYTES = 8
DEFAULT_DTYPE = "uint8"
DEFAULT_TARGET = "layer"
PARAM_SIGNS = {"+": ("param", True), "*": ("param", False), "~": ("buffer", False), "%": ("constant", False)}
"""The sign of a parameter: its kind, and whether it is trained."""
_SIGN_OF = {meaning: sign for sign, meaning in PARAM_SIGNS.items()}


def graph_text(graph: Graph) -> str:
    """A graph in the language of this module, a statement a line.  O(size)."""
    return "\n".join(_statements(graph))


def _statements(graph: Graph) -> Iterator[str]:
    values, params = graph.value_map(), graph.param_map()
    if graph.rows != 1:
        yield f"rows {graph.rows}"
    if graph.size.tokens is not None:
        yield f"tokens {graph.size.tokens}"
    if graph.inputs:
        yield "<- " + " ".join(_sized(values[name]) for name in graph.inputs)
    new = {p.name for p in graph.params}
    if list(dict.fromkeys(name for op in graph.ops for name in op.params)) != list(params) or _any_tied(graph):
        new.clear()
        yield " ".join(_param(p) for p in graph.params)
    inline = _updates_by_op(graph)
    for op in graph.ops:
        yield _op(op, values, params, new, [] if inline is None else inline.get(op.name, []))
        new.difference_update(op.params)
    if inline is None:
        yield from (f"={buffer} {value}" for buffer, value in graph.updates)
    if graph.outputs != _default_outputs(graph):
        yield "-> " + " ".join(graph.outputs)


def _any_tied(graph: Graph) -> bool:
    return any(p.same_as is not None for p in graph.params)


def _default_outputs(graph: Graph) -> tuple[str, ...]:
    return graph.ops[-1].writes[:1] if graph.ops else ()


def _updates_by_op(graph: Graph) -> dict[str, list[str]] | None:
    """The buffers that each op updates, where its first value does and marks give them in the order of the graph."""
    first = {op.writes[0]: op.name for op in graph.ops if op.writes}
    if any(value not in first for _, value in graph.updates):
        return None
    found: dict[str, list[str]] = {}
    for buffer, value in graph.updates:
        found.setdefault(first[value], []).append(buffer)
    marked = [buffer for op in graph.ops for buffer in found.get(op.name, [])]
    return found if marked == [buffer for buffer, _ in graph.updates] else None


def _op(op: Op, values: dict[str, Value], params: dict[str, Param], new: set[str], updates: Iterable[str]) -> str:
    written = [values[name] for name in op.writes]
    alike = len({(v.shape, v.dtype, v.size_bytes, v.rows_axis, v.grad) for v in written}) == 1
    short = alike and op.writes[0] == op.name
    words = [_head(op, written if short else [])]
    if short:
        words += _size_mark(written[0])
    cost = op.cost
    for sign, amount in (("^", cost.saved_bytes), ("$", cost.scratch_bytes), ("|", cost.flops)):
        if amount:
            words.append(f"{sign}{amount}")
    words += [_param(params[name]) if name in new else _SIGN_OF[_meaning(params[name])] + name for name in op.params]
    words += [f"={buffer}" for buffer in updates]
    if op.module:
        words.append(f"@{op.module}")
    if op.target != DEFAULT_TARGET:
        words.append(f"({op.target})")
    if op.random:
        words.append("!")
    if op.parts != (op.name,):
        words.append("{" + ",".join(op.parts) + "}")
    if op.reads:
        words += ["<-", *op.reads]
    if not short:
        words += ["->", *(_sized(v, "" if v.grad else "-") for v in written)]
    return " ".join(words)


def _head(op: Op, written: Sequence[Value]) -> str:
    """Name and times; where its values need no words of their own, their names and whether gradients flow."""
    name = ",".join(v.name for v in written) + ("" if written[0].grad else "-") if written else op.name
    forward, backward = op.cost.fwd_ns, op.cost.bwd_ns
    if backward != 2 * forward:
        return f"{name}:{forward}/{backward}"
    return f"{name}:{forward}" if forward else name


def _sized(value: Value, ending: str = "") -> str:
    return " ".join([value.name + ending, *_size_mark(value)])


def _size_mark(value: Value) -> list[str]:
    size = _size(value.size_bytes, value.dtype, value.shape, value.rows_axis, (value.size_bytes,))
    return [] if size == str(DEFAULT_BYTES) else [f"#{size}"]


def _size(size_bytes: int, dtype: str, shape: tuple[int, ...], rows_axis: int | None, default: tuple[int, ...]) -> str:
    if (dtype, shape, rows_axis) == (DEFAULT_DTYPE, default, None):
        return str(size_bytes)
    axes = (f"{size}{'*' * (axis == rows_axis)}" for axis, size in enumerate(shape))
    return f"{size_bytes}:{dtype}[{','.join(axes)}]"


def _meaning(param: Param) -> tuple[str, bool]:
    return param.kind, param.trainable


def _param(param: Param) -> str:
    size = _size(param.size_bytes, param.dtype, param.shape, None, (1,))
    text = _SIGN_OF[_meaning(param)] + param.name
    text += "" if size == str(DEFAULT_BYTES) else f":{size}"
    text += f"&{param.copy_bytes}" if param.copy_bytes else ""
    return text if param.same_as is None else f"{text}={param.same_as}"


def decision_text(decision: Decision) -> str:
    """A decision in the language of this module, a line for each stage and each recomputed group.  O(ops)."""
    rows = " ".join(map(str, decision.micro_rows))
    zero = f", zero {decision.zero}" if decision.zero else ""
    cut = f", slices of {' '.join(map(str, decision.token_slices))} tokens" if decision.token_slices else ""
    buckets = f", buckets of {decision.bucket_bytes} bytes" if decision.bucket_bytes != BUCKET_BYTES else ""
    lines = [f"schedule {decision.schedule}, micro-batches of {rows} rows{cut}, world {decision.world}{zero}{buckets}"]
    for stage in decision.stages:
        how = f" in shares {' '.join(map(str, stage.shares))}" if stage.shares else ""
        how += " in turn" if stage.policy == "turn" else ""
        how += " forward only" if stage.forward_only else ""
        how += " whole backward" if stage.whole_backward else ""
        lines.append(f"stage on {' '.join(map(str, stage.ranks))}{how}: {' '.join(stage.ops)}".rstrip())
        lines += [f"  recompute {' '.join(group)}".rstrip() for group in stage.recompute]
    lines += [f"order {text}".rstrip() for text in decision.order]
    return "\n".join(lines)

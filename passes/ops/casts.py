"""Casts of parameters, such as autocast makes for every use of a weight.

The runtime makes each copy once a step, not once a micro-batch: a copy is held like a weight, costs no time in a
forward, and does not count among the tensors that an op saves for its backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from autopart.ir.graph import Graph, Op, Param, Value

CAST = "aten._to_copy.default"
_FLOATING = ("float", "bfloat")


def cast_parameter(op: Op, params: Mapping[str, Param]) -> str | None:
    """The parameter that `op` casts to another floating type; None for an op that does anything else."""
    if op.target != CAST or op.reads or len(op.params) != 1 or params[op.params[0]].kind != "param":
        return None
    given = {name: value for name, value in op.attrs if value is not None and value is not False}
    dtype = given.get("dtype")
    plain = given.keys() == {"self", "dtype"} and isinstance(dtype, str) and dtype.startswith(_FLOATING)
    return op.params[0] if plain and params[op.params[0]].dtype.startswith(_FLOATING) else None


def with_copies(params: tuple[Param, ...], ops: Iterable[Op], values: Iterable[Value]) -> tuple[Param, ...]:
    """The parameters with the bytes of their copies, one for each type that `ops` read them in.  O(ops + values)."""
    by_name, sizes = {param.name: param for param in params}, {value.name: value.size_bytes for value in values}
    copies: dict[str, dict[object, int]] = {}
    for op in ops:
        name = cast_parameter(op, by_name)
        if name is not None:
            copies.setdefault(name, {})[dict(op.attrs)["dtype"]] = sizes[op.writes[0]]
    return tuple(
        replace(param, copy_bytes=sum(copies[param.name].values())) if param.name in copies else param
        for param in params
    )


def cast_values(graph: Graph) -> dict[str, str]:
    """For each value that is a cast of a parameter, that parameter.  O(ops)."""
    params = graph.param_map()
    found = ((op, cast_parameter(op, params)) for op in graph.ops)
    return {op.writes[0]: name for op, name in found if name is not None}


def without_casts(graph: Graph) -> Graph:
    """Set the time of casts of parameters to 0 in the forward, however they were measured.  O(ops)."""
    casts = cast_values(graph)
    ops = [replace(op, cost=replace(op.cost, fwd_ns=0)) if op.writes[0] in casts else op for op in graph.ops]
    return replace(graph, ops=tuple(ops)) if casts else graph

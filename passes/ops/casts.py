"""Casts of parameters, as autocast makes one for every use of a weight.

The runtime makes each copy once a step, not once a micro-batch: the copy is held like a weight, costs no time in a
forward, and is nothing that an op keeps for its backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autopart.ir.graph import Graph, Op, Param

CAST = "aten._to_copy.default"
_FLOATING = ("float", "bfloat")


def cast_parameter(op: Op, params: Mapping[str, Param]) -> str | None:
    """The parameter of which `op` makes a copy in another floating type and nothing else; None for any other op."""
    if op.target != CAST or op.reads or len(op.params) != 1 or params[op.params[0]].kind != "param":
        return None
    given = {name: value for name, value in op.attrs if value is not None and value is not False}
    dtype = given.get("dtype")
    plain = given.keys() == {"self", "dtype"} and isinstance(dtype, str) and dtype.startswith(_FLOATING)
    return op.params[0] if plain and params[op.params[0]].dtype.startswith(_FLOATING) else None


def copy_bytes(ops: Iterable[Op], params: Mapping[str, Param], sizes: Mapping[str, int]) -> dict[str, int]:
    """For each parameter that is cast, the bytes of its copies, one for each type.  sizes: of values.  O(ops)."""
    found: dict[str, dict[object, int]] = {}
    for op in ops:
        name = cast_parameter(op, params)
        if name is not None:
            found.setdefault(name, {})[dict(op.attrs)["dtype"]] = sizes[op.writes[0]]
    return {name: sum(by_dtype.values()) for name, by_dtype in found.items()}


def cast_values(graph: Graph) -> dict[str, str]:
    """For each value that is such a copy, the parameter.  O(ops)."""
    params = graph.param_map()
    found = ((op, cast_parameter(op, params)) for op in graph.ops)
    return {op.writes[0]: name for op, name in found if name is not None}

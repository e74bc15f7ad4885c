"""The ops of code as text, by which equal code is known."""

from __future__ import annotations

from typing import Any

from torch import fx


def text_of(body: fx.GraphModule) -> str:
    """Return the ops of a graph as text, equal for equal ops whatever their names.  O(nodes)."""
    number: dict[fx.Node, int] = {}

    def argument(arg: Any) -> Any:
        return f"%{number[arg]}" if isinstance(arg, fx.Node) else repr(arg)

    lines = []
    for node in body.graph.nodes:
        number[node] = len(number)
        args = fx.node.map_aggregate((node.args, node.kwargs), argument)
        lines.append(f"{node.op} {'' if node.op == 'placeholder' else node.target} {args}")
    return "\n".join(lines)

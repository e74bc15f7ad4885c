"""Groups of ops by the modules that they belong to, selected by patterns of module paths."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from autopart.ir.errors import UsageError
from autopart.ir.graph import Graph
from autopart.passes.graph.cuts import module_paths, nearest_paths

Groups = tuple[tuple[str, ...], ...]


def wanted_groups(graph: Graph, wanted: str | Sequence[str], own: Groups) -> tuple[str, Groups]:
    """What the planner may recompute ("auto", "off" or "all"), and groups of ops that are recomputed in any case.

    wanted: the user's option: such a word, or patterns of modules, then nothing else is recomputed.  own: groups that
    the model itself recomputes, which count for "auto".  Raises UsageError.
    """
    if isinstance(wanted, str):
        return wanted, own if wanted == "auto" else ()
    return "off", module_groups(graph, wanted)


def module_groups(graph: Graph, patterns: Sequence[str]) -> Groups:
    """The ops of each module that fits a pattern, in the order of the graph; of nested modules the outermost counts.

    Patterns are those of `fnmatch`, in which a star stands for dots too: "model.layers.*" is every layer as a whole.
    Raises UsageError for a pattern that fits no module with ops.  O(paths * patterns + ops).
    """
    home = outermost_fitting(graph, patterns, "recompute=", 'use "auto", "off" or "all"')
    groups: dict[str, list[str]] = {}
    for op in graph.ops:
        if op.module in home:
            groups.setdefault(home[op.module], []).append(op.name)
    return tuple(map(tuple, groups.values()))


def outermost_fitting(graph: Graph, patterns: Sequence[str], option: str, otherwise: str = "") -> dict[str, str]:
    """Return by module with ops the outermost module around it, or itself, that fits a pattern.

    option, otherwise: for errors, where the patterns come from and what else could be given there.  Raises UsageError
    as `module_groups`.
    """
    parents = module_paths(graph)
    paths = {path for chain in parents.values() for path in chain}
    chosen: set[str] = set()
    for pattern in patterns:
        fitting = {path for path in paths if fnmatchcase(path, pattern)}
        if not fitting:
            near = nearest_paths(graph, pattern)
            raise UsageError(
                f"{pattern!r} of {option} fits no module of the model",
                why="no op runs in a module of such a path",
                fix="; or ".join(
                    filter(None, [f"{near}, and a star stands for any part of one" if near else "", otherwise])
                ),
            )
        chosen |= fitting
    found = {module: [path for path in chain if path in chosen] for module, chain in parents.items()}
    return {module: paths[0] for module, paths in found.items() if paths}

"""Groups of ops by the modules that they come from, as patterns of module paths name them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from autopart.ir.errors import UsageError
from autopart.ir.graph import Graph

Groups = tuple[tuple[str, ...], ...]


def wanted_groups(graph: Graph, wanted: str | Sequence[str], own: Groups) -> tuple[str, Groups]:
    """What may be recomputed beyond certain groups of ops ("auto", "off" or "all"), and these groups.

    wanted: such a word, or patterns of modules, beyond which nothing is.  own: what the model itself wants to be
    recomputed, which counts as long as the user leaves it open.  Raises UsageError.
    """
    if isinstance(wanted, str):
        return wanted, own if wanted == "auto" else ()
    return "off", module_groups(graph, wanted)


def module_groups(graph: Graph, patterns: Sequence[str]) -> Groups:
    """Of each module that fits a pattern its ops, in the order of the graph; of one inside another the outer counts.

    Patterns are those of `fnmatch`, in which a star stands for dots too: "model.layers.*" is every layer as a whole.
    Raises UsageError for one that no module with ops fits.  O(paths * patterns + ops).
    """
    parents: dict[str, list[str]] = {}
    for op in graph.ops:
        if op.module not in parents:
            words = op.module.split(".")
            parents[op.module] = [".".join(words[: k + 1]) for k in range(len(words))] if op.module else []
    paths = list(dict.fromkeys(path for chain in parents.values() for path in chain))
    fitting = {pattern: {path for path in paths if fnmatchcase(path, pattern)} for pattern in patterns}
    for pattern, found in fitting.items():
        if not found:
            raise _no_module(pattern, paths)
    chosen = set[str]().union(*fitting.values())
    groups: dict[str, list[str]] = {}
    for op in graph.ops:
        outermost = next((path for path in parents[op.module] if path in chosen), None)
        if outermost is not None:
            groups.setdefault(outermost, []).append(op.name)
    return tuple(map(tuple, groups.values()))


def _no_module(pattern: str, paths: Sequence[str]) -> UsageError:
    near = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.0)
    return UsageError(
        f"{pattern!r} of recompute= fits no module of the model",
        why="no op runs in a module of such a path",
        fix=(f"the nearest paths are {', '.join(near)}, and a star stands for any part of one; or " if near else "")
        + 'use "auto", "off" or "all"',
    )

"""Cuts of a row of ops: the bytes that cross them, and where the user wants them; modules by patterns of their paths.

Place i is the i-th op of a graph.  Boundary b lies before place b; boundary 0 is the start of the row, boundary n its
end.  The stage [a, b) holds places a to b - 1.  A graph input counts as written at place 0, because the first stage
gets all inputs and sends them on.
"""

from __future__ import annotations

import difflib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import numpy as np
import numpy.typing as npt

from autopart.ir.errors import UsageError
from autopart.ir.graph import Graph, Op

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Groups = tuple[tuple[str, ...], ...]


def crossing_bytes(graph: Graph) -> Ints:
    """Bytes per micro-batch over each boundary 0..n: values that are read later, each once, and their gradients.
    O(reads)."""
    n = len(graph.ops)
    change = np.zeros(n + 2, dtype=np.int64)
    for written, reads, size, grad, _ in flows(graph):
        change[written + 1] += size + grad
        change[reads[-1] + 1] -= size + grad
    return np.cumsum(change)[: n + 1]


def entering_bytes(graph: Graph) -> tuple[Ints, Ints]:
    """(forward, backward) bytes per micro-batch of the stage [a, b), as two matrices over (a, b).

    forward: values that it reads and does not write, each once.  backward: their gradients.  Bytes count where they
    enter a stage, since that does not depend on the other cuts.  O(reads * n + n^2).
    """
    n = len(graph.ops)
    forward, backward = np.zeros((2, n + 1, n + 1), dtype=np.int64)
    for written, reads, size, grad, _ in flows(graph):
        before = written
        for read in reads:  # a stage that starts after `before` and no later than `read` meets this read first
            forward[before + 1 : read + 1, read + 1] += size
            backward[before + 1 : read + 1, read + 1] += grad
            before = read
    return np.cumsum(forward, axis=1), np.cumsum(backward, axis=1)


def holding_bytes(graph: Graph, trainable_factor: float) -> Ints:
    """Bytes of the parameters of each stage [a, b), each once, trainable ones times the factor, and of their copies.
    O(uses * n + n^2)."""
    n = len(graph.ops)
    uses: dict[str, list[int]] = {}
    for place, op in enumerate(graph.ops):
        for name in op.params:
            uses.setdefault(name, []).append(place)
    params = graph.param_map()
    held = np.zeros((n + 1, n + 1), dtype=np.int64)
    for name, places in uses.items():
        param = params[name]
        size = int(param.size_bytes * trainable_factor) if param.trainable else param.size_bytes
        size += param.copy_bytes
        before = -1
        for place in places:
            held[before + 1 : place + 1, place + 1] += size
            before = place
    return np.cumsum(held, axis=1)


def flows(graph: Graph) -> list[tuple[int, list[int], int, int, bool]]:
    """(place that writes it, places that read it ascending, its bytes, its gradient's bytes, whether an op writes it)
    of each value that is read."""
    written = {w: place for place, op in enumerate(graph.ops) for w in op.writes}
    reads: dict[str, list[int]] = {}
    for place, op in enumerate(graph.ops):
        for name in dict.fromkeys(op.reads):
            reads.setdefault(name, []).append(place)
    values = graph.value_map()
    found = []
    for name, places in reads.items():
        made, size = name in written, values[name].size_bytes
        found.append((written.get(name, 0), places, size, size if made and values[name].grad else 0, made))
    return found


def segments(graph: Graph, cuts: Sequence[str], also: Sequence[int] = ()) -> list[int]:
    """For each op, the number of cuts at or before it.

    A cut is a module path; it lies before the first op, in captured order, of that module or one inside it.  also:
    places of ops that count as cuts.  Raises UsageError where a path has no op or begins at the first op, or where two
    cuts lie at one place.  O(ops * cuts).
    """
    starts: dict[int, str] = {}
    for cut in cuts:
        start = next((place for place, op in enumerate(graph.ops) if _inside(op, cut)), None)
        if start is None:
            raise _no_module(graph, cut)
        if start == 0:
            raise UsageError(f"cut {cut!r} begins at the first op", why="the stage before it would be empty")
        if start in starts:
            raise UsageError(f"cuts {starts[start]!r} and {cut!r} begin at the same op", fix="leave one of them out")
        starts[start] = cut
    places = sorted({*starts, *also} - {0})
    return [bisect_right(places, i) for i in range(len(graph.ops))]


def module_span(graph: Graph, paths: Sequence[str]) -> tuple[int, int]:
    """[first op, op after the last) of these modules.  Raises UsageError where a path has no op.  O(ops * paths)."""
    places: list[int] = []
    for path in paths:
        own = [place for place, op in enumerate(graph.ops) if _inside(op, path)]
        if not own:
            raise _no_module(graph, path)
        places += own
    return min(places), max(places) + 1


def check_own_ops(captured: Graph, fine: Graph, paths: Sequence[str]) -> None:
    """Raises UsageError for a module whose ops were all cloned into those that need them, so that `fine`, which was
    made of `captured`, has none of them.  O(ops * paths)."""
    for path in paths:
        cloned = [op for op in captured.ops if _inside(op, path)]
        if cloned and not any(_inside(op, path) for op in fine.ops):
            raise UsageError(
                f"module {path!r} has no op of its own, so no stage can begin or stay there",
                where=f"{cloned[0].target} at {cloned[0].where}",
                why="its ops are cheap and depend on nothing that is trained: they run again wherever their results "
                "are needed, instead of being sent",
                fix="name the module before or after it",
            )


def _inside(op: Op, path: str) -> bool:
    return f"{op.module}.".startswith(f"{path}.")


def _module_paths(graph: Graph) -> dict[str, list[str]]:
    """For each module with ops, its path and those of the modules around it, the outermost first.  O(ops)."""
    modules = {op.module: op.module.split(".") for op in graph.ops if op.module}
    return {module: [".".join(words[: k + 1]) for k in range(len(words))] for module, words in modules.items()}


def _nearest_paths(graph: Graph, path: str) -> str:
    """Advice for a path that no module has: the nearest ones; "" where there are none."""
    paths = dict.fromkeys(path for parents in _module_paths(graph).values() for path in parents)
    near = difflib.get_close_matches(path, paths, n=3, cutoff=0.0)
    return f"the nearest paths are {', '.join(near)}" if near else ""


def _no_module(graph: Graph, path: str) -> UsageError:
    return UsageError(
        f"{path!r} is not a module of the model in which a stage could begin or stay",
        why="no op runs in a module of that path",
        fix=_nearest_paths(graph, path),
    )


def forced_bounds(blocks: Graph, fine: Graph, cuts: Sequence[str]) -> tuple[int, ...]:
    """The boundaries of `blocks`, coarsened from `fine` with these cuts, at which the cuts lie.  O(ops * cuts).

    A block lies in the segment of its last part, which is an op of `fine` (clones come first).
    """
    segment = dict(zip((op.name for op in fine.ops), segments(fine, cuts), strict=True))
    ends = [segment[(op.parts or (op.name,))[-1]] for op in blocks.ops]
    return tuple(b for b in range(1, len(ends)) if ends[b] != ends[b - 1])


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
    paths = {path for chain in _module_paths(graph).values() for path in chain}
    chosen: set[str] = set()
    for pattern in patterns:
        fitting = {path for path in paths if fnmatchcase(path, pattern)}
        if not fitting:
            near = _nearest_paths(graph, pattern)
            raise UsageError(
                f"{pattern!r} of {option} fits no module of the model",
                why="no op runs in a module of such a path",
                fix="; or ".join(filter(None, [near and f"{near}, and a star stands for any part of one", otherwise])),
            )
        chosen |= fitting
    return outermost(graph, chosen.__contains__)


def outermost(graph: Graph, fits: Callable[[str], object]) -> dict[str, str]:
    """Return by module with ops the outermost module around it, or itself, whose path fits.  O(ops)."""
    found = {module: [path for path in chain if fits(path)] for module, chain in _module_paths(graph).items()}
    return {module: paths[0] for module, paths in found.items() if paths}

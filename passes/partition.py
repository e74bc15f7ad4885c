"""The partition: where the line of blocks is cut into stages.

Minimise over cuts 0 = c_0 < c_1 < ... < c_S = n

    J = sum_s t_s + (m - 1) * max_s t_s        t_s = fwd + bwd of stage s + transfers into it

subject to, for every stage s on device s,

    parameters, gradients, optimizer state + k_s * (saved + entering bytes) + largest scratch <= memory
    k_s = plan.in_flight(schedule, s, S, m);   forced boundaries are cuts

J is the time of one step when every stage takes t_s for each micro-batch: one micro-batch passes all stages, the
others follow at the pace of the slowest.  GPipe and 1F1B share it, they differ in k_s alone; it is exact for equal
stages (Alpa, OSDI 2022, section 5.1, equation 2).

Assumed, and wrong where: a transfer is not hidden behind compute (the runtime hides part of it); all that enters a
stage is one message each way over the link from the stage before it (skips may come from further away); what leaves a
stage is charged where it enters; all devices run as fast as the one the costs are of; the sum of tied gradients is
left out; a clone of a free op counts in the first stage that has it; buffers of sends are left out.

Room for replicas: a stage of r devices adds a dimension d (devices used so far) to the tables below and an
all-reduce to t_s; the search over J does not change.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopart.ir.cluster import Cluster, Link
from autopart.ir.errors import InfeasibleError, UsageError
from autopart.ir.graph import Graph, Op
from autopart.ir.plan import in_flight
from autopart.passes.cuts import Ints, entering_bytes, holding_bytes

FAR = 1 << 60
"""More than any time or memory; FAR + FAR still fits 64 bits."""


@dataclass(frozen=True, slots=True)
class Split:
    """Stage s is blocks[bounds[s]:bounds[s + 1]].

    objective_ns: J.  stage_ns: t_s.  stage_bytes: the left side of the memory constraint.
    """

    bounds: tuple[int, ...]
    objective_ns: int
    stage_ns: tuple[int, ...]
    stage_bytes: tuple[int, ...]


def partition(
    blocks: Graph,
    cluster: Cluster,
    *,
    stages: int,
    micros: int,
    schedule: str,
    forced: tuple[int, ...] = (),
    state_factor: float = 2.0,
) -> Split:
    """The split that minimises J (module docstring), exactly; of equal ones that with the smallest slowest stage.

    Before: blocks in topological order, any of whose cuts is legal; stage s will run on rank s.  forced: boundaries
    that must be cuts.  state_factor: bytes of optimizer state per byte of trainable parameter (2 for Adam).
    Raises UsageError when there are too few blocks or stages, InfeasibleError when no split fits the memory.

    Alpa tries every value of the slowest stage, ascending.  We go down instead: the least sum with no limit on a
    stage, then with a limit below which alone a later answer can still win, until none can.  Same optimum, one DP of
    O(S n^2) a step, and few steps because the sum changes by transfers alone.
    """
    n = len(blocks.ops)
    if stages > n:
        raise UsageError(f"{stages} stages asked for, but the model has only {n} blocks that can stand apart")
    if stages < len(forced) + 1 or stages > cluster.world:
        raise UsageError(
            f"{stages} stages cannot work", why=f"{len(forced)} forced cuts, {cluster.world} devices in the cluster"
        )
    legal = _legal(n, forced)
    time = np.where(legal, _time_ns(blocks, cluster, stages), FAR)
    need = _need_bytes(blocks, stages, micros, schedule, state_factor)
    limits = np.array([device.memory_bytes for device in cluster.devices[:stages]], dtype=np.int64)
    over = np.maximum(need - limits[:, None, None], 0)
    allowed = np.where(over == 0, time, FAR)
    fastest = _least_max(allowed)
    if fastest is None:
        raise _infeasible(_least_max(np.where(legal, over, FAR)), need, cluster, blocks, schedule)
    bounds = _search(allowed, fastest, micros)
    stage_ns = _pick(time, bounds)
    return Split(bounds, _objective(stage_ns, micros), stage_ns, _pick(need, bounds))


def _search(time: Ints, fastest: tuple[int, ...], micros: int) -> tuple[int, ...]:
    """The bounds that minimise J, given those with the smallest slowest stage."""
    floor = max(_pick(time, fastest))
    best = _least_sum(time, floor + 1) or fastest
    best_ns = _objective(_pick(time, best), micros)
    limit = FAR
    while (bounds := _least_sum(time, limit)) is not None:
        stage_ns = _pick(time, bounds)
        if sum(stage_ns) + (micros - 1) * floor >= best_ns:
            break  # later answers have no smaller sum, and no answer has a faster slowest stage
        if _objective(stage_ns, micros) < best_ns:
            best, best_ns = bounds, _objective(stage_ns, micros)
        limit = max(stage_ns)
        if micros > 1:  # no later sum is smaller, so what can still win has a slowest stage below this
            limit = min(limit, (best_ns - sum(stage_ns) - 1) // (micros - 1) + 1)
    return best


def _objective(stage_ns: tuple[int, ...], micros: int) -> int:
    return sum(stage_ns) + (micros - 1) * max(stage_ns)


def _pick(table: Ints, bounds: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(table[s, bounds[s], bounds[s + 1]]) for s in range(len(bounds) - 1))


# ---- tables over (stage s, first block a, block after the last b) ---------------------------------------------------


def _legal(n: int, forced: tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """legal[a, b]: the stage [a, b) is not empty and no forced cut lies inside it."""
    a, b = np.arange(n + 1)[:, None], np.arange(n + 1)[None, :]
    legal = a < b
    for cut in forced:
        legal &= ~((a < cut) & (cut < b))
    return np.asarray(legal)


def _time_ns(blocks: Graph, cluster: Cluster, stages: int) -> Ints:
    sums = np.cumsum([0, *(op.cost.total_ns for op in blocks.ops)])
    compute = sums[None, :] - sums[:, None]
    forward, backward = entering_bytes(blocks)
    by_link: dict[Link | None, Ints] = {None: compute}  # the first stage receives nothing
    links: list[Link | None] = [None, *(cluster.link(s - 1, s) for s in range(1, stages))]
    for link in links:
        if link is not None and link not in by_link:
            by_link[link] = compute + _transfer_ns(forward, link) + _transfer_ns(backward, link)
    return np.stack([by_link[link] for link in links])


def _transfer_ns(size_bytes: Ints, link: Link) -> Ints:
    """Element by element what the link takes; nothing for no bytes.  Python's integers, since bytes * 1e9 is large."""
    sizes, index = np.unique(size_bytes, return_inverse=True)
    times = [link.transfer_ns(size) if size else 0 for size in sizes.tolist()]
    return np.array(times, dtype=np.int64)[index].reshape(size_bytes.shape)


def _need_bytes(blocks: Graph, stages: int, micros: int, schedule: str, state_factor: float) -> Ints:
    n = len(blocks.ops)
    static = holding_bytes(blocks, 2 + state_factor)  # weights, gradients, optimizer state
    for a in range(n):  # the largest scratch of [a, b): a running maximum over b
        static[a, a + 1 :] += np.maximum.accumulate([o.cost.scratch_bytes for o in blocks.ops[a:]])
    sums = np.cumsum([0, *(op.cost.saved_bytes for op in blocks.ops)])
    live = sums[None, :] - sums[:, None] + entering_bytes(blocks)[0]
    need = np.empty((stages, n + 1, n + 1), dtype=np.int64)
    for s in range(stages):
        need[s] = static + in_flight(schedule, s, stages, micros) * live
    size = {v.name: v.size_bytes for v in blocks.values}
    need[0] += micros * sum(size[name] for name in blocks.inputs)  # the first stage is given the whole batch
    return need


# ---- dynamic programs ----------------------------------------------------------------------------------------------


def _least_sum(table: Ints, limit: int) -> tuple[int, ...] | None:
    """Bounds that minimise the sum over stages, each below the limit; None when there are none.  O(S n^2)."""
    return _walk(table, np.add, limit)


def _least_max(table: Ints) -> tuple[int, ...] | None:
    """Bounds that minimise the maximum over stages; None when every way has a FAR stage.  O(S n^2)."""
    return _walk(table, np.maximum, FAR)


def _walk(table: Ints, join: np.ufunc, limit: int) -> tuple[int, ...] | None:
    best = np.full(table.shape[1], FAR, dtype=np.int64)  # best[b]: the first s stages cover blocks 0..b-1
    best[0] = 0
    choices = []
    for stage in table:
        ways = join(best[:, None], np.where(stage < limit, stage, FAR))
        choices.append(ways.argmin(axis=0))  # the lowest a wins a tie
        best = np.minimum(ways.min(axis=0), FAR)
    if best[-1] >= FAR:
        return None
    bounds = [len(best) - 1]
    for choice in reversed(choices):
        bounds.append(int(choice[bounds[-1]]))
    return tuple(reversed(bounds))


def _infeasible(
    bounds: tuple[int, ...] | None, need: Ints, cluster: Cluster, blocks: Graph, schedule: str
) -> InfeasibleError:
    """The error for the split whose worst stage is least over the limit."""
    if bounds is None:
        return InfeasibleError("no way to cut the model keeps the forced cuts with so many stages")
    needs = _pick(need, bounds)
    excess = [amount - cluster.devices[s].memory_bytes for s, amount in enumerate(needs)]
    s = excess.index(max(excess))
    first, last = blocks.ops[bounds[s]], blocks.ops[bounds[s + 1] - 1]
    return InfeasibleError(
        f"stage {s} of {len(needs)} does not fit its device: it needs {_mib(needs[s])} and may use "
        f"{_mib(cluster.devices[s].memory_bytes)}, {_mib(excess[s])} too much",
        where=f"{_place(first, 0)} to {_place(last, -1)}, in the split that comes nearest",
        why="parameters, gradients, optimizer state, activations of the micro-batches in flight and scratch",
        fix="use more stages or more, smaller micro-batches" + (", or schedule 1f1b" if schedule == "gpipe" else ""),
    )


def _place(block: Op, part: int) -> str:
    return block.module or (block.parts or (block.name,))[part]


def _mib(size_bytes: int) -> str:
    return f"{size_bytes} bytes" if size_bytes < 1 << 20 else f"{size_bytes / (1 << 20):.1f} MiB"

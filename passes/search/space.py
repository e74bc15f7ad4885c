"""What the planner may choose from: what is asked for, the chain of blocks and the cluster it is about.

At the end stand relaxations, which the search and the proof share: what a part of any plan of a space takes at least.
There blocks are taken on their fastest type of device, and messages are left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from autopart.ir.errors import UsageError
from autopart.ir.graph import Graph
from autopart.ir.program import BUCKET_BYTES
from autopart.ir.shares import Policy
from autopart.ir.size import Size
from autopart.passes.graph.chain import BlockChain
from autopart.passes.graph.cuts import Ints, module_span
from autopart.passes.program.schedules import AUTOMATIC, find
from autopart.passes.search.layout import Layout
from autopart.passes.simulation.stage_costs import CostContext, LoadMemo, summed_bytes
from autopart.passes.tokens.recipe import TokenAxis

Bools = npt.NDArray[np.bool_]
Watch = Callable[[str, int, int], None]
"""Told of progress: (what is being done, best step so far in ns or 0, lower bound in ns or 0)."""


@dataclass(frozen=True)
class PlanRequest:
    """What is asked for; None and empty mean that the planner chooses.

    micro_rows: the ways to cut the batch that may be chosen from, each the rows of its micro-batches.  schedule: "auto"
    or a name.  cuts: module paths at which a stage begins.  together: groups of module paths, each group to stay in one
    stage.  pins: module path to its stage.  uncut: values that no stage may pass to another.  replicas: of every stage,
    or one number for each.  policy: how they divide micro-batches.  recompute: "auto", "off" or "all"; recomputed:
    groups of captured ops that are recomputed even when it is "off".  zero: 0, 1 (optimizer state shared by replicas)
    or "auto" (where that is faster, or memory demands it).  bucket_bytes: gradients that replicas sum
    together.  token_slices: lengths of slices, () for whole sequences, "auto" where the planner chooses;
    token_axis: tells what slices take.  state_factor: bytes of optimizer state per byte of trainable parameter.
    prove_seconds: time to find a certificate (`certificate`) of the plan, when its largest micro-batch has prove_rows
    rows (None: whatever it has).
    """

    micro_rows: tuple[tuple[int, ...], ...]
    stages: int | None = None
    schedule: str = "auto"
    cuts: tuple[str, ...] = ()
    together: tuple[tuple[str, ...], ...] = ()
    pins: Mapping[str, int] = field(default_factory=dict)
    uncut: tuple[str, ...] = ()
    replicas: int | tuple[int, ...] | None = None
    policy: Policy = "split"
    least_rows: int = 1
    recompute: str = "auto"
    recomputed: tuple[tuple[str, ...], ...] = ()
    zero: int | str = "auto"
    bucket_bytes: int = BUCKET_BYTES
    token_slices: tuple[int, ...] | str = ()
    token_axis: TokenAxis | None = None
    state_factor: float = 2.0
    prove_seconds: float = 0.0
    prove_rows: int | None = None

    def normalized(self) -> PlanRequest:
        """Fills in the number of stages that the request implies: with cuts, as many as replicas are given for, else
        one more than there are cuts."""
        if self.stages is not None or not self.cuts:
            return self
        fixed = self.replicas if isinstance(self.replicas, tuple) else None
        return replace(self, stages=len(fixed) if fixed else len(self.cuts) + 1)

    @property
    def schedules(self) -> tuple[str, ...]:
        """Schedules to compare.  An asynchronous one computes something else, so it is never chosen unasked."""
        if self.schedule != "auto":
            return (self.schedule,)
        return AUTOMATIC

    @property
    def fixed_slices(self) -> tuple[int, ...]:
        """The lengths of slices that were asked for."""
        return self.token_slices if isinstance(self.token_slices, tuple) else ()

    @property
    def may_recompute(self) -> bool:
        """Whether memory may be bought with time, beyond what is asked for."""
        return self.recompute != "off"

    @property
    def may_shard(self) -> bool:
        """Whether replicas may share the optimizer's state; never where it steps while micro-batches are in flight."""
        return self.zero != 0 and self.synchronous

    @property
    def synchronous(self) -> bool:
        """Whether the optimizer steps when no micro-batch is in flight."""
        return self.schedule == "auto" or find(self.schedule).synchronous

    @property
    def may_replicate(self) -> bool:
        """Whether stages may have several devices."""
        return self.replicas != 1

    @property
    def copies(self) -> int:
        """Copies of the pipeline that give every stage the replicas asked for: 1 where none are."""
        return math.gcd(*self.replicas) if isinstance(self.replicas, tuple) else self.replicas or 1

    def most_replicas(self, micro_rows: Sequence[int]) -> int:
        """How many of a stage have something to do, and `least_rows` rows at least where they have any."""
        if self.policy == "turn":
            return len(micro_rows)
        return max(micro_rows) if self.least_rows == 1 else max(1, min(micro_rows) // self.least_rows)

    def replicas_of(self, stages: int) -> tuple[int, ...] | None:
        """What the user fixed for each of so many stages, or None."""
        if self.replicas is None:
            return None
        return (self.replicas,) * stages if isinstance(self.replicas, int) else self.replicas

    def keep_together(self) -> tuple[tuple[str, ...], ...]:
        """Groups of module paths that must stay in one stage: those of `together`, then each pin by itself.

        Their first and last ops must be ends of blocks.
        """
        return (*self.together, *((path,) for path in self.pins))


@dataclass(frozen=True)
class SearchSpace:
    """A chain of blocks to cut, what it costs on a cluster, and what is asked for.

    loads: of messages and sums on that cluster.  fine: the graph that the blocks were made of.  forced: boundaries that
    must be cuts.
    """

    chain: BlockChain
    costs: CostContext
    loads: LoadMemo
    request: PlanRequest
    fine: Graph
    forced: tuple[int, ...]

    @cached_property
    def summed_per_trained(self) -> float:
        """Bytes in which replicas sum the gradients of the model, by byte of trainable parameter."""
        trained = [param for param in self.chain.blocks.params if param.trainable]
        whole = sum(param.size_bytes for param in trained)
        return sum(map(summed_bytes, trained)) / whole if whole else 0.0

    @cached_property
    def may_be_tied(self) -> bool:
        """Whether two blocks use one parameter, which then may be tied across stages."""
        users = Counter(name for op in self.chain.blocks.ops for name in set(op.params))
        return any(count > 1 for count in users.values())

    @cached_property
    def asked(self) -> dict[str, int]:
        """By name the number of the group, among those asked for, of each block that belongs to one with most of its
        own ops; clones come before a block's own ops, and follow them wherever they go."""
        group_of = {op: number for number, group in enumerate(self.request.recomputed) for op in group}
        own = {op.name for op in self.fine.ops}
        found: dict[str, int] = {}
        for block in self.chain.blocks.ops if group_of else ():
            numbers = [group_of.get(part, -1) for part in block.parts or (block.name,) if part in own]
            most = max(set(numbers), key=lambda number: (numbers.count(number), number), default=-1)
            if most >= 0:
                found[block.name] = most
        return found

    @cached_property
    def asked_blocks(self) -> Ints:
        """The same for every block, in order; -1 of the others."""
        return np.array([self.asked.get(block.name, -1) for block in self.chain.blocks.ops], dtype=np.int64)

    def asked_of(self, blocks: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """The groups asked for, as far as they lie in a stage of these blocks."""
        groups: dict[int, list[str]] = {}
        for name in blocks:
            if name in self.asked:
                groups.setdefault(self.asked[name], []).append(name)
        return tuple(map(tuple, groups.values()))

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """[first block, block after the last) of each group that stays together, then of each pin."""
        return [block_span(self.chain.blocks, self.fine, paths) for paths in self.request.keep_together()]

    @cached_property
    def _uncut(self) -> list[tuple[int, int]]:
        """[first block, block after the last) between which a value passes that no stage may pass on."""
        wanted = frozenset(self.request.uncut)
        ops = self.chain.blocks.ops if wanted else ()
        places = {name: [i] for i, op in enumerate(ops) for name in wanted.intersection(op.writes)}
        for i, op in enumerate(ops):
            for name in wanted.intersection(op.reads):
                places[name].append(i)
        return [(min(found), max(found) + 1) for found in places.values()]

    @cached_property
    def legal(self) -> Bools:
        """[a, b]: not empty, no forced cut inside, and no cut inside what stays together at either end."""
        n = self.chain.n
        a, b = np.arange(n + 1)[:, None], np.arange(n + 1)[None, :]
        legal = a < b
        for cut in self.forced:
            legal &= ~((a < cut) & (cut < b))
        for first, end in (*self.spans, *self._uncut):
            for boundary in (a, b):
                legal &= ~((first < boundary) & (boundary < end))
        return np.asarray(legal)

    def legal_at(self, stage: int) -> Bools:
        """`legal`, for the stage with this number: it holds what is pinned to it and nothing pinned elsewhere."""
        n = self.chain.n
        a, b = np.arange(n + 1)[:, None], np.arange(n + 1)[None, :]
        legal = self.legal
        pins = list(self.request.pins.values())
        for (first, end), home in zip(self.spans[len(self.request.together) :], pins, strict=True):
            holds_it = (a <= first) & (end <= b)
            holds_none_of_it = (b <= first) | (end <= a)
            legal = legal & (holds_it if home == stage else holds_none_of_it)
        return np.asarray(legal)


@dataclass(frozen=True, slots=True)
class SearchSpaces:
    """Two chains of the same model: coarse of few blocks, for pipelines of at most `SMALL` positions, and fine of more,
    for deeper pipelines and for refinement.  Fine can be cut wherever coarse can; small models have one for both."""

    coarse: SearchSpace
    fine: SearchSpace

    @property
    def differ(self) -> bool:
        """Whether the fine chain has more blocks than the coarse one."""
        return self.fine.chain.n > self.coarse.chain.n


def block_span(blocks: Graph, fine: Graph, paths: tuple[str, ...]) -> tuple[int, int]:
    """[first block, block after the last) that hold ops of these modules; fine: what the blocks are made of."""
    low, high = module_span(fine, paths)
    wanted = {op.name for op in fine.ops[low:high] if any(f"{op.module}.".startswith(f"{path}.") for path in paths)}
    places = [i for i, block in enumerate(blocks.ops) if not wanted.isdisjoint(block.parts or (block.name,))]
    if not places:
        raise UsageError(f"no block holds {', '.join(paths)}")
    return min(places), max(places) + 1


# ---- relaxations ---------------------------------------------------------------------------------------------------


def is_chain(space: SearchSpace) -> bool:
    """Whether the chain is the only order of the blocks: each reads what the one before it writes."""
    ops = space.chain.blocks.ops
    return all(set(a.writes) & set(b.reads) for a, b in pairwise(ops))


def gradient_edges(space: SearchSpace, rows: int | None = None) -> Ints:
    """[a, b] is 1 where block b reads, with a gradient, what the range [a, b) writes, else 0.

    The stage that begins with b then waits for the one that is [a, b), forward and backward.  rows: only values that
    have bytes at so many rows count, since nothing else is sent.
    """
    ops, n = space.chain.blocks.ops, space.chain.n
    values = space.chain.blocks.values
    sizes = [1] * len(values) if rows is None else space.chain.range_costs(Size(rows)).sizes.tolist()
    grad = {v.name for v, size in zip(values, sizes, strict=True) if v.grad and size}
    writer = {w: i for i, op in enumerate(ops) for w in op.writes}
    found = np.zeros((n + 1, n + 1), dtype=np.int64)
    for b, op in enumerate(ops):
        nearest = max((writer[r] for r in op.reads if r in writer and r in grad), default=-1)
        if nearest >= 0:
            found[: nearest + 1, b] = 1
    return found


def layout_bound(space: SearchSpace, layout: Layout, micro_rows: tuple[int, ...], most: int) -> int:
    """About the least pipeline latency, in nanoseconds, of any partition into at most `most` stages on this layout.

    Stages of t_1 .. t_S that wait for one another have U >= sum of t_q over q < s + M * t_s for each s, which is least
    where all of these are equal: U = sum of t / (1 - (1 - 1 / M)^S).  Where widths are free, all that is known is that
    the positions share the work.  O(blocks).
    """
    micros = len(micro_rows)
    whole = fastest_sums(space, -(-max(micro_rows) // layout.pipeline_replicas))[-1]
    if len(layout.widths) > 1 or not is_chain(space):
        positions = layout.depth if len(layout.widths) > 1 else min(layout.depth, most)
        return int(micros * whole) // positions
    return int(whole / (1 - (1 - 1 / micros) ** min(layout.depth, most, space.chain.n)))


def longest_range(space: SearchSpace, share: int, micros: int, most_ns: int) -> int:
    """Blocks of the longest range whose micro-batches, of `share` rows each, take at most most_ns nanoseconds.

    O(blocks log blocks).
    """
    sums = fastest_sums(space, share)
    last = np.searchsorted(sums, sums + most_ns // micros, side="right") - 1
    return max(1, int((last - np.arange(len(sums))).max()))


def fastest_sums(space: SearchSpace, rows: int) -> Ints:
    """Entry i: nanoseconds of the first i blocks at so many rows, each on its fastest type of device."""
    return np.concatenate([[0], np.cumsum(fastest_times(space, rows))]).astype(np.int64)


def fastest_times(space: SearchSpace, rows: int) -> Ints:
    """Nanoseconds of each block at so many rows, both ways, on its fastest type of device."""
    by_type = [space.chain.range_costs(Size(rows), device_type) for device_type in range(len(space.costs.device_types))]
    return np.asarray(np.min([costs.blocks[0] + costs.blocks[1] for costs in by_type], axis=0))

"""The search space: the request, the chain of blocks and the cluster.

At the end stand relaxations, which the search and the proof share: the least time of a part of any plan of a space.
They take each block on its fastest type of device and leave out messages.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from autopart.ir.decision import Stage
from autopart.ir.errors import UsageError
from autopart.ir.graph import Graph, Size
from autopart.ir.program import BUCKET_BYTES
from autopart.ir.shares import Policy
from autopart.passes.graph.chain import BlockChain
from autopart.passes.graph.coarsen import coarsen
from autopart.passes.graph.cuts import Ints, forced_bounds, module_span
from autopart.passes.ops.cost_model import FIELDS
from autopart.passes.ops.weight_parts import summed_bytes
from autopart.passes.program.named import FAMILY, SEARCHED, STASHED
from autopart.passes.program.orders import ONE
from autopart.passes.program.schedules import find
from autopart.passes.simulation.stage_costs import Estimator
from autopart.passes.tokens.recipe import TokenAxis

Bools = npt.NDArray[np.bool_]
ORDERS = ("zb-h1", "zb-h2", "interleaved", "zb-v", SEARCHED)
"""Schedules with split backwards or several stages a rank, which are tried on plans that are found with the family."""
PER_RANK = (2, 4, 8)
"""Numbers of stages a rank that are tried."""
Watch = Callable[[str, int, int], None]
"""A callback for progress: (what is being done, best step so far in ns or 0, lower bound in ns or 0)."""


def is_other(schedule: str) -> bool:
    """Return whether a schedule is tried on the plans of 1F1B's family: one of `ORDERS`, or of a user for several
    stages a rank."""
    return schedule in ORDERS or (schedule != "auto" and find(schedule).placement != ONE)


@dataclass(frozen=True)
class PlanRequest:
    """What the user asks for; None and empty mean that the planner chooses.

    micro_rows: the allowed ways to cut the batch, each the rows of its micro-batches.  schedule: "auto" or a name.
    stages: of the whole pipeline.  stages_per_rank: of each rank, or "auto".  orders: whether "auto" may leave 1F1B's
    family, for split backwards and several stages a rank.
    cuts: module paths at which a stage begins.  together: groups of module paths, each group to stay in one stage.
    pins: module path to its stage.  uncut: values that no stage may pass to another.  replicas: of every stage, or one
    number for each.  policy: how they divide micro-batches.  least_rows: of a replica.  recompute: "auto", "off" or
    "all".  recomputed: groups of captured ops that are recomputed in any case.  zero: 0, 1 (replicas share the
    optimizer state) or "auto" (where that is faster, or memory demands it).  bucket_bytes: gradients that replicas sum
    together.  token_slices: lengths of slices, () for whole sequences, or "auto".  token_axis: how values depend on
    tokens.  token_step: what lengths that are searched are multiples of.  state_factor: bytes of optimizer state per
    byte of trainable parameter.  prove_seconds: time to find a certificate (`certificate`) of the plan, if its largest
    micro-batch has prove_rows rows (None: any number).  rival_ns: step of a plan of another request, 0 for none: what
    cannot be faster, or is not nearly, is not searched.  shards: ranks of each device of the cluster, where these are
    groups that compute together: what people read counts ranks.  only_slices: plans of whole sequences are of no
    interest: the search ends where slices save nothing, and alternatives are left out.
    """

    micro_rows: tuple[tuple[int, ...], ...]
    stages: int | None = None
    schedule: str = "auto"
    stages_per_rank: int | str = "auto"
    orders: bool = True
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
    token_step: int = 1
    state_factor: float = 2.0
    prove_seconds: float = 0.0
    prove_rows: int | None = None
    rival_ns: int = 0
    shards: int = 1
    only_slices: bool = False

    def normalized(self) -> PlanRequest:
        """Fill in what follows from the rest.

        Cuts imply the number of stages: one for each of `replicas`, else one more than cuts.  A fixed number of stages
        implies those of a rank: 1, or where the schedule needs several, the least of `PER_RANK` that divides it.
        """
        stages, per_rank = self.stages, self.stages_per_rank
        if stages is None and self.cuts:
            stages = len(self.replicas) if isinstance(self.replicas, tuple) else len(self.cuts) + 1
        if per_rank == "auto" and (stages or self.pins or isinstance(self.replicas, tuple)):
            several = self.schedule != "auto" and find(self.schedule).placement != ONE
            per_rank = next((v for v in PER_RANK if (stages or 0) % v == 0), PER_RANK[0]) if several else 1
        return replace(self, stages=stages, stages_per_rank=per_rank)

    @property
    def schedules(self) -> tuple[str, ...]:
        """The schedules that the search compares first; `orders` tries the others on what it finds.

        An asynchronous one gives other gradients, so "auto" never chooses it.
        """
        if self.schedule == "auto" or is_other(self.schedule):
            return FAMILY if self.schedule == "auto" else FAMILY[:1]
        return (self.schedule,)

    @property
    def is_free(self) -> bool:
        """Whether plans of 1F1B's family are allowed together with other orders."""
        return self.schedule == "auto" and self.stages_per_rank in ("auto", 1)

    @property
    def numbers_per_rank(self) -> tuple[int, ...]:
        """The numbers of stages a rank that are allowed."""
        return (1, *PER_RANK) if isinstance(self.stages_per_rank, str) else (self.stages_per_rank,)

    def with_one_per_rank(self) -> PlanRequest:
        """Return the request for the plans that the other orders are tried on: one stage a rank, cut anywhere."""
        per_rank = self.stages_per_rank
        if not isinstance(per_rank, int) or per_rank == 1:
            return self
        stages = None if self.stages is None else self.stages // per_rank
        return replace(self, stages=stages, stages_per_rank=1, schedule=FAMILY[0], cuts=(), pins={})

    @property
    def fixed_slices(self) -> tuple[int, ...]:
        """The requested lengths of slices."""
        return self.token_slices if isinstance(self.token_slices, tuple) else ()

    @property
    def may_recompute(self) -> bool:
        """Whether the planner may recompute blocks to save memory."""
        return self.recompute != "off"

    @property
    def may_shard(self) -> bool:
        """Whether replicas may share the optimizer state; not if it steps while micro-batches are in flight."""
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
        """The number of pipelines side by side that gives every stage the requested replicas."""
        return math.gcd(*self.replicas) if isinstance(self.replicas, tuple) else self.replicas or 1

    def most_replicas(self, micro_rows: Sequence[int]) -> int:
        """Return the most replicas of a stage that all have work, and at least `least_rows` rows each."""
        if self.policy == "turn":  # without a flush, replicas also take whole batches in turn
            return sys.maxsize if self.schedule == STASHED else len(micro_rows)
        return max(micro_rows) if self.least_rows == 1 else max(1, min(micro_rows) // self.least_rows)

    def replicas_of(self, stages: int) -> tuple[int, ...] | None:
        """Return the requested replicas of each stage, or None."""
        if self.replicas is None:
            return None
        return (self.replicas,) * stages if isinstance(self.replicas, int) else self.replicas

    def keep_together(self) -> tuple[tuple[str, ...], ...]:
        """Return the groups of module paths that must stay in one stage: those of `together`, then each pin.

        Their first and last ops must be ends of blocks.
        """
        return (*self.together, *((path,) for path in self.pins))


@dataclass(frozen=True)
class SearchSpace:
    """A chain of blocks to cut, its costs on a cluster, and the request.

    costs: estimates over the blocks.  fine: the graph that the blocks were made of.  forced: boundaries that must be
    cuts.  recomputed, grouped: results of `recomputation`, each found once.  finer: spaces of more blocks, by number.
    """

    chain: BlockChain
    costs: Estimator
    request: PlanRequest
    fine: Graph
    forced: tuple[int, ...]
    recomputed: dict[Hashable, Stage] = field(default_factory=dict, init=False, compare=False)
    grouped: dict[Hashable, dict[int, list[tuple[int, int, list[range]]]]] = field(
        default_factory=dict, init=False, compare=False
    )
    finer: dict[int, SearchSpace] = field(default_factory=dict, init=False, compare=False)

    def over(self, blocks: Graph) -> SearchSpace:
        """Return the space of other blocks of the same graph."""
        chain = BlockChain(blocks, self.chain.captured, self.chain.cost_model)
        forced = forced_bounds(blocks, self.fine, self.request.cuts)
        return replace(self, chain=chain, costs=self.costs.over(chain), forced=forced)

    def with_one_per_rank(self) -> SearchSpace:
        """Return the space of the plans that other orders are tried on: one stage a rank, cut wherever that is best."""
        request = self.request.with_one_per_rank()
        return self if request is self.request else replace(self, request=request, forced=())

    @cached_property
    def is_chain(self) -> bool:
        """Whether the chain is the only order of the blocks: each reads what the one before it writes."""
        return all(set(a.writes) & set(b.reads) for a, b in pairwise(self.chain.blocks.ops))

    @cached_property
    def learning(self) -> frozenset[str]:
        """The blocks that have a backward: those with such an op, even if nobody reads what it writes."""
        ops = self.fine.learning_ops()
        return frozenset(
            block.name for block in self.chain.blocks.ops if not ops.isdisjoint(block.parts or (block.name,))
        )

    @cached_property
    def may_learn(self) -> Bools:
        """[a, b]: whether a stage [a, b) has a backward."""
        learns = [op.name in self.learning for op in self.chain.blocks.ops]
        sums = np.concatenate([[0], np.cumsum(learns)])
        return np.asarray(sums[None, :] > sums[:, None])

    @cached_property
    def summed_per_trained(self) -> float:
        """The bytes of summed gradients per byte of trainable parameter, over the whole model."""
        trained = [param for param in self.chain.blocks.params if param.trainable]
        whole = sum(param.size_bytes for param in trained)
        return sum(map(summed_bytes, trained)) / whole if whole else 0.0

    @cached_property
    def may_be_tied(self) -> bool:
        """Whether two blocks use one parameter, so that it may be tied across stages."""
        users = Counter(name for op in self.chain.blocks.ops for name in set(op.params))
        return any(count > 1 for count in users.values())

    @cached_property
    def asked(self) -> dict[str, int]:
        """The requested group of recomputation, by its number, of each block that has most of its own ops in one.

        Clones come before a block's own ops, and follow them wherever they go.
        """
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
        """The requested group of recomputation of every block, in order; -1 without one."""
        return np.array([self.asked.get(block.name, -1) for block in self.chain.blocks.ops], dtype=np.int64)

    def asked_of(self, blocks: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """Return the requested groups of recomputation, limited to a stage of these blocks."""
        groups: dict[int, list[str]] = {}
        for name in blocks:
            if name in self.asked:
                groups.setdefault(self.asked[name], []).append(name)
        return tuple(map(tuple, groups.values()))

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """[first block, block after the last) of each group that must stay in one stage, then of each pin."""
        return [block_span(self.chain.blocks, self.fine, paths) for paths in self.request.keep_together()]

    @cached_property
    def _uncut(self) -> list[tuple[int, int]]:
        """[first block, block after the last) of the writer and the readers of each value that must not be sent."""
        wanted = frozenset(self.request.uncut)
        ops = self.chain.blocks.ops if wanted else ()
        places = {name: [i] for i, op in enumerate(ops) for name in wanted.intersection(op.writes)}
        for i, op in enumerate(ops):
            for name in wanted.intersection(op.reads):
                places[name].append(i)
        return [(min(found), max(found) + 1) for found in places.values()]

    @cached_property
    def legal(self) -> Bools:
        """[a, b]: whether [a, b) may be a stage: not empty, no forced cut inside, no cut through what stays whole."""
        n = self.chain.n
        a, b = np.arange(n + 1)[:, None], np.arange(n + 1)[None, :]
        legal = a < b
        for cut in self.forced:
            legal &= ~((a < cut) & (cut < b))
        for first, end in (*self.spans, *self._uncut):
            for boundary in (a, b):
                legal &= ~((first < boundary) & (boundary < end))
        return np.asarray(legal)

    @cached_property
    def _legal_by_home(self) -> dict[int, Bools]:
        """`legal` by the number of a stage that something is pinned to, and for all others at -1."""
        n = self.chain.n
        a, b = np.arange(n + 1)[:, None], np.arange(n + 1)[None, :]
        pinned = list(zip(self.spans[len(self.request.together) :], self.request.pins.values(), strict=True))
        found = {}
        for stage in {-1, *self.request.pins.values()}:
            found[stage] = self.legal
            for (first, end), home in pinned:
                holds_it = (a <= first) & (end <= b)
                holds_none_of_it = (b <= first) | (end <= a)
                found[stage] = found[stage] & (holds_it if home == stage else holds_none_of_it)
        return found

    def legal_at(self, stage: int) -> Bools:
        """Return `legal` for this stage: it holds everything that is pinned to it and nothing pinned elsewhere."""
        return self._legal_by_home.get(stage, self._legal_by_home[-1])

    def allows(self, bounds: tuple[int, ...]) -> bool:
        """Return whether the request allows stages with these bounds."""
        ranges = list(pairwise(bounds))
        return all(0 <= a < b for a, b in ranges) and all(self.legal_at(s)[a, b] for s, (a, b) in enumerate(ranges))


def blocks_of(fine: Graph, request: PlanRequest, most: int) -> Graph:
    """Return the graph of about this many blocks, which end where the modules end that the request keeps together."""
    ends = {place for paths in request.keep_together() for place in module_span(fine, paths)} - {len(fine.ops)}
    return coarsen(fine, blocks=most, cuts=request.cuts, also=tuple(sorted(ends)))


def block_span(blocks: Graph, fine: Graph, paths: tuple[str, ...]) -> tuple[int, int]:
    """Return [first block, block after the last) that hold ops of these modules.  fine: what blocks are made of."""
    low, high = module_span(fine, paths)
    wanted = {op.name for op in fine.ops[low:high] if any(f"{op.module}.".startswith(f"{path}.") for path in paths)}
    places = [i for i, block in enumerate(blocks.ops) if not wanted.isdisjoint(block.parts or (block.name,))]
    if not places:
        raise UsageError(f"no block holds {', '.join(paths)}")
    return min(places), max(places) + 1


# ---- relaxations ---------------------------------------------------------------------------------------------------


def gradient_edges(space: SearchSpace, rows: int | None = None) -> Ints:
    """Return a matrix that is 1 at [a, b] where block b reads, with a gradient, what the range [a, b) writes, else 0.

    The stage that begins with b then waits for the one that is [a, b), forward and backward.  rows: count only values
    that have bytes at this number of rows, since nothing else is sent.
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


def fastest_sums(space: SearchSpace, rows: int) -> Ints:
    """Return by i the nanoseconds of the first i blocks at this number of rows, each on its fastest device type."""
    return np.concatenate([[0], np.cumsum(fastest_times(space, rows))]).astype(np.int64)


def fastest_times(space: SearchSpace, rows: int, *, inputs_alone: bool = False) -> Ints:
    """Return the nanoseconds of each block, both ways, on its fastest device type.

    rows: of a micro-batch.  inputs_alone: without the part of the backward that makes gradients of weights.
    """
    costs = block_costs(space, rows)
    times = costs[:, 0] + costs[:, 1] - (costs[:, FIELDS.index("weight_ns")] if inputs_alone else 0)
    return np.asarray(times.min(axis=0))


def block_costs(space: SearchSpace, rows: int) -> Ints:
    """Return what each block costs on each type of device, as (types, `FIELDS`, blocks).  rows: of a micro-batch."""
    kinds = range(len(space.costs.device_types))
    return np.stack([space.chain.range_costs(Size(rows), kind).blocks for kind in kinds])

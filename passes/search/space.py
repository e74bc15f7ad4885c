"""What the planner may choose from: what is asked for, and the chain of blocks and the cluster it is about."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from autopart.ir.errors import UsageError
from autopart.ir.graph import Graph
from autopart.ir.program import BUCKET_BYTES
from autopart.ir.shares import Policy
from autopart.passes.graph.chain import BlockChain
from autopart.passes.graph.cuts import Ints, module_span
from autopart.passes.program.schedules import AUTOMATIC, find
from autopart.passes.simulation.stage_costs import CostContext, LoadMemo, sent_share, summed_bytes
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
    or "auto" (where memory does not suffice otherwise).  bucket_bytes, compress: of sums of gradients over replicas.
    token_slices: lengths of slices, () for whole sequences, "auto" where the planner chooses;
    token_axis: tells what slices take.  state_factor: bytes of optimizer state per byte of trainable parameter.
    prove_seconds: time to find a certificate (`certificate`) of the plan, when its
    largest micro-batch has prove_rows rows (None: whatever it has).
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
    compress: Literal["bf16"] | None = None
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

    @property
    def sent_per_trained(self) -> float:
        """Bytes of gradients that one turn of their sum carries, by byte of trainable parameter."""
        return self.summed_per_trained * sent_share(self.request.compress)

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

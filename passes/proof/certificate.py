"""What CP-SAT proves about the plan that was chosen: its blocks on its stages, in no order, take less than so long.

The stages keep their number, their devices, their replicas and the micro-batches; which block stands on which stage is
free, as long as nothing flows back: all orders of the DAG, not only the one that the partition cut (`exact.certify`).

Assumed, and left out, so that what is proved stays below every such plan: times and saved bytes are those of captured
ops at a replica's share of the rows, a clone is paid once; no messages, no sums of gradients, no optimizer; a parameter
that several blocks use needs no memory, nor do activations where they may be computed again; of the schedules that the
request allows the one that holds least.  Not for asynchronous schedules, whose steps overlap.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from autopart.ir.cluster import Cluster
from autopart.ir.graph import Graph
from autopart.ir.plan import in_flight
from autopart.passes.proof.placement import PipelineModel, critical_path, relaxation_bound_ns
from autopart.passes.search.evaluation import Evaluation
from autopart.passes.search.space import PlanRequest, SearchSpace

SEED = 0


@dataclass(frozen=True)
class Certificate:
    """bound_ns: no placement of so many blocks on so many stages takes less for a step.  proved: it cannot be raised
    by looking longer.  seconds: what it took."""

    bound_ns: int
    proved: bool
    blocks: int
    stages: int
    seconds: float = field(compare=False)

    def note(self, step_ns: int) -> str:
        """For the reader of a plan whose step takes step_ns."""
        gap = max(0.0, 1 - self.bound_ns / step_ns) if step_ns else 0.0
        blocks = f"{self.blocks} blocks" if self.blocks > 1 else "block"
        stages = f"these {self.stages} stages, in any order," if self.stages > 1 else "this stage"
        late = "" if self.proved else ", not searched to the end"
        least = f"takes less than {_ms(self.bound_ns)} (gap {gap:.1%}{late})"
        return f"CP-SAT: no placement of the {blocks} on {stages} {least}"


def _ms(amount_ns: int) -> str:
    return f"{amount_ns / 1e6:.3f} ms" if amount_ns >= 1000 else f"{amount_ns} ns"


def certified(verdict: Evaluation, seconds: float) -> Certificate:
    """What is proved within so many seconds, the loading of the solver included.

    Before: the verdict fits and its schedule is synchronous.  The same every time, unless the clock stops the search.
    Without any time it is the bound of the relaxation, and the solver is not loaded.
    """
    started = time.monotonic()
    line = positions(verdict)
    n, stages = len(line.static_bytes), len(line.times)
    if seconds <= 0:
        return Certificate(relaxation_bound_ns(line, critical_path(line)), False, n, stages, time.monotonic() - started)
    from autopart.passes.proof.exact import Limits, certify  # it takes half a second, and few plans need it

    place = {name: s for s, stage in enumerate(verdict.decision.stages) for name in stage.ops}
    hint = [place[block.name] for block in verdict.space.line.blocks.ops]
    left = max(0.0, seconds - (time.monotonic() - started))
    found = certify(line, hint=hint, limits=Limits(left, workers=1, seed=SEED)).optimality
    return Certificate(found.lower_bound, found.proved, n, stages, time.monotonic() - started)


def settles(request: PlanRequest, cluster: Cluster) -> bool:
    """Whether a certificate bounds every plan of the request: only the placement of the blocks is left open."""
    fixed = request.stages is not None and len(request.micro_rows) == 1
    return fixed and len(set(cluster.devices)) == 1 and (not request.may_replicate or request.replicas is not None)


def positions(verdict: Evaluation) -> PipelineModel:
    """The verdict's stages as positions, its blocks as items.  O(stages * ops)."""
    space, plan = verdict.space, verdict.decision
    setting, request, blocks = space.setting, space.request, space.line.blocks
    micros, count = len(plan.micro_rows), len(plan.stages)
    times, live_bytes = [], []
    for stage in plan.stages:
        rows = -(-max(plan.micro_rows) // len(stage.ranks))
        kinds = sorted({setting.kinds.index(setting.cluster.devices[rank]) for rank in stage.ranks})
        costs = [_costs(space, rows, kind) for kind in kinds]
        times.append(max((own for own, _ in costs), key=sum))  # of unlike replicas one kind, all of it
        live_bytes.append((0,) * len(blocks.ops) if request.may_recompute else costs[0][1])
    edges = _edges(blocks)
    return PipelineModel(
        times=tuple(times),
        edges=tuple(edges),
        micros=micros,
        static_bytes=_static(blocks, setting.state_factor),
        live_bytes=tuple(live_bytes),
        live=tuple(min(in_flight(name, s, count, micros) for name in request.schedules) for s in range(count)),
        memory_bytes=tuple(setting.cluster.least_memory_bytes(stage.ranks) for stage in plan.stages),
        tail_ns=(0,) * count,
        one_way=tuple(edge for edge, grad in edges.items() if not grad),
    )


def _costs(space: SearchSpace, rows: int, kind: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(forward and backward, saved bytes) of each block; a captured op counts in the first block that has it."""
    owner: dict[str, int] = {}
    for i, block in enumerate(space.line.blocks.ops):
        for part in block.parts or (block.name,):
            owner.setdefault(part, i)
    times, saved = [0] * space.line.n, [0] * space.line.n
    for op in space.setting.costs_at(rows, kind).ops:
        times[owner[op.name]] += op.cost.total_ns
        saved[owner[op.name]] += op.cost.saved_bytes
    return tuple(times), tuple(saved)


def _edges(blocks: Graph) -> dict[tuple[int, int], bool]:
    """(writer, reader) of what flows between blocks; whether a gradient comes back."""
    writer = {w: i for i, op in enumerate(blocks.ops) for w in op.writes}
    grad = {v.name for v in blocks.values if v.grad}
    edges: dict[tuple[int, int], bool] = {}
    for i, op in enumerate(blocks.ops):
        for read in op.reads:
            source = writer.get(read, i)
            if source != i:
                edges[source, i] = edges.get((source, i), False) or read in grad
    return edges


def _static(blocks: Graph, state_factor: float) -> tuple[int, ...]:
    """Weights, gradients and optimizer state of the parameters that one block alone uses."""
    users = Counter(name for op in blocks.ops for name in set(op.params))
    need = {
        p.name: p.size_bytes + p.trainable * (p.size_bytes + int(p.size_bytes * state_factor)) for p in blocks.params
    }
    return tuple(sum(need[name] for name in set(op.params) if users[name] == 1) for op in blocks.ops)

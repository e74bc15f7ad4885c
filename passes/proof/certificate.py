"""What CP-SAT proves about the plan that was chosen: how long its blocks on its stages take at least, in any order.

The stages keep their number, their devices, their replicas and the micro-batches; which block stands on which stage is
free, as long as nothing flows back: all orders of the DAG, not only the one that the partition cut (`exact.certify`).

Assumed, and left out, so that what is proved stays below every such plan: times and saved bytes are those of captured
ops at a replica's share of the rows; a clone is counted once; no messages, no sums of gradients, no optimizer; a
parameter that several blocks use needs no memory, nor do activations that may be recomputed; the schedule is the one of
those allowed that holds the fewest activations.  Not for asynchronous schedules, whose steps overlap.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from autopart.ir.cluster import Cluster
from autopart.ir.graph import Graph
from autopart.ir.size import Size
from autopart.passes.program.schedules import Shape, find, in_flight
from autopart.passes.proof.pipeline_model import PipelineModel, critical_path, relaxation_bound_ns
from autopart.passes.search.evaluation import Evaluation
from autopart.passes.search.space import PlanRequest, SearchSpace

SEED = 0


@dataclass(frozen=True)
class Certificate:
    """bound_ns: no placement of so many blocks on so many stages takes less for a step.  proved: a longer search would
    not raise it.  seconds: what the search took."""

    bound_ns: int
    proved: bool
    blocks: int
    stages: int
    seconds: float = field(compare=False)

    def note(self, step_ns: int) -> str:
        """In words, for a plan whose step takes step_ns."""
        gap = max(0.0, 1 - self.bound_ns / step_ns) if step_ns else 0.0
        blocks = f"{self.blocks} blocks" if self.blocks > 1 else "block"
        stages = f"these {self.stages} stages, in any order," if self.stages > 1 else "this stage"
        late = "" if self.proved else ", not searched to the end"
        least = f"takes less than {_ms(self.bound_ns)} (gap {gap:.1%}{late})"
        return f"CP-SAT: no placement of the {blocks} on {stages} {least}"


def _ms(amount_ns: int) -> str:
    return f"{amount_ns / 1e6:.3f} ms" if amount_ns >= 1000 else f"{amount_ns} ns"


def certified(evaluation: Evaluation, seconds: float) -> Certificate:
    """What is proved within so many seconds, the loading of the solver included.

    Before: the evaluated plan fits and its schedule is synchronous.  The same every time, unless the clock stops the
    search.  Without any time it is the bound of the relaxation, and the solver is not loaded.
    """
    started = time.monotonic()
    model = pipeline_model(evaluation)
    blocks, stages = len(model.static_bytes), len(model.times)
    if seconds <= 0:
        bound_ns = relaxation_bound_ns(model, critical_path(model))
        return Certificate(bound_ns, False, blocks, stages, time.monotonic() - started)
    from autopart.passes.proof.exact import Limits, certify  # it takes half a second, and few plans need it

    stage_of = {name: s for s, stage in enumerate(evaluation.decision.stages) for name in stage.ops}
    hint = [stage_of[block.name] for block in evaluation.space.chain.blocks.ops]
    left = max(0.0, seconds - (time.monotonic() - started))
    found = certify(model, hint=hint, limits=Limits(left, workers=1, seed=SEED)).optimality
    return Certificate(found.lower_bound, found.proved, blocks, stages, time.monotonic() - started)


def settles(request: PlanRequest, cluster: Cluster) -> bool:
    """Whether a certificate bounds every plan of the request: only the placement of the blocks is left open."""
    fixed = request.stages is not None and len(request.micro_rows) == 1
    return fixed and len(set(cluster.devices)) == 1 and (not request.may_replicate or request.replicas is not None)


def pipeline_model(evaluation: Evaluation) -> PipelineModel:
    """The stages of an evaluated plan as positions, its blocks as items.  O(stages * ops)."""
    space, plan = evaluation.space, evaluation.decision
    costs, request, blocks = space.costs, space.request, space.chain.blocks
    micros, count = len(plan.micro_rows), len(plan.stages)
    times, live_bytes = [], []
    for stage in plan.stages:
        places = enumerate(costs.device_types.index(costs.cluster.devices[rank]) for rank in stage.ranks)
        parts = {(kind, stage.division.part(max(plan.micro_rows), replica)) for replica, kind in places}
        of_types = [_block_costs(space, rows, device_type) for device_type, rows in sorted(parts)]
        times.append(max((times_ns for times_ns, _ in of_types), key=sum))  # of unlike replicas, the slowest's alone
        live_bytes.append((0,) * len(blocks.ops) if request.may_recompute or request.recomputed else of_types[0][1])
    edges = _edges(blocks)
    owners = max(len(stage.ranks) for stage in plan.stages) if request.may_shard else 1
    return PipelineModel(
        times=tuple(times),
        edges=tuple(edges),
        micros=micros,
        static_bytes=_static_bytes(blocks, costs.state_factor / owners),
        live_bytes=tuple(live_bytes),
        live=tuple(
            min(in_flight(find(name), s, Shape(count, micros)) for name in request.schedules) for s in range(count)
        ),
        memory_bytes=tuple(costs.cluster.least_memory_bytes(stage.ranks) for stage in plan.stages),
        tail_ns=(0,) * count,
        forward_only=tuple(edge for edge, has_gradient in edges.items() if not has_gradient),
    )


def _block_costs(space: SearchSpace, rows: int, device_type: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(forward and backward, saved bytes) of each block; a captured op counts in the first block that has it."""
    owner: dict[str, int] = {}
    for i, block in enumerate(space.chain.blocks.ops):
        for part in block.parts or (block.name,):
            owner.setdefault(part, i)
    times = [0] * space.chain.n
    saved = [0] * space.chain.n
    for op in space.chain.cost_model.graph(Size(rows), device_type).ops:
        times[owner[op.name]] += op.cost.total_ns
        saved[owner[op.name]] += op.cost.saved_bytes
    return tuple(times), tuple(saved)


def _edges(blocks: Graph) -> dict[tuple[int, int], bool]:
    """(writer, reader) of what flows between blocks; whether a gradient comes back."""
    writer = {w: i for i, op in enumerate(blocks.ops) for w in op.writes}
    with_gradient = {v.name for v in blocks.values if v.grad}
    edges: dict[tuple[int, int], bool] = {}
    for i, op in enumerate(blocks.ops):
        for read in op.reads:
            source = writer.get(read, i)
            if source != i:
                edges[source, i] = edges.get((source, i), False) or read in with_gradient
    return edges


def _static_bytes(blocks: Graph, state_factor: float) -> tuple[int, ...]:
    """Weights, gradients and optimizer state of the parameters that one block alone uses."""
    users = Counter(name for op in blocks.ops for name in set(op.params))
    need = {}
    for param in blocks.params:
        training_bytes = param.size_bytes + int(param.size_bytes * state_factor) if param.trainable else 0
        need[param.name] = param.size_bytes + training_bytes
    return tuple(sum(need[name] for name in set(op.params) if users[name] == 1) for op in blocks.ops)

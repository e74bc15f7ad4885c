"""The certificate of a plan: a lower bound on any placement of its blocks on its stages, proved by CP-SAT.

The stages keep their number, their devices, their replicas and the micro-batches; blocks may stand on any stage as long
as nothing flows back: all orders of the DAG, not only the one that the partition cut (`exact.certify`).  Not for
asynchronous schedules, whose steps overlap.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from autopart.ir.cluster import Cluster
from autopart.passes.proof.pipeline_model import critical_path, model_of, relaxation_bound_ns
from autopart.passes.search.evaluation import Evaluation
from autopart.passes.search.space import PlanRequest


@dataclass(frozen=True)
class Certificate:
    """A lower bound on the step of any placement of these blocks on these stages.

    proved: whether a longer search would not raise it.
    """

    bound_ns: int
    proved: bool
    blocks: int
    stages: int

    def note(self, step_ns: int) -> str:
        """Return the note for a plan whose step takes step_ns."""
        gap = max(0.0, 1 - self.bound_ns / step_ns) if step_ns else 0.0
        blocks = f"{self.blocks} blocks" if self.blocks > 1 else "block"
        stages = f"these {self.stages} stages, in any order," if self.stages > 1 else "this stage"
        late = "" if self.proved else ", not searched to the end"
        bound = f"{self.bound_ns / 1e6:.3f} ms" if self.bound_ns >= 1000 else f"{self.bound_ns} ns"
        return f"CP-SAT: no placement of the {blocks} on {stages} takes less than {bound} (gap {gap:.1%}{late})"


def certified(evaluation: Evaluation, seconds: float) -> Certificate:
    """Return the certificate that is found within this time, the loading of the solver included.

    Before: the evaluated plan fits and its schedule is synchronous.  The same every time, unless the clock stops the
    search.  Without any time it is the bound of the relaxation, and the solver is not loaded.
    """
    started = time.monotonic()
    model = model_of(evaluation)
    blocks, stages = len(model.static_bytes), len(model.times)
    if seconds <= 0:
        bound_ns = relaxation_bound_ns(model, critical_path(model))
        return Certificate(bound_ns, False, blocks, stages)
    from autopart.passes.proof.exact import certify  # loads the solver for half a second, and few plans need it

    stage_of = {name: s for s, stage in enumerate(evaluation.decision.stages) for name in stage.ops}
    hint = [stage_of[block.name] for block in evaluation.space.chain.blocks.ops]
    left = max(0.0, seconds - (time.monotonic() - started))
    _, found = certify(model, hint, left)
    return Certificate(found.lower_bound, found.proved, blocks, stages)


def settles(request: PlanRequest, cluster: Cluster) -> bool:
    """Return whether a certificate bounds every plan of the request, which leaves only the placement of blocks open."""
    fixed = request.stages is not None and len(request.micro_rows) == 1
    return fixed and len(set(cluster.devices)) == 1 and (not request.may_replicate or request.replicas is not None)

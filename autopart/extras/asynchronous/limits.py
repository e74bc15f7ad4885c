"""The limits of asynchronous training: what has no meaning in it, by name, with what to use instead."""

from __future__ import annotations

from collections.abc import Mapping

from autopart.ir.errors import RefusedError, UsageError
from autopart.ir.graph import Graph
from autopart.ir.plan import Plan
from autopart.options import Options
from autopart.passes.program.named import BUILT_IN
from autopart.passes.program.routing import tied
from autopart.passes.program.schedules import find, streams
from autopart.passes.program.stream import require_two_versions

STREAMED = tuple(schedule.name for schedule in BUILT_IN if streams(schedule))
"""The schedules whose plans are trained by `pipe.train`."""


def require_stream(plan: Plan, graph: Graph, options: Options, *, blocking: bool) -> None:
    """Raise UsageError for a plan with another schedule, and RefusedError for what asynchronous training cannot do.

    blocking: whether the transport blocks where messages are posted (NCCL).
    """
    if not streams(find(plan.schedule)):
        raise UsageError(
            f"pipe.train(batches) needs an asynchronous schedule, and the plan has {plan.schedule}",
            why="it steps the optimizer of every stage while other batches are in flight",
            fix=f"compile with schedule={' or '.join(map(repr, STREAMED))}; with {plan.schedule} call pipe.step(batch) "
            "and optimizer.step()",
        )
    require_two_versions(plan.decision)
    decision, ranks = plan.decision, [rank for stage in plan.stages for rank in stage.ranks]
    half = [p.name for p in graph.params if p.trainable and p.dtype in ("float16", "bfloat16")]
    shared = [name for name, _ in tied(decision, graph)]
    refused: Mapping[str, tuple[object, str]] = {
        f"{shared[0] if shared else ''}, which several stages use": (
            shared, "keep its uses on one stage (cuts=), or use a copy for each"),
        f"{half[0] if half else ''} in half precision": (half, 'keep parameters in fp32 and use precision="bf16"'),
        "fp16 and its loss scale": (plan.provenance.precision == "fp16", 'use precision="bf16"'),
        "non_finite=": (options.non_finite != "auto", "leave it out, and look at the losses"),
        "statistics that replicas share (sync_batchnorm)": (options.sync_batchnorm, "leave sync_batchnorm out"),
        "slices of sequences": (decision.token_slices, "leave token_slices out"),
        "an optimizer state that replicas share": (decision.zero, "use zero=0"),
        "several stages on a rank": (len(set(ranks)) < len(ranks), "use a plan with one stage for each rank"),
        "messages over NCCL": (blocking, 'compile with transport="gloo"'),
    }  # fmt: skip
    for what, (found, instead) in refused.items():
        if found:
            raise RefusedError(
                f"schedule {plan.schedule} cannot train with {what}",
                why="each stage updates its weights as soon as a batch has come back to it, while others are in flight",
                fix=f"{instead}; or use a synchronous schedule, such as schedule='1f1b'",
            )

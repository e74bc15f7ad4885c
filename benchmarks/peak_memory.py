"""Is the peak of memory that a plan predicts the one that a step has, with and without recomputation?

One process, one stage, on a CPU: the profiler of torch tells each allocation and release of a step, inside kernels too,
so the figure does not depend on what else the machine does.  Measured: parameters, buffers and batch, and the most that
was allocated on top of them in a second step.  Predicted: `peak_bytes` of the plan, for SGD, which has no state; where
the second step accumulates, one more gradient of every parameter, as docs/planner.md says.

    python benchmarks/peak_memory.py          2 to 5 minutes; writes results/peak_memory.json
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from common import write
from torch.profiler import ProfilerActivity, profile
from trained import MODELS

import autopart

CASES = (
    *(
        (name, micros, recompute, False)
        for name, micros in (("gpt2", 4), ("llama", 8), ("bert", 4))
        for recompute in ("off", "all", (f"{MODELS[name].layers}.*",))
    ),
    ("gpt2", 4, "off", True),
)
"""(model, micro-batches, recompute, whether the step adds to gradients of one before)."""


def measured(name: str, micros: int, recompute: Any, accumulates: bool) -> dict[str, Any]:
    """A plan, what it predicts and what a step of it takes, in bytes."""
    batch = MODELS[name].batch()
    pipe = autopart.compile(
        MODELS[name].model(), "cpu:1", sample=batch, micro_batches=micros, recompute=recompute, costs="analytic",
        optimizer="sgd",
    )  # fmt: skip
    (estimate,) = pipe.plan.estimates
    pipe.step(batch)
    gradients = [p.grad for p in pipe.parameters() if p.grad is not None]
    predicted = estimate.peak_bytes + (sum(g.nbytes for g in gradients) if accumulates else 0)
    if not accumulates:
        gradients = []
        for parameter in pipe.parameters():
            parameter.grad = None
    tensors = (*pipe.state_dict().values(), *gradients, *batch.values())
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    peak = sum(held.values()) + allocated(lambda: pipe.step(batch))
    pipe.close()
    row = {
        "plan": f"{name}, {micros} micro-batches, recompute {recompute if isinstance(recompute, str) else 'each layer'}"
        + (", accumulating" if accumulates else ""),
        "measured_bytes": peak, "predicted_bytes": predicted, "error": predicted / peak - 1,
    }  # fmt: skip
    print(f"{row['plan']:60s} {peak / 1e6:8.2f} MB, predicted {predicted / 1e6:8.2f} MB, {row['error']:+.1%}")
    return row


def allocated(run: Any) -> int:
    """The most bytes that were allocated at once while it runs, beyond what was before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    now = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def main() -> None:
    torch.set_num_threads(1)
    rows = [measured(*case) for case in CASES]
    errors = [abs(row["error"]) for row in rows]
    print(f"error: mean {statistics.mean(errors):.1%}, largest {max(errors):.1%}")
    print(write("peak_memory", {"rows": rows, "claims": {"within 10 % for every plan": max(errors) <= 0.1}}))


if __name__ == "__main__":
    main()

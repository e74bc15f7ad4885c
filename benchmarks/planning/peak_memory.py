"""Predicted and measured peak memory of a step, with recomputation, replicas and ZeRO-1.

One or two Gloo ranks, one thread each. torch's profiler reports each allocation and release of a step, also inside
kernels, so the result does not depend on other load of the machine. Measured on each rank: every tensor alive between
two steps, without model tensors of other ranks, plus the most that was allocated on top of them in a step and the
optimizer step after it. Predicted: `peak_bytes` of the rank's stage; for an accumulating step one more gradient of
every parameter, as described in docs/cost_model.md.

    python -m benchmarks.planning.peak_memory                     about 5 minutes; writes results/peak_memory.json
    python -m benchmarks.planning.peak_memory --plans "gpt2, 4"   those whose name begins so; writes nothing
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import autopart
from benchmarks.shared.bench_models import MODELS, adamw
from benchmarks.shared.common import write


@dataclass(frozen=True)
class Case:
    """A plan to measure.

    recompute: "each layer" recomputes each layer as a separate group; accumulates: the step adds to existing gradients;
    adam: AdamW instead of SGD without state; masters: a bf16 model with fp32 master weights; compiled: stages that run
    compiled, planned with what compiled code keeps.
    """

    model: str
    micros: int
    recompute: str = "off"
    accumulates: bool = False
    stages: int = 1
    replicas: int = 1
    zero: int = 0
    adam: bool = False
    masters: bool = False
    compiled: bool = False
    schedule: str = "auto"

    @property
    def options(self) -> dict[str, Any]:
        """Options of compile."""
        again: Any = (f"{MODELS[self.model].layers}.*",) if self.recompute == "each layer" else self.recompute
        return {
            "micro_batches": self.micros, "recompute": again, "stages": self.stages, "replicas": self.replicas,
            "zero": self.zero, "optimizer": "adamw" if self.adam else "sgd", "schedule": self.schedule,
            "costs": "measured" if self.compiled else "analytic",
            "master_weights": self.masters, "backend": "inductor" if self.compiled else "eager",
        }  # fmt: skip

    def __str__(self) -> str:
        parts = [f"{self.model}, {self.micros} micro-batches, recompute {self.recompute}"]
        if self.stages * self.replicas > 1:
            parts.append(f"{self.stages} stages x {self.replicas} replicas")
        parts += [self.schedule] * (self.schedule != "auto")
        parts += ["bf16 with masters"] * self.masters + ["compiled"] * self.compiled
        parts += ["ZeRO-1"] * self.zero + ["AdamW"] * self.adam + ["accumulating"] * self.accumulates
        return ", ".join(parts)


ALONE = (
    *(
        Case(name, micros, recompute)
        for name, micros in (("gpt2", 4), ("llama", 8), ("bert", 4))
        for recompute in ("off", "all", "each layer")
    ),
    Case("gpt2", 4, accumulates=True),
    Case("gpt2", 4, adam=True),
    Case("gpt2", 4, adam=True, masters=True),
    Case("llama", 4, "each layer", adam=True, masters=True),
    *(Case(name, 4, recompute, compiled=True) for name in ("gpt2", "llama") for recompute in ("off", "each layer")),
)
TOGETHER = (
    Case("gpt2", 4, stages=2, adam=True),
    Case("llama", 4, "each layer", stages=2, adam=True),
    *(Case(name, 4, "each layer", stages=2, schedule="zb-h1") for name in ("gpt2", "llama")),
    *(
        Case(name, micros, recompute, replicas=2, zero=zero, adam=True)
        for name, micros, recompute in (
            ("gpt2", 1, "off"), ("gpt2", 4, "each layer"), ("llama", 2, "off"), ("bert", 2, "each layer"),
        )
        for zero in (0, 1)
    ),
    Case("gpt2", 2, replicas=2, adam=True, accumulates=True),
    Case("gpt2", 2, replicas=2, adam=True, masters=True),
    Case("gpt2", 2, replicas=2, zero=1, adam=True, masters=True),
)  # fmt: skip
"""Plans on two ranks."""


def measured(case: Case) -> dict[str, Any]:
    """Return the predicted and the measured peak bytes of this rank."""
    torch.set_num_threads(1)
    batch, model = MODELS[case.model].batch(), MODELS[case.model].model()
    model = model.bfloat16() if case.masters else model
    cluster = f"cpu:{case.stages * case.replicas}"
    with autopart.compile(model, cluster, sample=batch, **case.options) as pipe:
        optimizer = adamw(pipe.parameters()) if case.adam else torch.optim.SGD(pipe.parameters(), lr=1e-4)

        def step() -> None:
            pipe.step(batch)
            optimizer.step()

        step()
        if not case.accumulates:
            optimizer.zero_grad()
        stage = next(iter(pipe.plan.decision.stages_of_rank(pipe.rank)), None)
        assert stage is not None
        held = {id(tensor) for tensor in pipe.session.tensors.held.values()}
        elsewhere = {_place(t) for t in (*model.parameters(), *model.buffers()) if id(t) not in held}
        before = alive_bytes(elsewhere)
        peak = before + allocated(step)
        predicted = pipe.plan.estimates[stage].peak_bytes
        if case.accumulates:
            predicted += sum(
                p.nbytes for p in pipe.session.tensors.driven.values() if isinstance(p, torch.nn.Parameter)
            )
        pipe.close(sync=False)
    return {"plan": str(case), "measured_bytes": peak, "predicted_bytes": predicted, "error": predicted / peak - 1}


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def alive_bytes(without: set[int]) -> int:
    """Return the bytes of all storages of this process except those at the given addresses."""
    gc.collect()
    found: dict[int, int] = {}
    for item in gc.get_objects():
        if (
            type(item) in (torch.Tensor, torch.nn.Parameter)
            and item.device.type == "cpu"
            and item.layout == torch.strided
        ):
            found[_place(item)] = item.untyped_storage().nbytes()
    return sum(size for place, size in found.items() if place not in without)


def allocated(run: Any) -> int:
    """Return the most bytes allocated at once during `run`, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    now = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", default="", help="how their names begin")
    wanted = parser.parse_args().plans
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = []
    for case in filter(lambda case: str(case).startswith(wanted), (*ALONE, *TOGETHER)):
        found = autopart.launch(measured, f"cpu:{case.stages * case.replicas}", case)
        worst = max(found, key=lambda row: abs(row["error"]))
        rows.append({**worst, "rank": found.index(worst)})
        sizes = f"{worst['measured_bytes'] / 1e6:8.2f} MB, predicted {worst['predicted_bytes'] / 1e6:8.2f} MB"
        print(f"{case!s:75s} {sizes}, {worst['error']:+.1%}", flush=True)
    errors = [abs(row["error"]) for row in rows]
    print(f"error: mean {statistics.mean(errors):.1%}, largest {max(errors):.1%}")
    if not wanted:
        print(write("peak_memory", {"rows": rows, "claims": {"within 10 % for every plan": max(errors) <= 0.1}}))


if __name__ == "__main__":
    main()

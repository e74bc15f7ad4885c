"""Predicted and measured time and memory of a step.

Two Gloo ranks, one thread each, each on a core of its own. The cluster is measured first, with what its hosts spend
(`autopart cluster detect`).
Then each plan (model x schedule x cut x micro-batches) is compiled, simulated with measured costs as with
`costs="measured"`, and run. The optimizer is left out of both.

The cores of a virtual machine are equal by name alone: one may run at 0.6 of the other's speed, and another one soon
after. So every rank measures its own costs, all at once as in a step, and the simulator is told that the devices are
unlike; steps are compared with the costs measured just before and after them.

Of each kind of action (F, B, I, W, sends, receives, sums) the simulated and the measured milliseconds of a step are
kept beside each other, for each rank, so that an error can be traced to where the time goes; they are taken from a
further step, since tracing takes time. A receive, and a sum of
tied gradients, contain the wait for the other rank; a sum over replicas begins with the last backward when simulated.
The tiny model's steps consist of what hosts spend: they have a limit of their own, and are in no mean.

Memory: bytes of storage that autograd keeps or the rank received for the backward pass, without parameters, at the
worst moment of a step, compared with the activations in flight of the estimate.

    python -m benchmarks.planning.prediction                 about 25 minutes on 2 cores; writes results/prediction.json
    python -m benchmarks.planning.prediction --rounds 36     three times as many steps and costs, in an hour
    python -m benchmarks.planning.prediction --only "slices|^t5"   matching plans; other recorded results are kept
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

import autopart
from autopart.batch.batch import Batch, flatten
from autopart.cli.host_costs import detect_all
from autopart.costs.sources import measured as measured_costs
from autopart.extras.compiled.compiled_costs import compiled_costs
from autopart.ir.cluster import DEVICE_KINDS
from autopart.ir.graph import Graph, Size
from autopart.ir.plan import Decision, Estimate
from autopart.ir.timeline import Span, Timeline
from autopart.passes.ops.cost_model import CostModel
from autopart.passes.simulation.estimate import stage_estimates, work_of
from autopart.passes.simulation.simulate import simulate
from autopart.passes.simulation.slices import SliceShares, slice_shares
from autopart.passes.simulation.stage_costs import Estimator, counts_for, most_bytes
from autopart.planning.derive.token_axis import asked_slices
from benchmarks.shared.bench_models import MODELS
from benchmarks.shared.common import nothing_kept, recorded, spread, write
from benchmarks.shared.held import held_bytes


@dataclass(frozen=True)
class Case:
    """A plan to measure.

    cut: None for the planner's choice, otherwise the layer at which the second stage begins; replicas: of each stage;
    per_rank: stages of each rank; slices: of each sequence; backend: "eager", or "inductor" for compiled stages.
    """

    model: str
    schedule: str
    micros: int
    cut: int | None = None
    recompute: str = "off"
    replicas: int = 1
    backend: str = "eager"
    per_rank: int = 1
    slices: int | None = None

    @property
    def stages(self) -> int:
        """The number of stages on two ranks."""
        return 2 * self.per_rank // self.replicas

    def __str__(self) -> str:
        where = "planned cut" if self.cut is None else f"cut at layer {self.cut}"
        if self.replicas > 1:
            where = f"{self.replicas} replicas"
        again = ", all recomputed" if self.recompute == "all" else ""
        code = ", compiled" if self.backend == "inductor" else ""
        parts = f", {self.per_rank} stages a rank" if self.per_rank > 1 else ""
        parts += f", {self.slices} slices" if self.slices else ""
        return f"{self.model}, {self.schedule}, {self.micros} micro-batches, {where}{parts}{again}{code}"


CASES = (
    Case("gpt2", "1f1b", 8), Case("gpt2", "gpipe", 4), Case("gpt2", "1f1b", 8, 2), Case("gpt2", "1f1b", 2),
    Case("gpt2, vocabulary 50257", "1f1b", 4), Case("gpt2, vocabulary 50257", "1f1b", 4, 4), Case("llama", "1f1b", 8),
    Case("llama", "1f1b", 4, 7), Case("bert", "gpipe", 8), Case("vit", "1f1b", 4), Case("vit", "gpipe", 4, 2),
    Case("convnext", "1f1b", 4), Case("gpt2", "1f1b", 8, 2, "all"), Case("bert", "gpipe", 8, None, "all"),
    *(Case(name, "1f1b", micros, replicas=2) for name, micros in (
        ("gpt2", 1), ("gpt2", 4), ("gpt2, vocabulary 50257", 2), ("llama", 1), ("llama", 4), ("bert", 2), ("vit", 2),
    )),
    Case("gpt2", "1f1b", 4, None, "all", 2),
    *(
        Case(name, "1f1b", micros, replicas=replicas)
        for name in ("mistral", "mixtral", "t5", "bart", "lstm", "gru", "mamba", "unet", "convnext", "resnet")
        for micros, replicas in ((4, 1), (2, 2))
        if (name, replicas) != ("convnext", 1)
    ),
    Case("t5", "gpipe", 4, None, "all"), Case("resnet", "gpipe", 2),
    Case("gpt2", "interleaved", 4, per_rank=2), Case("mistral", "interleaved", 4, per_rank=2),
    Case("gpt2", "zb-v", 4, per_rank=2), *(Case(name, "zb-h1", 4) for name in ("llama", "t5", "unet")),
    Case("gpt2", "zb-h2", 4), Case("vit", "searched", 4), Case("llama", "1f1b-deep", 4),
    Case("llama", "1f1b", 2, slices=3), Case("gpt2", "gpipe", 1, slices=4),
    *(
        Case(name, "1f1b", micros, replicas=replicas, backend="inductor")
        for name in ("gpt2", "llama", "bert")
        for micros, replicas in ((4, 1), (2, 2))
    ),
    Case("tiny", "1f1b", 4), Case("tiny", "1f1b", 2, replicas=2), Case("tiny", "zb-h1", 4),
)  # fmt: skip


STEPS = 4
"""Steps of a block. Costs are measured before and after each block."""

TINY = "tiny"
MEAN, MOST, MEMORY, OF_TINY, ARCHITECTURES = 0.05, 0.12, 0.03, 0.25, 12
"""What is asked: the mean and the largest error of a step, the mean error of the memory, the largest of a tiny model's
step, and the number of architectures."""

Parts = dict[str, float]
"""Milliseconds of a rank in a step, by kind of action."""


def measure(cluster: autopart.Cluster, rounds: int, only: str) -> list[dict[str, Any]]:
    """Run the cases that match on one rank, on a core that no other rank has."""
    torch.set_num_threads(1)
    stay_on_core(int(os.environ["RANK"]), cluster.world)
    cases, found = [case for case in CASES if re.search(only, str(case))], []
    for number, case in enumerate(cases, 1):
        found.append(measured(case, cluster, rounds))
        if os.environ["RANK"] == "0":
            error = error_of(found[-1]["seconds"], found[-1]["forecasts"])
            print(f"{number} of {len(cases)}: {case}: {error:+.1%}", flush=True)
    return found


def stay_on_core(rank: int, world: int) -> None:
    """Keep this thread, and those that it starts, on one core, where there is one for each rank."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) >= world:
            os.sched_setaffinity(0, {cores[rank]})


def measured(case: Case, cluster: autopart.Cluster, rounds: int) -> dict[str, Any]:
    """Return the measured and the predicted time and memory of a case."""
    pipe, batch = compiled(case, cluster), MODELS[case.model].batch()
    held = held_bytes(pipe, batch)
    seconds: list[list[float]] = []
    parts: list[Parts] = []
    forecasts = [predicted(pipe, batch)]
    for _ in range(-(-rounds // STEPS)):
        timed_step(pipe, batch)
        seconds.append([timed_step(pipe, batch) for _ in range(STEPS)])
        with pipe.traced() as spans:
            timed_step(pipe, batch)
        parts.append(parts_of(spans))
        forecasts.append(predicted(pipe, batch))
    first = min(stage.ranks[0] for stage in pipe.plan.stages if pipe.rank in stage.ranks)  # replicas have one timeline
    simulated = [parts_of([span for span in forecast.spans if span.rank == first]) for forecast in forecasts]
    return {
        "case": case, "seconds": seconds, "forecasts": [forecast.step_ns * 1e-9 for forecast in forecasts],
        "held": held, "estimated": estimated(pipe.plan.decision, pipe.plan.estimates, pipe.rank),
        "parts": {kind: (middle(simulated, kind), middle(parts, kind)) for kind in {**simulated[0], **parts[0]}},
    }  # fmt: skip


def timed_step(pipe: autopart.Pipe, batch: Any) -> float:
    """Return the seconds of a step of the rank that takes longest; the ranks begin together."""
    for parameter in pipe.parameters():
        parameter.grad = None
    dist.barrier()
    began = time.perf_counter()
    pipe.step(batch)
    taken: float = max(row[0] for row in pipe.session.world.gather_numbers([time.perf_counter() - began]))
    return taken


def parts_of(spans: Sequence[Span]) -> Parts:
    """Return the milliseconds of a step's spans by kind of action."""
    found: Parts = {}
    for span in spans:
        found[span.action.kind] = found.get(span.action.kind, 0.0) + span.ns * 1e-6
    return found


def middle(steps: Sequence[Parts], kind: str) -> float:
    """Return the median milliseconds of a kind of action over steps."""
    return round(statistics.median(step.get(kind, 0.0) for step in steps), 2)


def compiled(case: Case, cluster: autopart.Cluster) -> autopart.Pipe:
    model = MODELS[case.model]
    cuts = () if case.cut is None else (f"{model.layers}.{case.cut}",)
    return autopart.compile(
        model.model(), cluster, sample=model.batch(), stages=case.stages, replicas=case.replicas,
        micro_batches=case.micros, schedule=case.schedule, cuts=cuts, recompute=case.recompute, costs="measured",
        optimizer="sgd", backend=case.backend, token_slices=case.slices,
    )  # fmt: skip


@dataclass(frozen=True)
class _Graphs:
    """A cost model for given sizes on given types of devices."""

    by_size: Mapping[tuple[Size, int], Graph]

    def graph(self, size: Size, device_type: int) -> Graph:
        return self.by_size[size, device_type]


def predicted(pipe: autopart.Pipe, batch: Any) -> Timeline:
    """Return the simulated step without the optimizer, from costs that all ranks measure now at the rows
    that they have.
    """
    flat, rows = flatten(batch), max(pipe.plan.micro_rows)
    source = compiled_costs if pipe.session.options.backend == "inductor" else measured_costs
    graphs = {(Size(rows), 0): pipe.session.captures(flat, Size(rows)).graph}  # only shapes are used at whole rows
    for own in sorted({-(-rows // len(stage.ranks)) for stage in pipe.plan.stages}):
        captured = pipe.session.captures(flat, Size(own))
        dist.barrier()  # all ranks measure at once
        with nothing_kept():
            found = source(captured, pipe.cluster.devices[0])
        assert found.source != "analytic"
        whole = CostModel(found.graph, None, pipe.cluster.devices[:1]).graph(Size(own), 0)  # tells what W takes
        every: list[Any] = [None] * pipe.cluster.world
        dist.all_gather_object(every, [op.cost for op in whole.ops])
        for rank, costs in enumerate(every):
            ops = (replace(op, cost=cost) for op, cost in zip(whole.ops, costs, strict=True))
            graphs[Size(own), rank] = replace(whole, ops=tuple(ops))
    decision, links, tied = pipe.plan.decision, pipe.program.edges, pipe.program.tied
    group_ns = DEVICE_KINDS["cpu"].group_ns
    slices = sliced_times(pipe, flat, graphs[Size(rows), 0]) if decision.token_slices else None
    estimator = Estimator(unlike(pipe.cluster), _Graphs(graphs), overlap=True, slices=slices, group_ns=group_ns)
    work = work_of(decision, stage_estimates(decision, links, estimator), links, tied, estimator)
    return simulate(pipe.program, replace(work, optimizer_ns=()))


def sliced_times(pipe: autopart.Pipe, batch: Batch, costed: Graph) -> SliceShares:
    """Return the share of a stage's time that each slice takes.  costed: the graph of whole sequences."""
    recipe = asked_slices(pipe.plan.decision.token_slices, pipe.session.captures, batch, costed.size).recipe
    assert recipe is not None
    return slice_shares(costed, recipe.axis(), pipe.cluster.devices[0], {})


def unlike(cluster: autopart.Cluster) -> autopart.Cluster:
    """Return the cluster with a type of device for each rank."""
    devices = enumerate(cluster.devices)
    return replace(cluster, devices=tuple(replace(device, name=f"rank {rank}") for rank, device in devices))


def estimated(decision: Decision, estimates: Sequence[Estimate], rank: int) -> int:
    """Return the estimate of `held_bytes`: the most that all stages of a rank keep together.

    What waits for W is left out, since autograd has released it by then.
    """
    own = tuple(sorted(decision.stages_of_rank(rank)))
    counts = counts_for(decision) if len(own) > 1 else None
    if counts is None:
        return sum(estimates[s].live * estimates[s].activation_bytes for s in own)
    return most_bytes(counts[own], [estimates[s].activation_bytes for s in own], [0] * len(own))


def error_of(blocks: Sequence[Sequence[float]], forecasts: Sequence[float]) -> float:
    """Return the relative error of predictions: the median over blocks of steps, each compared with the predictions
    just before and after it, so that a machine that gets slower in between counts for both.
    """
    pairs = zip(blocks, forecasts, forecasts[1:], strict=False)
    return statistics.median([(one + other) / 2 / statistics.median(block) - 1 for block, one, other in pairs])


def report(ranks: list[list[dict[str, Any]]], cluster: autopart.Cluster) -> None:
    """Print what was run; write it beside what is recorded of other cases, once there is a result of each."""
    fresh = [row_of(both) for both in zip(*ranks, strict=True)]
    for row in fresh:
        print(
            f"{row['plan']:62s} {row['measured']['median']:.4f} s  predicted {row['predicted_seconds']:.4f} s", end=""
        )
        print(f"  {row['error']:+6.1%}   memory " + " ".join(f"{e:+6.1%}" for e in row["memory_error"]))
        for rank, parts in enumerate(row["parts"]):
            each = (f"{kind} {one:.1f} {other:.1f}" for kind, (one, other) in parts.items() if max(one, other) > 0.3)
            print(f"    rank {rank}, ms simulated and measured:  " + "  ".join(each))
    known = {row["plan"]: row for row in (*(recorded("prediction", "plans") or []), *fresh)}
    rows = [known[str(case)] for case in CASES if str(case) in known]
    claims, figures = claims_of(rows), figures_of(rows)
    for claim, holds in claims.items():
        print("met   " if holds else "MISSED", claim)
    if len(rows) == len(CASES):
        print("written to", write("prediction", {"claims": claims, **figures, "cluster": cluster, "plans": rows}).name)


def row_of(both: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what was found of a case.  both: on each rank."""
    case, forecasts = both[0]["case"], both[0]["forecasts"]
    return {
        "plan": str(case), "model": case.model,
        "measured": asdict(spread([taken for block in both[0]["seconds"] for taken in block])),
        "predicted_seconds": statistics.median(forecasts), "forecasts": forecasts,
        "error": error_of(both[0]["seconds"], forecasts), "parts": [entry["parts"] for entry in both],
        "held_bytes": [entry["held"] for entry in both], "estimated_bytes": [entry["estimated"] for entry in both],
        "memory_error": [entry["estimated"] / max(1, entry["held"]) - 1 for entry in both],
    }  # fmt: skip


def figures_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the errors of all plans but those of the tiny model."""
    large = [row for row in rows if row["model"] != TINY] or rows
    errors = [abs(row["error"]) for row in large]
    memory = [abs(error) for row in large for error in row["memory_error"]]
    return {
        "mean_error": statistics.mean(errors), "largest_error": max(errors), "pairs_in_order": agreement(large),
        "mean_memory_error": statistics.mean(memory), "largest_memory_error": max(memory),
        "largest_error_tiny": max([abs(row["error"]) for row in rows if row["model"] == TINY], default=0.0),
    }  # fmt: skip


def claims_of(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """Return what is claimed, and whether it holds."""
    figures, models = figures_of(rows), len({row["model"] for row in rows} - {TINY})
    mean, most, memory = (figures[name] for name in ("mean_error", "largest_error", "mean_memory_error"))
    pairs, tiny = figures["pairs_in_order"], figures["largest_error_tiny"]
    return {
        f"{models} architectures, at least {ARCHITECTURES}": models >= ARCHITECTURES,
        f"mean error of the step {mean:.1%}, at most {MEAN:.0%}": mean <= MEAN,
        f"largest error of the step {most:.1%}, at most {MOST:.0%}": most <= MOST,
        f"pairs of plans of one model in order {pairs:.1%}, all": pairs == 1.0,
        f"mean error of the memory {memory:.1%}, at most {MEMORY:.0%}": memory <= MEMORY,
        f"largest error of a tiny model's step {tiny:.1%}, at most {OF_TINY:.0%}": tiny <= OF_TINY,
    }


def median(row: dict[str, Any]) -> float:
    """Return the median seconds of a case's steps."""
    found: float = row["measured"]["median"]
    return found


def agreement(rows: list[dict[str, Any]], close: float = 0.05) -> float:
    """Return the share of pairs of plans of one model, measured at least 5 % apart, that are predicted in order."""
    pairs = [
        (one["predicted_seconds"] < other["predicted_seconds"]) == (median(one) < median(other))
        for one, other in combinations(rows, 2)
        if one["model"] == other["model"] and abs(median(one) / median(other) - 1) > close
    ]
    return sum(pairs) / max(1, len(pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="steps of a plan; more where cores change their speed")
    parser.add_argument("--only", default="", help="regular expression of plans' names")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    cluster = detect_all(2)
    report(autopart.launch(measure, "cpu:2", cluster, given.rounds, given.only), cluster)


if __name__ == "__main__":
    main()

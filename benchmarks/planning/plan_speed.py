"""Planning time, from a model object on the meta device to a plan with a proven bound, by pass.

Targets on a laptop's core, without imports: GPT-2 XL on 16 devices 10 s; Llama-8B on 64 devices 10 s, of which 2 s
after capture; GPT-3 175B on 384 devices (as trained by Narayanan et al., "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM", SC 2021) 35 s, with a simulated step at least 10 % shorter than under
1F1B's family; Llama-3.1 405B, a batch of 2,048 x 8,192 tokens, with whole sequences 60 s on 1,024 devices and 120 s on
4,096; with slices of sequences 90 s on each, and steps at least 18 % and 35 % shorter. GPT-3 and 405B are planned
within 2 GB. Presets assume that kernels reach a share of their devices' peak rates (`files/presets.py`); the 405B
model is also planned at peak rates, without such an assumption, and there also in 40 stages. Then growth with layers
and with devices, which is expected to be linear in the layers (capture) and sublinear in the devices (powers of two
and divisors of the world are tried). Seconds are processor time, so that other programs do not count; wall time is
printed beside them.

Plans choose among all synchronous schedules. Three cases are also planned under 1F1B alone with whole sequences,
outside the clock, to see by how much the simulated step is shorter: GPT-3, and Llama-3.1 405B with slices of sequences,
which leave less idle there than any order within the memory (from I to W a micro-batch keeps more than its recomputed
activations).

    python -m benchmarks.planning.plan_speed         writes results/plan_speed.json and results/plan_speed.svg
    python -m benchmarks.planning.plan_speed --only gpt3 only matching names; other recorded results are kept
    python -m benchmarks.planning.plan_speed --only gpt3 --profile 40  profile of the time after capture; writes nothing
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import re
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autopart.batch.batch import Batch, flatten
from autopart.capture import CaptureCache, Captured
from autopart.costs import sources
from autopart.files.clusters import parse_cluster
from autopart.ir.cluster import Cluster
from autopart.ir.graph import Size
from autopart.options import read_options
from autopart.passes import pipeline
from autopart.passes.search import finalize
from autopart.planning import make
from autopart.planning.derive import family, reduction
from benchmarks.shared import shapes
from benchmarks.shared.common import RESULTS, recorded, write

STEPS = (  # (module, function name, pass to which its time belongs)
    (family, "infer_other_size", "capture"),
    (reduction, "derive_loss_weight", "loss"),
    (reduction, "mark_rows", "loss"),
    (sources, "analytic_costs", "costs"),
    (make, "CostModel", "costs"),
    (pipeline, "atoms", "atoms"),
    (pipeline, "blocks_of", "coarsen"),
    (pipeline, "BlockChain", "chain"),
    (pipeline, "search", "search"),
    (pipeline, "least_of", "bound"),
    (pipeline, "finalize", "finalize"),
    (finalize, "check_program", "verify"),
)


@dataclass(frozen=True)
class Case:
    """A model to plan.

    seconds, solving_s, rss_gb: targets, 0 for none; shorter: the part by which the simulated step has to be shorter
    than that of the plan under 1F1B, 0 for none; optimizer: as for `autopart.plan`; peak: assume that kernels reach
    the peak rates of their devices; asked: other options of `autopart.plan`.
    """

    name: str
    make: Callable[[], torch.nn.Module]
    rows: int
    length: int
    cluster: str
    seconds: float = 0.0
    solving_s: float = 0.0
    rss_gb: float = 0.0
    optimizer: str = "adamw+masters"
    peak: bool = False
    shorter: float = 0.0
    asked: Mapping[str, Any] = field(default_factory=dict)


def _llama_405b(name: str, nodes: int, seconds: float, **more: Any) -> Case:
    """Return a case with a batch of 2,048 x 8,192 tokens on nodes of eight H200."""
    cluster = f"h200x8:{nodes}"
    return Case(name, shapes.llama_405b, 2048, 8192, cluster, seconds=seconds, rss_gb=2, optimizer="adamw", **more)


FORTY_STAGES = {"stages": 40, "replicas": 25, "micro_batches": 82}
"""A number of micro-batches with at most one row per replica; by default the planner tries powers of two."""
SLICES = {"token_slices": "auto"}
ALONE = {"schedule": "1f1b", "token_slices": None, "stages_per_rank": 1}
"""Options of the plan under 1F1B that others are compared with."""
TARGETS = (
    Case("gpt2-xl", lambda: shapes.gpt2(48, 1600, 25), 512, 1024, "a100x8:2", seconds=10),
    Case("llama-8b", shapes.llama_8b, 512, 4096, "h100x8:8", seconds=10, solving_s=2),
    Case(
        "gpt3-175b",
        lambda: shapes.gpt2(96, 12288, 96, 2048),
        1536,
        2048,
        "a100x8:48",
        seconds=35,
        rss_gb=2,
        shorter=0.10,
    ),
    _llama_405b("llama-405b", 128, 60),
    _llama_405b("llama-405b at peak rates", 128, 60, peak=True),
    _llama_405b("llama-405b at peak rates, 40 stages", 128, 0, peak=True, asked=FORTY_STAGES),
    _llama_405b("llama-405b on 4096", 512, 120),
    _llama_405b("llama-405b on 4096 at peak rates", 512, 120, peak=True),
    _llama_405b("llama-405b, slices", 128, 90, asked=SLICES, shorter=0.18),
    _llama_405b("llama-405b on 4096, slices", 512, 90, asked=SLICES, shorter=0.35),
)
GROWTH = ("layers", "devices")
LAYERS = (12, 24, 48, 96)
DEVICES = (8, 16, 32, 64, 128, 256, 384)
LINES = (("#1f77b4", "captured_s"), ("#d62728", "solving_s"))


class Clock:
    """Processor seconds by pass. The time of an inner pass does not count for the outer one."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._open = ["other"]
        self._since = time.process_time()

    def lap(self) -> float:
        """Add the time since the last event to the innermost open pass."""
        now = time.process_time()
        spent, self._since = now - self._since, now
        self.seconds[self._open[-1]] += spent
        return spent

    def wrap(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return `work`, timed as a pass."""

        def timed(*args: Any, **options: Any) -> Any:
            self.lap()
            self._open.append(name)
            try:
                return work(*args, **options)
            finally:
                self.lap()
                self._open.pop()

        return timed

    def watch(self, what: str, best_ns: int, bound_ns: int) -> None:
        """Add the time since the last event to the phase that the search reports."""
        if self._open[-1] == "search":
            spent = self.lap()
            self.seconds["search"] -= spent
            self.seconds[what.split(",")[0]] += spent


@contextmanager
def timed_passes(clock: Clock) -> Iterator[None]:
    """Time the passes of `STEPS`."""
    known = [(module, name, getattr(module, name)) for module, name, _ in STEPS]
    for (module, name, work), (_, _, label) in zip(known, STEPS, strict=True):
        setattr(module, name, clock.wrap(label, work))
    try:
        yield
    finally:
        for module, name, work in known:
            setattr(module, name, work)


class _Clocked(CaptureCache):
    """A cache whose captures are timed."""

    def __init__(self, capturer: CaptureCache, clock: Clock) -> None:
        self.__dict__.update(vars(capturer))
        self._clock = clock

    def __call__(self, batch: Batch, size: Size, mode: str = "step") -> Captured:
        return self._clock.wrap("capture", super().__call__)(batch, size, mode)  # type: ignore[no-any-return]


def result(case: Case, profile: int = 0) -> dict[str, Any]:
    """Return the seconds of every pass and the plan."""
    with torch.device("meta"):
        model, given = case.make().bfloat16(), shapes.causal_batch(case.rows, case.length)
    wall = time.perf_counter()
    clock = Clock()
    options = read_options(optimizer=case.optimizer, watch=clock.watch, cache=False, **case.asked)
    batch, cluster = flatten(given), parse_cluster(case.cluster)
    if case.peak:
        cluster = at_peak_rates(cluster)
    capturer = CaptureCache(model)
    counted = _Clocked(capturer, clock)
    if profile:  # the first plan fills the capture cache
        make.make_plan(capturer, batch, cluster, options, to_run=False)
        profiled(lambda: make.make_plan(capturer, batch, cluster, options, to_run=False), profile)
        clock.lap()
        clock.seconds.clear()
    with timed_passes(clock):
        plan = make.make_plan(counted, batch, cluster, options, to_run=False).plan
    clock.lap()
    total = sum(clock.seconds.values())
    assert plan.outlook.optimality
    rss_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    alone_ms = 0.0
    if case.shorter:
        asked = {"optimizer": case.optimizer, "cache": False, **case.asked, **ALONE}
        alone = make.make_plan(capturer, batch, cluster, read_options(**asked), to_run=False).plan
        alone_ms = alone.step_ns / 1e6
    return {
        "seconds": total,
        "captured_s": clock.seconds["capture"],
        "solving_s": total - clock.seconds["capture"],
        "wall_s": time.perf_counter() - wall,
        "passes_s": dict(clock.seconds),
        "parameters_b": shapes.parameters(model) / 1e9,
        "ops": sum(len(stage.ops) for stage in plan.stages),
        "world": cluster.world,
        "stages": len(plan.stages),
        "replicas": [stage.replicas for stage in plan.stages],
        "tensor_parallel": plan.decision.shards,
        "micro_batches": len(plan.micro_rows),
        "schedule": plan.schedule,
        "peak_gb": max(e.peak_bytes for e in plan.estimates) / 1e9,
        "limit_gb": cluster.devices[0].memory_bytes / 1e9,
        "rates_reached": cluster.devices[0].efficiency,
        "step_ms": plan.step_ns / 1e6,
        "token_slices": list(plan.decision.token_slices),
        "stages_per_rank": len(plan.stages) // len({stage.ranks for stage in plan.stages}),
        "step_under_1f1b_ms": alone_ms,
        "planned_rss_gb": rss_gb,
        "bound_ms": plan.outlook.optimality.lower_bound / 1e6,
        "bubble": plan.outlook.bubble,
        "gap": plan.outlook.optimality.gap,
        "alternatives": [f"{a.name}: {a.step_ns / 1e6:.0f} ms, {a.why}" for a in plan.outlook.alternatives],
        "notes": list(plan.notes),
    }


def at_peak_rates(cluster: Cluster) -> Cluster:
    """Return the cluster with kernels that reach the rates and the memory bandwidth of the data sheets."""
    devices = tuple(replace(device, efficiency=1.0, memory_efficiency=1.0) for device in cluster.devices)
    return replace(cluster, devices=devices)


def profiled(work: Callable[[], Any], lines: int) -> None:
    """Print a profile by function and by cumulative time."""
    profile = cProfile.Profile(time.process_time)
    profile.runcall(work)
    for order in ("tottime", "cumulative"):
        pstats.Stats(profile).strip_dirs().sort_stats(order).print_stats(lines)


def growth(axis: str) -> list[dict[str, Any]]:
    """Return results over "layers" on 16 devices, or over "devices" at 48 layers."""

    def at(layers: int, devices: int) -> dict[str, Any]:
        case = Case("", lambda: shapes.gpt2(layers, 1600, 25), 3072, 1024, f"a100x8:{devices // 8}")
        found = shapes.alone(lambda: {"layers": layers, "devices": devices, **result(case)})
        print(line(f"{layers} layers on {devices} devices", found), flush=True)
        return found

    return [at(layers, 16) for layers in LAYERS] if axis == "layers" else [at(48, devices) for devices in DEVICES]


def line(name: str, found: dict[str, Any]) -> str:
    """Return one result as a line."""
    if "failed" in found:
        return f"{name:36s} {found['failed']}"
    passes = sorted(found["passes_s"].items(), key=lambda item: -item[1])
    return (
        f"{name:36s} {found['seconds']:6.1f} s ({found['wall_s']:.1f} wall), {found['solving_s']:5.2f} after "
        f"capture, {found['rss_gb']:.2f} GB;  {found['stages']} stages of {max(found['replicas'])}, "
        f"step {found['step_ms']:.0f} ms, at least {found['bound_ms']:.0f}, "
        f"bubble {found['bubble']:.0%};  " + "  ".join(f"{n} {s:.2f}" for n, s in passes if s >= 0.005)
    )


def plot(found: dict[str, list[dict[str, Any]]]) -> str:
    """Return an SVG of two charts: seconds over layers, and over devices."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="760" height="300" font-family="sans-serif" font-size="12">'
    ]
    for place, (axis, rows) in enumerate(found.items()):
        good = [row for row in rows if "failed" not in row]
        left, wide, tall = 50 + 380 * place, 300, 220
        right, top = max(row[axis] for row in good), max(row[key] for row in good for _, key in LINES)
        parts.append(f'<path d="M{left} 30v{tall}h{wide}" fill="none" stroke="black"/>')
        parts.append(f'<text x="{left}" y="20">seconds (at most {top:.1f})</text>')
        parts.append(f'<text x="{left + wide}" y="{tall + 65}" text-anchor="end">{axis}</text>')
        for n, (colour, key) in enumerate(LINES):
            spots = [(left + wide * row[axis] / right, 30 + tall * (1 - row[key] / top)) for row in good]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}"/>')
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in spots]
            name = "capture" if key == "captured_s" else "after capture"
            parts.append(f'<text x="{left + 10}" y="{45 + 15 * n}" fill="{colour}">{name}</text>')
        for row in good:
            x = left + wide * row[axis] / right
            parts.append(f'<text x="{x:.1f}" y="{tall + 45}" text-anchor="middle" font-size="9">{row[axis]}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def judged(case: Case, found: dict[str, Any]) -> dict[str, bool]:
    """Return the targets of a case and whether they are met."""
    wanted = {"seconds": case.seconds, "solving_s": case.solving_s, "rss_gb": case.rss_gb}
    found = {**found, "rss_gb": found.get("planned_rss_gb", found.get("rss_gb", float("inf")))}
    claims = {}
    if case.shorter:
        saved = 1 - found.get("step_ms", float("inf")) / (found.get("step_under_1f1b_ms") or 1.0)
        name = f"{case.name}: simulated step {saved:.1%} shorter than under 1F1B, at least {case.shorter:.0%}"
        claims[name] = saved >= case.shorter
    return claims | {
        f"{case.name}: {name} {found.get(name, float('inf')):.2f} <= {most:g}": found.get(name, float("inf")) <= most
        for name, most in wanted.items()
        if most
    }


def written(targets: dict[str, Any], grown: dict[str, Any]) -> dict[str, bool]:
    """Write new results beside the recorded ones and return all claims."""
    known = {**recorded("plan_speed", "targets"), **targets}
    known = {case.name: known[case.name] for case in TARGETS if case.name in known}
    claims: dict[str, bool] = {}
    for case in TARGETS:
        claims |= judged(case, known[case.name]) if case.name in known else {}
    grown = {**recorded("plan_speed", "growth"), **grown}
    write("plan_speed", {"claims": claims, "targets": known, "growth": grown})
    if grown.keys() >= set(GROWTH):
        (RESULTS / "plan_speed.svg").write_text(plot({axis: grown[axis] for axis in GROWTH}))
    return claims


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression of names; other recorded results are kept")
    parser.add_argument(
        "--profile",
        type=int,
        default=0,
        metavar="LINES",
        help="profile the time after capture and print this many lines",
    )
    given = parser.parse_args(argv)
    shapes.warm()
    claims: dict[str, bool] = {}
    for case in TARGETS:
        if re.search(given.only, case.name):
            found = shapes.alone(lambda case=case: result(case, given.profile))  # type: ignore[misc]
            print(line(case.name, found), flush=True)
            claims = {} if given.profile else written({case.name: found}, {})
    for axis in GROWTH:
        if not given.profile and re.search(given.only, f"growth over {axis}"):
            claims = written({}, {axis: growth(axis)})
    for claim, holds in claims.items():
        print("met   " if holds else "MISSED", claim)


if __name__ == "__main__":
    main()

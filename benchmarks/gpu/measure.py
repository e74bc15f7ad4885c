"""One row on one rank: build, warm up, measure, record idle time, compare the losses with one process."""

from __future__ import annotations

import gc
import os
import platform
import time

import torch
import torch.distributed as dist

import autopart
from autopart.batch.batch import flatten
from autopart.capture import CaptureCache
from autopart.ir.graph import Graph, Size
from autopart.passes.ops.flops import backward_flops, flops
from benchmarks.gpu.jobs import Answer, CannotRun, Job, reason
from benchmarks.gpu.plans import PLANS, Running, device_of, plain_compute
from benchmarks.gpu.workloads import Workload, workload
from benchmarks.shared.bench_models import training_step

COMPARED = 3
"""Number of steps whose losses are compared: later losses diverge because training is chaotic."""


def perform(job: Job) -> Answer:
    """Return this rank's result of a row."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False  # full single precision
    work = workload(job.model, job.scale, tiny=job.tiny, rows=job.rows)
    try:
        with PLANS[job.plan](job, work) as running:
            answer = _measured(job, running)
            if running.pipe is not None:
                answer |= _predicted(running.pipe) | _idle(running)
        del running
    except CannotRun as error:
        return {"reason": str(error), "stays": True}
    if os.environ["RANK"] == "0":
        answer |= _reference(job, work, tuple(answer["micro_rows"]), answer["losses"])
    return answer


def _measured(job: Job, running: Running) -> Answer:
    """Return the seconds and loss of every step, and the peak memory of the steps."""
    device = device_of(job)
    seconds, losses = [], []
    for number in range(job.warmup + job.repeats):
        if number == job.warmup and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        _meet(device)
        began = time.perf_counter()
        loss = running.step()
        _meet(device)
        took = time.perf_counter() - began
        losses.append(None if loss is None else loss)
        if number >= job.warmup:
            seconds.append(took)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {
        "seconds": seconds, "losses": _numbers(losses[:COMPARED], running), "peak_bytes": peak,
        "micro_rows": running.micro_rows, "devices": running.devices, "launches": _launches(device, running),
    }  # fmt: skip


def _launches(device: torch.device, running: Running) -> int | None:
    """Return the kernels that one more step starts on this rank's GPU, copies and fills included."""
    if device.type != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        running.step()
        _meet(device)
    return sum(event.count for event in found.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA)


def _meet(device: torch.device) -> None:
    """Wait until this device has finished its work and all ranks are here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))  # on the CPU: over Gloo for every transport


def _numbers(losses: list[torch.Tensor | None], running: Running) -> list[float] | None:
    """Return the losses of the whole batch, or None if this rank does not know them."""
    known = [float(loss) for loss in losses if loss is not None]
    if len(known) < len(losses):
        return None
    if running.shares:
        shares = torch.tensor(known, dtype=torch.float64)
        dist.all_reduce(shares)
        known = (shares / dist.get_world_size()).tolist()
    return known


def _predicted(pipe: autopart.Pipe) -> Answer:
    """Return the plan and its predictions."""
    plan = pipe.plan
    stage = next(iter(plan.decision.stages_of_rank(pipe.rank)), None)
    mine = None if stage is None or not plan.estimates else plan.estimates[stage].peak_bytes
    return {
        "predicted_peak_bytes": mine, "simulated_s": plan.step_ns * 1e-9, "simulated_bubble": plan.outlook.bubble,
        "stages": len(plan.stages), "replicas": [len(s.ranks) for s in plan.stages], "schedule": plan.schedule,
        "recomputed_ops": sum(len(group) for s in plan.stages for group in s.recompute),
        "costs": plan.provenance.costs, "flops_per_row": flops_per_row(pipe.session.graph),
    }  # fmt: skip


def _idle(running: Running) -> Answer:
    """Return the idle share of the devices' time in one more step without its optimizer."""
    assert running.pipe is not None and running.timeline is not None
    found = running.timeline()
    ranks = [rank for stage in running.pipe.plan.stages for rank in stage.ranks]
    busy = sum(found.busy_ns(rank) for rank in ranks)
    return {"measured_bubble": 1 - busy / (len(ranks) * found.step_ns)} if found.step_ns else {}


def _reference(job: Job, work: Workload, micro_rows: tuple[int, ...], losses: list[float] | None) -> Answer:
    """Return the losses of one process over the same micro-batches, on the first device. losses: of this row."""
    key = micro_rows if work.statistics else (sum(micro_rows),)
    if key == (sum(micro_rows),) and job.plan == "one device":
        return {"reference": losses, "reference_rows": key}
    if key in job.references:
        return {"reference": job.references[key], "reference_rows": key}
    gc.collect()
    if job.kind == "cuda":
        torch.cuda.empty_cache()
    try:
        compute, model = plain_compute(job, work, key)
        step = training_step(compute, model.parameters())
        found = [float(step()) for _ in range(COMPARED)]
    except torch.OutOfMemoryError:
        return {"no_reference": "the unpartitioned model does not fit on one device"}
    return {"reference": found, "reference_rows": key}


def flops_per_row(graph: Graph) -> float:
    """Return the forward and backward FLOPs of one row of the batch, without recomputation."""
    values, params = graph.value_map(), graph.param_map()
    whole = sum(flops(op, values, params) + backward_flops(op, values, params) for op in graph.ops)
    return whole / graph.rows


def count_work(job: Job) -> Answer:
    """Return the FLOPs of a model that autopart did not run in this benchmark, captured without weights by rank 0."""
    if os.environ["RANK"] != "0":
        return {}
    work = workload(job.model, job.scale, tiny=job.tiny, rows=job.rows)
    with torch.device("meta"):
        model = work.build().train()
    given, target = work.batch(2)
    batch = flatten(({work.argument: given}, target), with_target=True)
    return {"flops_per_row": flops_per_row(CaptureCache(model, work.loss)(batch, Size(2)).graph)}


def describe(job: Job | None = None) -> Answer:
    """Return the machine of this rank. Runs in a child process: a process that forks others must not use CUDA."""
    answer: Answer = {"host": platform.node(), "gpus": 0, "gpu": None}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        answer |= {
            "gpus": torch.cuda.device_count(), "gpu": properties.name, "gpu_bytes": properties.total_memory,
            "cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }  # fmt: skip
    return answer


def failed(error: BaseException) -> Answer:
    """Return the answer for an error."""
    return {"reason": reason(error), "stays": False}


def measured_cluster(job: Job) -> Answer:
    """Return the cluster measured on this rank's machine and links."""
    from autopart.cli.host_costs import detect_all
    from autopart.files.clusters import cluster_to_dict

    return {"cluster": cluster_to_dict(detect_all(job.world))}

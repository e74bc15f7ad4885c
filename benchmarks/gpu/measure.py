"""One row on one rank: build, warm up, measure, look where the time went, compare the losses with the plain model."""

from __future__ import annotations

import gc
import os
import platform
import time

import torch
import torch.distributed as dist

import autopart
from autopart.capture import CaptureCache
from autopart.capture.batch.batch import flatten
from autopart.ir.graph import Graph
from autopart.ir.size import Size
from autopart.passes.ops.flops import backward_flops, flops
from gpu.jobs import Answer, CannotRun, Job, reason
from gpu.ways import WAYS, Running, device_of, plain_step
from gpu.workloads import Workload, workload

COMPARED = 3
"""Losses of so many steps are compared: later ones are further apart because training is chaotic."""


def perform(job: Job) -> Answer:
    """What this rank says of a row."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False  # single precision means it
    work = workload(job.model, job.scale, tiny=job.tiny, rows=job.rows)
    try:
        with WAYS[job.plan](job, work) as running:
            said = _measured(job, running)
            if running.pipe is not None:
                said |= _predicted(running.pipe) | _idle(running)
        del running
    except CannotRun as error:
        return {"reason": str(error), "stays": True}
    if os.environ["RANK"] == "0":
        said |= _reference(job, work, tuple(said["micro_rows"]), said["losses"])
    return said


def _measured(job: Job, running: Running) -> Answer:
    """Seconds and loss of every step, and the most memory that the steps took."""
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
        "micro_rows": running.micro_rows, "devices": running.devices,
    }  # fmt: skip


def _meet(device: torch.device) -> None:
    """All work of this device is done, and all ranks are here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))  # on the CPU: over Gloo, whatever the GPUs talk by


def _numbers(losses: list[torch.Tensor | None], running: Running) -> list[float] | None:
    """The losses of the whole batch, where this rank knows them."""
    known = [float(loss) for loss in losses if loss is not None]
    if len(known) < len(losses):
        return None
    if running.shares:
        shares = torch.tensor(known, dtype=torch.float64)
        dist.all_reduce(shares)
        known = (shares / dist.get_world_size()).tolist()
    return known


def _predicted(pipe: autopart.Pipe) -> Answer:
    """What was planned, and what was said that it would take."""
    plan = pipe.plan
    stage = next(iter(plan.decision.stages_of_rank(pipe.rank)), None)
    mine = None if stage is None or not plan.estimates else plan.estimates[stage].peak_bytes
    return {
        "predicted_peak_bytes": mine, "simulated_s": plan.step_ns * 1e-9, "simulated_bubble": plan.report.bubble,
        "stages": len(plan.stages), "replicas": [len(s.ranks) for s in plan.stages], "schedule": plan.schedule,
        "recomputed_ops": sum(len(group) for s in plan.stages for group in s.recompute),
        "costs": plan.provenance.costs, "flops_per_row": flops_per_row(pipe.session.graph),
    }  # fmt: skip


def _idle(running: Running) -> Answer:
    """The share of the devices' time in which they do not compute, in one more step, its optimizer left out."""
    assert running.pipe is not None and running.timeline is not None
    found = running.timeline()
    ranks = [rank for stage in running.pipe.plan.stages for rank in stage.ranks]
    busy = sum(found.busy_ns(rank) for rank in ranks)
    return {"measured_bubble": 1 - busy / (len(ranks) * found.step_ns)} if found.step_ns else {}


def _reference(job: Job, work: Workload, micro_rows: tuple[int, ...], losses: list[float] | None) -> Answer:
    """Losses of the plain model over the same micro-batches, on the first device.  losses: of this row."""
    key = micro_rows if work.statistics else (sum(micro_rows),)
    if key == (sum(micro_rows),) and job.plan == "one device":
        return {"reference": losses, "reference_rows": key}
    if key in job.references:
        return {"reference": job.references[key], "reference_rows": key}
    gc.collect()
    if job.kind == "cuda":
        torch.cuda.empty_cache()
    try:
        step = plain_step(job, work, key)
        found = [float(step()) for _ in range(COMPARED)]
    except torch.OutOfMemoryError:
        return {"no_reference": "the plain model does not fit on one device"}
    return {"reference": found, "reference_rows": key}


def flops_per_row(graph: Graph) -> float:
    """Forward and backward of one row of the batch, from our table; nothing computed again counts."""
    values, params = graph.value_map(), graph.param_map()
    whole = sum(flops(op, values, params) + backward_flops(op, values, params) for op in graph.ops)
    return whole / graph.rows


def count_work(job: Job) -> Answer:
    """The same for a model that no plan of ours ran: captured without weights, by the first rank."""
    if os.environ["RANK"] != "0":
        return {}
    work = workload(job.model, job.scale, tiny=job.tiny, rows=job.rows)
    with torch.device("meta"):
        model = work.build().train()
    given, target = work.batch(2)
    batch = flatten(({work.argument: given}, target), with_target=True)
    return {"flops_per_row": flops_per_row(CaptureCache(model, work.loss)(batch, Size(2)).graph)}


def describe(job: Job | None = None) -> Answer:
    """The machine of this rank.  Asked in a process of its own: whoever starts others must not touch CUDA."""
    said: Answer = {"host": platform.node(), "gpus": 0, "gpu": None}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        said |= {
            "gpus": torch.cuda.device_count(), "gpu": properties.name, "gpu_bytes": properties.total_memory,
            "cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }  # fmt: skip
    return said


def failed(error: BaseException) -> Answer:
    """A row that is none."""
    return {"reason": reason(error), "stays": False}


def measured_cluster(job: Job) -> Answer:
    """The cluster that this rank's machine and links make, measured."""
    from autopart.costs.detect import detect
    from autopart.files.clusters import cluster_to_dict

    return {"cluster": cluster_to_dict(detect(job.world))}

"""The plans that are compared: autopart's plan, its runtime with equal layers, and those of torch, each with AdamW."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

import autopart
from benchmarks.gpu.jobs import CannotRun, Job, default_micros
from benchmarks.gpu.workloads import Workload
from benchmarks.shared.bench_models import training_step
from benchmarks.shared.torch_pipeline import torch_pipeline


@dataclass(frozen=True)
class Running:
    """A plan that is ready to step.

    step: forward, backward and optimizer; returns the loss on ranks that know it. micro_rows: rows of each micro-batch.
    devices: number of devices used. shares: whether the loss is that of this rank's rows. pipe, timeline: for autopart
    only; `timeline` runs one more step and returns its timeline. compute: forward and backward alone, of the plans that
    `one_step` compares.
    """

    step: Callable[[], torch.Tensor | None]
    micro_rows: tuple[int, ...]
    devices: int
    shares: bool = False
    pipe: autopart.Pipe | None = None
    timeline: Callable[[], autopart.Timeline] | None = None
    compute: Callable[[], torch.Tensor] | None = None


def device_of(job: Job) -> torch.device:
    """Return this rank's device; ranks share GPUs if there are fewer of them."""
    if job.kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def in_precision(job: Job, device: torch.device) -> Any:
    """Return the autocast context of a forward pass."""
    return torch.autocast(device.type, torch.bfloat16, enabled=job.precision == "bf16")


def built(job: Job, work: Workload, device: torch.device) -> nn.Module:
    """Return the model on the CPU with its parameters in the precision's type."""
    model = work.model(device)
    return model.bfloat16() if job.precision == "bf16-parameters" else model


def inputs_as(job: Job, given: torch.Tensor) -> torch.Tensor:
    """Return images in the type of the parameters, and tokens unchanged."""
    return given.bfloat16() if given.is_floating_point() and job.precision == "bf16-parameters" else given


@contextlib.contextmanager
def plain(job: Job, work: Workload, *, compiled: bool = False) -> Iterator[Running]:
    """Run the unpartitioned model on the first device with the whole batch at once.  compiled: by `torch.compile`."""
    rows = job.world * work.rows
    if int(os.environ["RANK"]):
        yield Running(lambda: None, (rows,), 1)
    else:
        compute, model = plain_compute(job, work, (rows,), compiled=compiled)
        yield Running(training_step(compute, model.parameters()), (rows,), 1, compute=compute)


def plain_compute(
    job: Job, work: Workload, micro_rows: Sequence[int], *, compiled: bool = False
) -> tuple[Callable[[], torch.Tensor], nn.Module]:
    """Return forward and backward of one process over micro-batches whose losses are weighted by their rows, and the
    model."""
    device = device_of(job)
    model = built(job, work, device).to(device)
    if compiled:
        model.compile()
    given, target = work.batch(sum(micro_rows))
    given, target = inputs_as(job, given.to(device)), target.to(device)

    def compute() -> torch.Tensor:
        losses = []
        for one, expected in zip(given.split(list(micro_rows)), target.split(list(micro_rows)), strict=True):
            with in_precision(job, device):
                loss = work.loss(model(**{work.argument: one}), expected) * (len(one) / len(given))
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    return compute, model


@contextlib.contextmanager
def ours(job: Job, work: Workload, *, backend: str = "eager") -> Iterator[Running]:
    """Run the planner's choice."""
    with _compiled(job, work, {"micro_batches": job.micro_batches, "backend": backend}) as running:
        yield running


@contextlib.contextmanager
def equal_layers(job: Job, work: Workload) -> Iterator[Running]:
    """Run autopart with a stage per device and the same number of layers in each."""
    _needs_stages(job, work)
    options = {
        "stages": job.world,
        "cuts": work.cuts(job.world),
        "schedule": "1f1b",
        "micro_batches": _micros(job, work),
    }
    with _compiled(job, work, options) as running:
        yield running


@contextlib.contextmanager
def _compiled(job: Job, work: Workload, options: dict[str, Any]) -> Iterator[Running]:
    rows = job.world * work.rows
    given, target = work.batch(rows)
    batch = ({work.argument: inputs_as(job, given)}, target)
    pipe = autopart.compile(
        built(job, work, device_of(job)), job.cluster or f"{job.kind}:{job.world}", sample=batch, loss_fn=work.loss,
        optimizer="adamw", costs=job.costs,
        precision="bf16" if job.precision == "bf16" else "fp32",
        transport=job.transport if job.kind == "cuda" else "auto", **options,
    )  # fmt: skip
    compute = partial(pipe.step, batch)
    step = training_step(compute, pipe.parameters())
    used = sum(len(stage.ranks) for stage in pipe.plan.stages)
    timeline = partial(pipe.timeline, batch)
    try:
        yield Running(step, pipe.plan.micro_rows, used, pipe=pipe, timeline=timeline, compute=compute)
    finally:
        pipe.close(sync=False)


@contextlib.contextmanager
def data_parallel(job: Job, work: Workload) -> Iterator[Running]:
    """Run torch's DistributedDataParallel with equal shares of the rows."""
    device = device_of(job)
    given, target = work.batch(job.world * work.rows)
    _open_group(job)
    mine = slice(dist.get_rank() * work.rows, (dist.get_rank() + 1) * work.rows)
    one, expected = inputs_as(job, given[mine].to(device)), target[mine].to(device)
    ids = [device] if device.type == "cuda" else None
    model = nn.parallel.DistributedDataParallel(built(job, work, device).to(device), device_ids=ids)

    def compute() -> torch.Tensor:
        with in_precision(job, device):
            loss = work.loss(model(**{work.argument: one}), expected)
        loss.backward()
        return loss.detach()

    step = training_step(compute, model.parameters())
    yield Running(step, (work.rows,) * job.world, job.world, shares=job.world > 1)


def _torch_schedule(schedule: Any) -> Any:
    @contextlib.contextmanager
    def way(job: Job, work: Workload) -> Iterator[Running]:
        _needs_stages(job, work)
        device, micros = device_of(job), _micros(job, work)
        given, target = work.batch(job.world * work.rows)
        _open_group(job)
        play, parameters = torch_pipeline(
            built(job, work, device), work.argument, inputs_as(job, given), target, work.loss,
            cuts=work.cuts(job.world), micros=micros, schedule=schedule, device=device,
        )  # fmt: skip

        def compute() -> torch.Tensor | None:
            with in_precision(job, device):
                return play()

        yield Running(training_step(compute, parameters), (len(given) // micros,) * micros, job.world)

    return way


def _open_group(job: Job) -> None:
    """Open the default group and never close it: freeing a Gloo group that DDP used may hang, and the process ends
    anyway.
    """
    dist.init_process_group("gloo" if job.kind == "cpu" or job.transport == "gloo" else "cpu:gloo,cuda:nccl")


def _needs_stages(job: Job, work: Workload) -> None:
    if job.world < 2:
        raise CannotRun("one device: nothing to cut")
    if job.world > work.count:
        raise CannotRun(f"{job.world} devices and {work.count} layers")


def _micros(job: Job, work: Workload) -> int:
    return job.micro_batches or default_micros(job.world * work.rows, job.world)


PLANS: dict[str, Callable[[Job, Workload], Any]] = {
    "one device": plain,
    "ours": ours,
    "ours, equal layers": equal_layers,
    "DDP": data_parallel,
    "torch 1F1B": _torch_schedule(Schedule1F1B),
    "torch GPipe": _torch_schedule(ScheduleGPipe),
    "one device, compiled": partial(plain, compiled=True),
    "ours, compiled": partial(ours, backend="inductor"),
}
EAGER = [name for name in PLANS if not name.endswith(", compiled")]
"""What is compared unless other plans are asked for: compiling takes minutes for a large model."""

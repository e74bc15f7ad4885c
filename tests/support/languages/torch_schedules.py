"""Schedules of torch.distributed.pipelining, made and loaded by its own classes without any process group."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

import autopart
from autopart.ir.actions import COMPUTE
from support.extending import own_interleaving

SINGLE = ("ScheduleGPipe", "Schedule1F1B")
LOOPED = ("ScheduleLoopedBFS", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


@dataclass
class Stage:
    """What torch's schedules ask of a stage to make an order."""

    stage_index: int
    num_stages: int
    group_size: int
    group_rank: int = 0
    has_backward: bool = True
    is_first: bool = False
    is_last: bool = False
    submod: nn.Module = field(default_factory=nn.Identity)
    stage_index_to_group_rank: dict[int, int] = field(default_factory=dict)


def stages_of_rank_0(ranks: int, each: int) -> list[Stage]:
    """Return the stages of the first of some ranks, each of which has `each`."""
    return [Stage(chunk * ranks, ranks * each, ranks) for chunk in range(each)]


def dump(name: str, ranks: int, each: int, micros: int, path: Path, form: str = "compute_only") -> None:
    """Write the CSV of one of torch's schedules; `each`: stages a rank."""
    made: Any = getattr(torch_schedules, name)
    stages = stages_of_rank_0(ranks, each)
    if name not in SINGLE:
        made(stages, micros)._dump_csv(path, form)
        return
    order = made(stages[0], micros)._get_pipeline_order()
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(order[rank] for rank in range(ranks))


def load(path: Path, ranks: int, each: int, micros: int, form: str = "compute_only") -> _PipelineScheduleRuntime:
    """Return torch's runtime with a CSV that it has loaded, validated and lowered."""
    runtime = _PipelineScheduleRuntime(stages_of_rank_0(ranks, each), micros)  # type: ignore[arg-type]
    runtime._load_csv(str(path), form)  # type: ignore[arg-type]
    return runtime


def simulated(runtime: _PipelineScheduleRuntime) -> int:
    """Return the time steps of torch's own dry run, which raises for an order that hangs.

    It knows neither gathers nor pairs of computes, so gathers are left out and pairs stand apart.
    """
    once = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
    orders = runtime.pipeline_order_with_comms
    runtime.pipeline_order_with_comms = {
        rank: [
            part
            for action in order
            for part in (action.sub_actions or (action,))
            if part.computation_type.value not in once
        ]
        for rank, order in orders.items()
    }
    try:
        return max(map(len, runtime._simulate().values()))
    finally:
        runtime.pipeline_order_with_comms = orders


def computes(runtime: _PipelineScheduleRuntime) -> list[list[str]]:
    """Return what torch would compute on each rank, in order."""
    return [
        [str(action) for action in order if action.is_compute_op]
        for _, order in sorted(runtime.pipeline_order_with_comms.items())
    ]


def home(name: str, stage: int, ranks: int) -> int:
    """Return the rank on which torch puts a stage."""
    chunk, place = divmod(stage, ranks)
    return ranks - 1 - place if name in V_SHAPED and chunk % 2 else place


def verified_under(path: Path) -> tuple[bool, dict[str, float], list[list[str]]]:
    """Plan and run four stages on two ranks under the schedule of a file; runs on every rank of a pool.

    Returns whether a step equals one process's, its largest errors, and the computes of each rank in order.
    """
    torch.set_num_threads(1)
    model, batch = own_interleaving.net(tied=False), own_interleaving.batch()
    options: dict[str, Any] = {**own_interleaving.OPTIONS, "stages": 4, "micro_batches": 4, "schedule": path}
    found = autopart.verify(model, "cpu:2", sample=batch, **options)
    with autopart.compile(model, "cpu:2", sample=batch, **options) as pipe:
        spans = pipe.timeline(batch).spans
    orders = [[str(s.action) for s in spans if s.rank == rank and s.action.is_a.role == COMPUTE] for rank in (0, 1)]
    return found.ok, {"loss": found.loss_error, "gradients": found.largest}, orders

"""The front door: compile, plan, verify, launch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .capture import Capturer
from .capture.batch import take_apart
from .check import Verification, verify_step
from .clusters import parse_cluster
from .ir.abilities import EVERYTHING
from .ir.cluster import Cluster
from .ir.errors import UsageError
from .ir.plan import Plan
from .options import read_options
from .pipe import Pipe
from .planning import Planned, make_plan
from .runtime.launch import launch as _launch

ClusterLike = Cluster | str | os.PathLike[str] | None


def compile(model: nn.Module, cluster: ClusterLike = None, *, sample: Any = None, **options: Any) -> Pipe:
    """Turn an unmodified model into a running training pipeline.

    model: any torch.nn.Module.  cluster: an `autopart.Cluster`, a YAML/TOML file, a text such as "cpu:2", or None for
    what the launcher's environment and the visible devices say.  sample: a batch as the model takes it (a mapping, a
    tuple, a pair of both, a tensor; with loss_fn a pair of inputs and target); without one the model is captured at
    the first step.

    Options: loss_fn(output, target); loss_reduction ("auto", "mean", "sum", "token-mean"); stages; micro_batches;
    schedule ("auto", "1f1b", "gpipe"); cuts (module paths at which a stage begins); plan (a Plan or a file); seed (of
    dropout); costs ("auto", "measured", "analytic").

    Call it on every rank.  Raises UsageError, CaptureError, RefusedError, PlanError: all before any data is sent.
    """
    read = read_options(**options)
    return Pipe(Capturer(model, read.loss_fn), _cluster(cluster), read, sample)


def plan(model: nn.Module, cluster: ClusterLike = None, *, sample: Any = None, **options: Any) -> Plan:
    """The plan alone: no process group, no weights needed (the model may be on the meta device).  Options as in
    `compile`."""
    return planned(model, cluster, sample=sample, **options).plan


def planned(model: nn.Module, cluster: ClusterLike = None, *, sample: Any = None, **options: Any) -> Planned:
    """As `plan`, with the captured graph that the plan is for."""
    read = read_options(**options)
    batch = take_apart(_given(sample, "plan"), with_target=read.loss_fn is not None)
    return make_plan(Capturer(model, read.loss_fn), batch, _cluster(cluster), read, EVERYTHING)


def verify(
    model: nn.Module,
    cluster: ClusterLike = None,
    *,
    sample: Any = None,
    tolerance: float | None = None,
    **options: Any,
) -> Verification:
    """One training step of the pipeline against the same step in one process, on copies of the model.

    tolerance: largest relative error of the loss, of each gradient and of each buffer; None for 1e-10 in fp64 and
    1e-5 in fp32 (by the coarsest type that a gradient flows through).  Options as in `compile`.
    Call it on every rank, as `compile`; every rank gets the same result: `.ok`, `.table()`, `.gradients`.
    """
    read = read_options(**options)
    return verify_step(model, _cluster(cluster), _given(sample, "verify"), read, tolerance)


def launch(fn: Callable[..., Any], cluster: ClusterLike = None, *args: Any, timeout: float | None = None) -> list[Any]:
    """Run fn(*args) on every rank of a cluster in local processes and return the results by rank.

    Under torchrun this process is one of the ranks and fn is simply called.  timeout: seconds, None for no limit.
    """
    return _launch(fn, _cluster(cluster).world, *args, timeout=timeout)


def _given(sample: Any, what: str) -> Any:
    if sample is None:
        raise UsageError(f"{what} needs a sample", fix="pass sample=batch: one batch as the model takes it")
    return sample


def _cluster(cluster: ClusterLike) -> Cluster:
    return parse_cluster(cluster, cuda_devices=torch.cuda.device_count())

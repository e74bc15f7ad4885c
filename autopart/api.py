"""The front door: compile, plan, verify, launch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autopart.capture import CaptureCache
from autopart.capture.batch import flatten
from autopart.files.clusters import parse_cluster
from autopart.ir.capabilities import EVERYTHING
from autopart.ir.cluster import Cluster
from autopart.ir.errors import UsageError
from autopart.ir.plan import Plan
from autopart.options import read_options
from autopart.planning import Planned, make_plan
from autopart.runtime.launch.local import launch as _launch
from autopart.session.compare import Verification, verify_step
from autopart.session.pipe import Pipe

ClusterLike = Cluster | str | os.PathLike[str] | None


def compile(model: nn.Module, cluster: ClusterLike = None, *, sample: Any = None, **options: Any) -> Pipe:
    """Turn an unmodified model into a running training pipeline.

    model: any torch.nn.Module.  cluster: an `autopart.Cluster`, a YAML/TOML file, a text such as "cpu:2", or None for
    what the launcher's environment and the visible devices say.  sample: a batch as the model takes it (a mapping, a
    tuple, a pair of both, a tensor; with loss_fn a pair of inputs and target); without one the model is captured at
    the first step.

    Options; None, empty or "auto" leaves the choice to the planner:

    loss_fn         loss_fn(output, target) -> scalar, where the model returns no loss
    loss_reduction  how losses of rows combine, if you want it checked: "auto", "mean", "sum", "token-mean"
    stages          number of stages
    micro_batches   number of micro-batches
    schedule        "auto", "1f1b", "1f1b-deep", "gpipe"; in `plan` also "pipedream", which is taken only when named
    cuts            module paths at which a stage begins
    together        module paths, or groups of them, between whose first and last op no stage begins
    pins            {module path: number of the stage that it stands in}
    replicas        devices of every stage, or a number for each; more than 1 in `plan` alone
    recompute       "auto" (as much as the memory demands), "off", "all"; of use in `plan` alone
    optimizer       whose state the memory has to hold: a class or function of the parameters, a torch optimizer, or
                    "sgd", "momentum", "adam", "adamw", also with "+masters"; None is charged as Adam, and said so
    costs           times of ops: "auto", "measured" on this machine, "analytic" from operations and bytes, or a
                    function of your own (`autopart.costs.sources.CostSource`)
    prove           seconds that CP-SAT may take to bound the step of the chosen stages; 0 for no such proof
    cache           False plans anew instead of reading the plan that was made for the same question before
    watch           watch(what is done, best step so far in ns or 0, lower bound in ns or 0), called during the search
    plan            a Plan or the path of a plan file, instead of the options that it settles
    seed            of dropout

    Call it on every rank.  Before any data is sent it raises UsageError (BatchError, ClusterError), CaptureError,
    RefusedError, PlanError (InfeasibleError when no plan fits the memory or the wishes).  What the runtime does not
    have (`ir.abilities`) is not planned.
    """
    read = read_options(**options)
    return Pipe(CaptureCache(model, read.loss_fn), _cluster(cluster), read, sample)


def plan(model: nn.Module, cluster: ClusterLike = None, *, sample: Any = None, **options: Any) -> Plan:
    """The plan alone: no process group, no weights needed (the model may be on the meta device).

    sample is required; options are those of `compile`.  All that can be simulated is searched, replicas and
    recomputation included; the report says what the runtime lacks for the plan.  In the result times are nanoseconds
    and sizes bytes: `step_ns`, `estimates` of each stage, `optimality` (lower bound and gap), `alternatives`, `notes`.
    Raises UsageError, CaptureError, RefusedError, PlanError, InfeasibleError.
    """
    return planned(model, cluster, sample=sample, **options).plan


def planned(model: nn.Module, cluster: ClusterLike = None, *, sample: Any = None, **options: Any) -> Planned:
    """As `plan`, with the captured graph that the plan is for."""
    read = read_options(**options)
    batch = flatten(_given(sample, "plan"), with_target=read.loss_fn is not None)
    return make_plan(CaptureCache(model, read.loss_fn), batch, _cluster(cluster), read, EVERYTHING)


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

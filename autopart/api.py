"""The front door: compile, plan, simulate, verify, launch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from autopart.capture import CaptureCache
from autopart.capture.batch import flatten
from autopart.capture.export import LossFn
from autopart.costs.sources import CostSource
from autopart.files.clusters import parse_cluster
from autopart.ir.cluster import Cluster
from autopart.ir.errors import UsageError
from autopart.ir.plan import Plan, Precision
from autopart.ir.shares import Policy
from autopart.ir.timeline import Timeline
from autopart.options import Options, check_timeout, read_options
from autopart.passes.program.schedules import Order, Schedule
from autopart.passes.search.space import Watch
from autopart.planning import Planned, make_plan
from autopart.runtime.launch.local import launch as _launch
from autopart.session.compare import Verification, verify_step
from autopart.session.pipe import Pipe
from autopart.session.simulated import simulate_plan

ClusterLike = Cluster | str | os.PathLike[str] | None
"""A cluster, a YAML, TOML or JSON file, a text such as "cpu:2", or None: what the launcher and the devices say."""
PlanLike = Plan | str | os.PathLike[str]
LossReductionName = Literal["auto", "mean", "sum", "token-mean"]
NonFinite = Literal["auto", "skip", "raise"]
Recompute = Literal["auto", "off", "all"] | Sequence[str]
"""A word, or patterns of module paths."""
Transport = Literal["auto", "nccl", "gloo"]
Zero = Literal["auto", 0, 1]
Compress = Literal["bf16"]
OptimizerLike = str | torch.optim.Optimizer | Callable[..., torch.optim.Optimizer]
TokenSlices = Literal["auto"] | int | Iterable[int] | None
F = TypeVar("F", bound=Callable[..., Any])


def _with_options(function: F) -> F:
    """Put the documentation of the options, which stands once, behind that of a function."""
    function.__doc__ = f"{function.__doc__}\n\n    {Options.__doc__}"
    return function


@_with_options
def compile(
    model: nn.Module,
    cluster: ClusterLike = None,
    *,
    sample: Any = None,
    loss_fn: LossFn | None = None,
    loss_reduction: LossReductionName = "auto",
    stages: int | None = None,
    micro_batches: int | None = None,
    schedule: str | Order | Schedule = "auto",
    cuts: str | Iterable[str] = (),
    together: str | Iterable[str | Iterable[str]] = (),
    pins: Mapping[str, int] | None = None,
    replicas: int | Sequence[int] | None = None,
    replica_policy: Policy | None = None,
    token_slices: TokenSlices = None,
    recompute: Recompute = "auto",
    precision: Precision | None = None,
    sync_batchnorm: bool = False,
    zero: Zero = "auto",
    master_weights: bool = False,
    bucket_bytes: int | None = None,
    compress: Compress | None = None,
    non_finite: NonFinite = "auto",
    optimizer: OptimizerLike | None = None,
    costs: str | CostSource = "auto",
    prove: float = 0.0,
    cache: bool = True,
    watch: Watch | None = None,
    plan: PlanLike | None = None,
    seed: int = 0,
    timeout: float | None = None,
    transport: Transport = "auto",
) -> Pipe:
    """Turn an unmodified model into a running training pipeline.  Call it on every rank.

    model: any torch.nn.Module.  cluster: an `autopart.Cluster`, a YAML, TOML or JSON file, a text such as "cpu:2", or
    None for what the launcher's environment and the visible devices say.  sample: a batch as the model takes it (a
    mapping, a tuple, a pair of both, a tensor; with loss_fn a pair of inputs and target); without one the model is
    captured at the first step.  Only what the runtime can run is planned.

    Before any data is sent it raises UsageError (BatchError, ClusterError), CaptureError, RefusedError, PlanError
    (InfeasibleError when no plan fits the memory or the constraints).
    """
    options = read_options(
        loss_fn=loss_fn, loss_reduction=loss_reduction, stages=stages, micro_batches=micro_batches, schedule=schedule,
        cuts=cuts, together=together, pins=pins, replicas=replicas, token_slices=token_slices,
        recompute=recompute, optimizer=optimizer,
        costs=costs, prove=prove, cache=cache, watch=watch, plan=plan, seed=seed, timeout=timeout,
        transport=transport, precision=precision, zero=zero, bucket_bytes=bucket_bytes,
        compress=compress, non_finite=non_finite, replica_policy=replica_policy,
        sync_batchnorm=sync_batchnorm, master_weights=master_weights,
    )  # fmt: skip
    return Pipe(CaptureCache(model, loss_fn), _cluster(cluster), options, sample)


@_with_options
def plan(
    model: nn.Module,
    cluster: ClusterLike = None,
    *,
    sample: Any,
    loss_fn: LossFn | None = None,
    loss_reduction: LossReductionName = "auto",
    stages: int | None = None,
    micro_batches: int | None = None,
    schedule: str | Order | Schedule = "auto",
    cuts: str | Iterable[str] = (),
    together: str | Iterable[str | Iterable[str]] = (),
    pins: Mapping[str, int] | None = None,
    replicas: int | Sequence[int] | None = None,
    replica_policy: Policy | None = None,
    token_slices: TokenSlices = None,
    recompute: Recompute = "auto",
    precision: Precision | None = None,
    sync_batchnorm: bool = False,
    zero: Zero = "auto",
    master_weights: bool = False,
    bucket_bytes: int | None = None,
    compress: Compress | None = None,
    non_finite: NonFinite = "auto",
    optimizer: OptimizerLike | None = None,
    costs: str | CostSource = "auto",
    prove: float = 0.0,
    cache: bool = True,
    watch: Watch | None = None,
    plan: PlanLike | None = None,
    seed: int = 0,
    timeout: float | None = None,
    transport: Transport = "auto",
) -> Plan:
    """The plan alone: needs no process group and no weights (the model may be on the meta device).

    sample is required.  All that can be simulated is searched, replicas and recomputation included; the plan's table
    says what the runtime lacks for it.  In the result times are nanoseconds and sizes bytes.  Raises UsageError,
    CaptureError, RefusedError, PlanError, InfeasibleError.
    """
    options = read_options(
        loss_fn=loss_fn, loss_reduction=loss_reduction, stages=stages, micro_batches=micro_batches, schedule=schedule,
        cuts=cuts, together=together, pins=pins, replicas=replicas, token_slices=token_slices,
        recompute=recompute, optimizer=optimizer,
        costs=costs, prove=prove, cache=cache, watch=watch, plan=plan, seed=seed, timeout=timeout,
        transport=transport, precision=precision, zero=zero, bucket_bytes=bucket_bytes,
        compress=compress, non_finite=non_finite, replica_policy=replica_policy,
        sync_batchnorm=sync_batchnorm, master_weights=master_weights,
    )  # fmt: skip
    return planned(model, cluster, sample, options).plan


@_with_options
def verify(
    model: nn.Module,
    cluster: ClusterLike = None,
    *,
    sample: Any,
    tolerance: float | None = None,
    loss_fn: LossFn | None = None,
    loss_reduction: LossReductionName = "auto",
    stages: int | None = None,
    micro_batches: int | None = None,
    schedule: str | Order | Schedule = "auto",
    cuts: str | Iterable[str] = (),
    together: str | Iterable[str | Iterable[str]] = (),
    pins: Mapping[str, int] | None = None,
    replicas: int | Sequence[int] | None = None,
    replica_policy: Policy | None = None,
    token_slices: TokenSlices = None,
    recompute: Recompute = "auto",
    precision: Precision | None = None,
    sync_batchnorm: bool = False,
    zero: Zero = "auto",
    master_weights: bool = False,
    bucket_bytes: int | None = None,
    compress: Compress | None = None,
    non_finite: NonFinite = "auto",
    optimizer: OptimizerLike | None = None,
    costs: str | CostSource = "auto",
    prove: float = 0.0,
    cache: bool = True,
    watch: Watch | None = None,
    plan: PlanLike | None = None,
    seed: int = 0,
    timeout: float | None = None,
    transport: Transport = "auto",
) -> Verification:
    """One training step of the pipeline against the same step in one process, on copies of the model.

    tolerance: largest relative error of the loss, of each gradient and of each buffer; None for 1e-10 in fp64 and
    1e-5 in fp32 (by the coarsest type that a gradient flows through).  Call it on every rank, as `compile`; every
    rank gets the same result: `.ok`, `.table()`, `.gradients`.  Raises what `compile` and `Pipe.step` raise.
    """
    options = read_options(
        loss_fn=loss_fn, loss_reduction=loss_reduction, stages=stages, micro_batches=micro_batches, schedule=schedule,
        cuts=cuts, together=together, pins=pins, replicas=replicas, token_slices=token_slices,
        recompute=recompute, optimizer=optimizer,
        costs=costs, prove=prove, cache=cache, watch=watch, plan=plan, seed=seed, timeout=timeout,
        transport=transport, precision=precision, zero=zero, bucket_bytes=bucket_bytes,
        compress=compress, non_finite=non_finite, replica_policy=replica_policy,
        sync_batchnorm=sync_batchnorm, master_weights=master_weights,
    )  # fmt: skip
    return checked(model, cluster, sample, options, tolerance)


def simulate(
    plan: PlanLike,
    model: nn.Module,
    cluster: ClusterLike = None,
    *,
    sample: Any,
    loss_fn: LossFn | None = None,
    optimizer: OptimizerLike | None = None,
    master_weights: bool = False,
    costs: str | CostSource | None = None,
) -> Timeline:
    """One step of a plan as the simulator sees it, action by action, in nanoseconds and bytes.

    plan: a Plan or the path of a plan file.  model, cluster, sample, loss_fn, optimizer, master_weights: what it was
    made for; the model may be on the meta device.  costs: as in `plan`; None for the source that the plan names.  Of
    replicas the first rank is shown; of an asynchronous schedule one step by itself.  `save_trace` writes it for a
    viewer.  Raises UsageError, CaptureError, and PlanError for a plan of another model, shape, torch release or number
    of ranks.
    """
    options = read_options(
        plan=plan, loss_fn=loss_fn, optimizer=optimizer, master_weights=master_weights, costs=costs or "auto"
    )
    return simulated(model, cluster, sample, options)[1]


def launch(fn: Callable[..., Any], cluster: ClusterLike = None, *args: Any, timeout: float | None = None) -> list[Any]:
    """Run fn(*args) on every rank of a cluster in local processes and return the results by rank.

    Under torchrun, srun or mpirun this process is one of the ranks and fn is simply called.  timeout: seconds for
    everything but planning, None for no limit.  Raises WorkerError with the first cause when a process dies, is stopped
    or runs out of time, and what fn raised on a rank.
    """
    if timeout is not None:
        check_timeout(timeout)
    machines = _cluster(cluster)
    return _launch(fn, machines.world, *args, timeout=timeout, local=machines.levels[0].size)


def planned(model: nn.Module, cluster: ClusterLike, sample: Any, options: Options) -> Planned:
    """As `plan`, with the captured graph that the plan is for."""
    batch = flatten(_given(sample, "plan"), with_target=options.loss_fn is not None)
    return make_plan(CaptureCache(model, options.loss_fn), batch, _cluster(cluster), options, to_run=False)


def simulated(model: nn.Module, cluster: ClusterLike, sample: Any, options: Options) -> tuple[Planned, Timeline]:
    """As `planned`, with the simulated step."""
    capturer, machines = CaptureCache(model, options.loss_fn), _cluster(cluster)
    batch = flatten(_given(sample, "simulate"), with_target=options.loss_fn is not None)
    made = make_plan(capturer, batch, machines, options, to_run=False)
    return made, simulate_plan(made, capturer, batch, machines, options)


def checked(
    model: nn.Module, cluster: ClusterLike, sample: Any, options: Options, tolerance: float | None
) -> Verification:
    """As `verify`, with options that are read already."""
    return verify_step(model, _cluster(cluster), _given(sample, "verify"), options, tolerance)


def _given(sample: Any, what: str) -> Any:
    if sample is None:
        raise UsageError(f"{what} needs a sample", fix="pass sample=batch: one batch as the model takes it")
    return sample


def _cluster(cluster: ClusterLike) -> Cluster:
    return parse_cluster(cluster, cuda_devices=torch.cuda.device_count())

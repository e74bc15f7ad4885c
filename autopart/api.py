"""The front door: compile, plan, simulate, verify, launch."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from inspect import cleandoc
from typing import Any, TypeVar, Unpack

import torch
from torch import nn

from autopart.batch.batch import Batch, flatten
from autopart.capture import CaptureCache
from autopart.capture.trace.export import LossFn
from autopart.costs.sources import CostSource
from autopart.files.clusters import parse_cluster
from autopart.ir.cluster import Cluster
from autopart.ir.errors import PlanError, RefusedError, UsageError, short_errors
from autopart.ir.graph import Graph
from autopart.ir.plan import Plan
from autopart.ir.timeline import Timeline
from autopart.launcher import living_devices
from autopart.options import OPTIONS, OptimizerLike, Options, OptionsDict, PlanLike, read_options
from autopart.passes.ops.flops import model_flops
from autopart.passes.simulation.estimate import timeline_of
from autopart.pipe.compare import Verification, verify_step
from autopart.pipe.pipe import Pipe
from autopart.planning.derive.token_axis import sequence_length
from autopart.planning.make import make_plan, precision_of, read_plan
from autopart.planning.simulated import estimated_plan, of_every_rank
from autopart.report.comparison import Answer
from autopart.runtime.launch.local import launch as _launch

ClusterLike = Cluster | str | os.PathLike[str] | None
"""A cluster, a YAML, TOML or JSON file, a text such as "cpu:2", or None: from the launcher and the visible devices."""
F = TypeVar("F", bound=Callable[..., Any])


def _with_options(function: F) -> F:
    """Append the documentation of the options to that of a function, and keep internal frames out of its errors."""
    function.__doc__ = f"{cleandoc(str(function.__doc__))}\n\n{cleandoc(str(Options.__doc__))}"
    return short_errors(function)


@_with_options
def compile(
    model: nn.Module, cluster: ClusterLike = None, *, sample: Any = None, **options: Unpack[OptionsDict]
) -> Pipe:
    """Turn an unmodified model into a running training pipeline.  Call it on every rank.

    model: any torch.nn.Module.  cluster: an `autopart.Cluster`, a YAML, TOML or JSON file, a text such as "cpu:2", or
    None: from the launcher and the visible devices.  sample: one batch as the model takes it (a mapping, a tuple,
    a pair of both, a tensor; with loss_fn a pair of inputs and target).  Without a sample the model is captured at the
    first step.  The logger "autopart" reports the phases at level INFO.

    Raises UsageError (BatchError, ClusterError), CaptureError, RefusedError and PlanError (InfeasibleError when no plan
    fits the memory or the constraints) before any data is sent.
    """
    read = read_options(**options)
    return Pipe(CaptureCache(model, read.loss_fn), _cluster(cluster), read, sample)


@_with_options
def plan(model: nn.Module, cluster: ClusterLike = None, *, sample: Any, **options: Unpack[OptionsDict]) -> Plan:
    """Plan a model without running it: needs no process group and no weights (the model may be on the meta device).

    model, cluster: as in `compile`.  sample: one batch, required.  Times of the result are in nanoseconds, sizes in
    bytes.  Raises UsageError, CaptureError, RefusedError, PlanError, InfeasibleError.
    """
    return planned(model, cluster, sample, read_options(**options))[0]


@_with_options
def verify(
    model: nn.Module,
    cluster: ClusterLike = None,
    *,
    sample: Any,
    tolerance: float | None = None,
    **options: Unpack[OptionsDict],
) -> Verification:
    """Compare one training step of the pipeline with the same step in one process, on copies of the model.

    tolerance: largest relative error of the loss, of each gradient and of each buffer; None: 1e-10 in fp64 and 1e-5 in
    fp32 (by the least precise dtype that a gradient flows through).  Call it on every rank, like `compile`; every rank
    gets the same result: `.ok`, `.table()`, `.gradients`.  Raises as `compile` and `Pipe.step`.
    """
    read = read_options(**options)
    return verify_step(model, _cluster(cluster), _given(sample, "verify"), read, tolerance)


@short_errors
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
    """Simulate one step of a plan, action by action, in nanoseconds and bytes.

    plan: a Plan or the path of a plan file.  model, cluster, sample, loss_fn, optimizer, master_weights: as for the
    plan; the model may be on the meta device.  costs: as in `plan`; None: the source that the plan names.  The timeline
    shows the first replica of each stage, with tensor parallelism all of its ranks, and a single step of an
    asynchronous schedule.  `save_trace` writes it for a viewer.  Raises UsageError, CaptureError, and PlanError for a
    plan of another model, shape, torch release or number of ranks.
    """
    options = read_options(plan=plan, loss_fn=loss_fn, optimizer=optimizer, master_weights=master_weights, costs=costs)
    return simulated(model, cluster, sample, options)[2]


@short_errors
def launch(
    fn: Callable[..., Any],
    cluster: ClusterLike = None,
    *args: Any,
    timeout: float | None = None,
    restarts: int = 0,
    grace: float = 30.0,
    elastic: tuple[int, int] | None = None,
    rejoin: float | None = 60.0,
) -> list[Any]:
    """Run fn(*args) on every rank of a cluster in local processes and return the results by rank.

    Under torchrun, srun or mpirun this process is one of the ranks, and fn is simply called.  timeout: seconds for
    everything but planning, None: no limit.

    restarts: how often all ranks are restarted, as new processes, after one of them has failed; fn loads the last
    checkpoint (`Pipe.load`) and continues.  The variable TORCHELASTIC_RESTART_COUNT holds the number of restarts so
    far.  The pause before a restart doubles while ranks fail early; an error that is raised twice with the same message
    and place ends the run.  torchrun restarts by itself (--max-restarts), and restarts= has no effect there.

    grace: seconds between SIGTERM to this process and the end of ranks that still run.  SIGTERM and SIGUSR1 are passed
    on to the ranks (`Pipe.stop_requested`); a second SIGTERM kills them at once.  Nothing is restarted after a signal.

    elastic: (least, most) numbers of ranks between which the run continues when processes die.  The remaining ranks
    start again at once, without counting as a restart, and `compile` with the cluster of this launch, or with None,
    plans for their devices.  rejoin: seconds after which a lost device is used again, None for never: all ranks then
    see `Pipe.stop_requested`, save and return, and start again together.  See docs/running.md.

    Raises WorkerError with the first cause if a process dies, is stopped or runs out of time, and the error that fn
    raised on a rank.
    """
    if timeout is not None:
        OPTIONS["timeout"].values.read("timeout", timeout)
    _require_seconds("grace", grace, "pass the seconds that ranks have after SIGTERM")
    if rejoin is not None:
        _require_seconds("rejoin", rejoin, "pass the seconds after which a lost device is used again, or None")
    if not isinstance(restarts, int) or isinstance(restarts, bool) or restarts < 0:
        raise UsageError(f"restarts is {restarts!r}", where="launch", fix="pass a number of restarts of at least 0")
    machines = parse_cluster(cluster, cuda_devices=torch.cuda.device_count())
    if elastic is not None:
        elastic = _checked_elastic(elastic, machines.world)
    if not callable(fn):
        raise UsageError(
            f"launch was given a {type(fn).__name__} ({fn!r}), not a function",
            why="it calls a function on every rank, with the arguments after the cluster",
            fix=f"pass a function: launch(train, cluster); start a script with torchrun --nproc-per-node "
            f"{machines.levels[0].size} train.py",
        )
    return _launch(
        fn, machines.world, *args, timeout=timeout, local=machines.levels[0].size, restarts=restarts, grace=grace,
        elastic=elastic, rejoin=math.inf if rejoin is None else rejoin,
    )  # fmt: skip


def _require_seconds(name: str, value: object, fix: str) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise UsageError(f"{name} is {value!r}", where="launch", fix=fix)


def _checked_elastic(elastic: object, world: int) -> tuple[int, int]:
    match elastic:
        case (int(least), int(most)) if 1 <= least <= most <= world:
            return least, most
    raise UsageError(
        f"elastic is {elastic!r}",
        where="launch",
        why=f"the cluster has {world} devices",
        fix="pass (least, most), the smallest and the largest number of ranks of the run",
    )


def planned(model: nn.Module, cluster: ClusterLike, sample: Any, options: Options) -> tuple[Plan, Graph]:
    """Plan, and return the plan with the captured graph."""
    captures, machines = CaptureCache(model, options.loss_fn), _cluster(cluster)
    batch = _sample(sample, "plan", options)
    made = make_plan(captures, batch, machines, options, to_run=False)
    return made.plan, made.captured.graph


def simulated(model: nn.Module, cluster: ClusterLike, sample: Any, options: Options) -> tuple[Plan, Graph, Timeline]:
    """Plan, and return the plan with the captured graph and a simulated step."""
    captures, machines = CaptureCache(model, options.loss_fn), _cluster(cluster)
    batch = _sample(sample, "simulate", options)
    made = make_plan(captures, batch, machines, options, to_run=False)
    estimated = estimated_plan(made.plan, made.captured, captures, batch, machines, options)
    return made.plan, made.captured.graph, of_every_rank(timeline_of(*estimated), made.plan.decision.shards)


def answered(model: nn.Module, sample: Any, questions: Iterable[tuple[str, ClusterLike, Options]]) -> Iterator[Answer]:
    """Yield the plan for each question (name, cluster, options), captured once for each precision and kind of device.

    A question that has no plan is answered with the reason.  Raises CaptureError, and ClusterError for a cluster that
    cannot be read.
    """
    known: dict[tuple[str, str], CaptureCache] = {}
    for name, cluster, options in questions:
        machines = _cluster(cluster)
        kind = precision_of(options, read_plan(options)), machines.kind
        captures = known.setdefault(kind, CaptureCache(model, options.loss_fn))
        batch = _sample(sample, "plan", options)
        answer = Answer(name, machines, sequence_length(batch))
        try:
            made = make_plan(captures, batch, machines, options, to_run=False)
        except (PlanError, UsageError, RefusedError) as error:
            yield replace(answer, refused=error)
        else:
            graph = made.captured.graph
            yield replace(answer, plan=made.plan, graph=graph, flops=model_flops(graph))


def _given(sample: Any, what: str) -> Any:
    if sample is None:
        raise UsageError(f"{what} needs a sample", fix="pass sample=batch: one batch as the model takes it")
    return sample


def _sample(sample: Any, what: str, options: Options) -> Batch:
    return flatten(_given(sample, what), with_target=options.loss_fn is not None, rows_axis=options.rows_axis)


def _cluster(cluster: ClusterLike) -> Cluster:
    """Return the cluster; in a rank of an elastic launch, of the cluster of that launch the devices that have ranks."""
    whole, living = parse_cluster(cluster, cuda_devices=torch.cuda.device_count()), living_devices()
    return whole.part(living.devices) if living is not None and whole.world == living.of else whole

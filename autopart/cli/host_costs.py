"""What the hosts of this machine spend on a step besides its ops: processor time of real steps, less that of the ops.

A model of 24 small layers is trained for some steps under five plans, and as it is, in plain torch.  What a rank needs
beyond plain torch is the host's: of one micro-batch and of many it tells the time of a compute and of a step, of one
and of many in two stages that of a message, of replicas that of a sum.  On CPUs the threads that carry messages count
too, since they run on the cores that compute; beside GPUs the main thread alone.  Processor time does not count
waiting; what a rank waits for the others once a step, in the exchanges in which all agree, is the time on the clock
that a step of one rank takes beyond its processor time, while the others have nothing to do but to take part in these
exchanges.

Medians of many steps count: what threads of messages cost varies from step to step, and a step has the mean.  Wrong
where what is fixed here grows with the model (the number of its parameters, of values between stages), and for
optimizers: to update many small parameters takes a host longer than their bytes say.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from autopart.capture import CaptureCache
from autopart.costs.detect import detect, rounded
from autopart.ir.cluster import UNMEASURED, Cluster, HostCosts
from autopart.options import read_options
from autopart.pipe.pipe import Pipe
from autopart.runtime.launch.local import launch, under_torchrun

_LAYERS, _WIDTH, MICROS, _ROWS = 24, 16, 16, 32
_WARM_UPS, _STEPS = 5, 60
_LIMIT_S = 300.0
"""Time limit of the local processes."""


def detect_all(ranks: int | None = None) -> Cluster:
    """Measure this machine as `costs.detect` does, and what its hosts spend; under torchrun all machines of the launch.

    Takes about half a minute.  Raises as `detect`.
    """
    found = detect(ranks)
    limit: dict[str, Any] = {} if under_torchrun() else {"timeout": _LIMIT_S}
    host: HostCosts = launch(measured_host, found.world, found, **limit)[0]
    return replace(found, host=host)


def measured_host(cluster: Cluster) -> HostCosts:
    """Return what a rank's host spends; every rank calls it and returns the same."""
    threads, world = torch.get_num_threads(), cluster.world
    torch.set_num_threads(1)
    try:
        one, waited_ns = _spent(cluster, (0,), stages=1, replicas=1, micro_batches=1)
        many, _ = _spent(cluster, (0,), stages=1, replicas=1, micro_batches=MICROS)
        staged = replicated = None
        summing_ns = 0.0
        if world > 1:
            staged = (
                _spent(cluster, (0, 1), stages=2, replicas=1, micro_batches=1)[0],
                _spent(cluster, (0, 1), stages=2, replicas=1, micro_batches=MICROS)[0],
            )
            replicated, summing_ns = _spent(cluster, range(world), stages=1, replicas=world, micro_batches=1, zero=0)
    finally:
        torch.set_num_threads(threads)
    waits = Waits(waited_ns, max(0.0, summing_ns - waited_ns))
    return host_costs(one, many, staged, replicated, world=world, waits=waits)


class Waits(NamedTuple):
    """Nanoseconds on the clock that a rank waits for others: once a step, and in the sum of one bucket."""

    step_ns: float = 0.0
    sum_ns: float = 0.0


def host_costs(
    one: float,
    many: float,
    staged: tuple[float, float] | None,
    replicated: float | None,
    *,
    world: int,
    waits: Waits,
) -> HostCosts:
    """Return the costs that explain what ranks spend, each at least 0.

    one: nanoseconds of processor time that a step of one micro-batch takes on one rank, less those of its ops.  many:
    of `MICROS`.  staged: the same two in two stages.  replicated: of one, on all `world` ranks.  The last two are None
    where there is one rank.

    m micro-batches on one rank take step + 2 m compute.  In two stages each takes four computes and two messages with
    two ends each, whatever the steps of a part of the model take.  n replicas take n steps, 2 n computes, and n times
    the sum of one bucket.
    """
    compute = max(0.0, (many - one) / (2 * (MICROS - 1)))
    step = max(0.0, one - 2 * compute)
    message = summed = 0.0
    if staged is not None:
        message = max(0.0, (staged[1] - staged[0]) / (4 * (MICROS - 1)) - compute)
    if replicated is not None:
        summed = max(0.0, replicated / world - step - 2 * compute) + waits.sum_ns
    return HostCosts(*(rounded(ns) if ns >= 1 else 0 for ns in (compute, message, summed, step + waits.step_ns)))


def _spent(cluster: Cluster, ranks: Sequence[int], **options: Any) -> tuple[float, float]:
    """Return the processor time that these ranks, which run stages, spend on a step besides its ops, and what the first
    of them waits in it, in nanoseconds.  Collective.

    All ranks run the ops at the same time; the fastest one counts.
    """
    replicas, micros = options["replicas"], options["micro_batches"]
    asked = read_options(loss_fn=_loss, optimizer="sgd", costs="analytic", cache=False, schedule="1f1b", **options)
    batch = _batch(_ROWS)
    clock = time.process_time_ns if cluster.kind == "cpu" else time.thread_time_ns
    with Pipe(CaptureCache(_model(), _loss), replace(cluster, host=UNMEASURED), asked, batch) as pipe:
        mine = _taken(lambda: pipe.step(batch), list(pipe.parameters()), clock)
        ops = _plain_ns(_ROWS // (replicas * micros), micros)
        found = pipe.session.world.gather_numbers([mine.spent, ops, mine.waited])
        pipe.close(sync=False)
    spent: float = sum(found[rank][0] for rank in ranks) - replicas * min(row[1] for row in found)
    return spent, found[ranks[0]][2]


def _plain_ns(rows: int, micros: int) -> float:
    """Return the processor time of the ops of a step, in plain torch.  rows: of each micro-batch."""
    model, (given, wanted) = _model(), _batch(max(1, rows))

    def step() -> None:
        for _ in range(micros):
            torch.autograd.backward(_loss(model(given), wanted) / micros)

    return _taken(step, list(model.parameters()), time.thread_time_ns).spent


class _Taken(NamedTuple):
    """Median nanoseconds of steps.  spent: processor time.  waited: the other time on the clock."""

    spent: float
    waited: float


def _taken(step: Callable[[], object], parameters: Sequence[nn.Parameter], clock: Callable[[], int]) -> _Taken:
    """Return what steps take that begin without gradients."""
    spent, waited = [], []
    for number in range(_WARM_UPS + _STEPS):
        for parameter in parameters:
            parameter.grad = None
        began, began_at = clock(), time.perf_counter_ns()
        step()
        if number >= _WARM_UPS:
            spent.append(clock() - began)
            waited.append(max(0, time.perf_counter_ns() - began_at - spent[-1]))
    return _Taken(float(statistics.median(spent)), float(statistics.median(waited)))


_loss = nn.functional.mse_loss


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))


def _batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(rows, _WIDTH), torch.zeros(rows, _WIDTH)

"""Training steps that end-to-end tests run on every rank of a worker pool, each compared with one process.

The processes of a pool keep their captures, so that all tests of one model capture it once for each number of rows.
Jobs that test `autopart.compile` itself call it directly and capture again.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import autopart
from autopart.capture import CaptureCache
from autopart.files.clusters import parse_cluster
from autopart.ir.errors import AutopartError
from autopart.options import read_options
from autopart.pipe.pipe import Pipe
from support.layouts import LAID
from support.models.peer_models import PEERS, tokens
from support.models.small_models import SMALL, Small
from support.models.tokens.causal_zoo import CAUSAL, REFUSED
from support.models.zoo import CASES, Case
from support.oracles import fake_nccl  # noqa: F401  registers the transport
from support.oracles.one_process import Difference, Expected, difference, plain_step

ALL = {**SMALL, **PEERS}
EVERY: dict[str, Small | Case] = {**ALL, **CASES, **CAUSAL, **REFUSED, **LAID}


Counts = tuple[int, ...]


def replica_options(counts: Counts, micros: int, **options: Any) -> dict[str, Any]:
    """Return the options for `counts` replicas of each stage."""
    return {"stages": len(counts), "replicas": counts, "micro_batches": micros, "schedule": "1f1b", **options}


def cluster() -> str:
    """Return the name of a CPU cluster with all ranks of the pool."""
    torch.set_num_threads(1)
    return f"cpu:{os.environ.get('WORLD_SIZE', '1')}"


@functools.cache
def _captures(name: str, dtype: torch.dtype, precision: str) -> tuple[CaptureCache, dict[str, torch.Tensor]]:
    """Return the captures of a model for one precision, and its initial weights."""
    case = EVERY[name]
    model = case.model(dtype=dtype)
    return CaptureCache(model, case.loss_fn), {k: v.clone() for k, v in model.state_dict().items()}


def fresh(name: str, dtype: torch.dtype = torch.float32, precision: str = "fp32") -> CaptureCache:
    """Return the captures of a model with its initial weights, no gradients, in training mode."""
    captures, first = _captures(name, dtype, precision)
    captures.model.load_state_dict(first)
    captures.model.zero_grad()
    captures.model.train()
    return captures


def compiled(case: Small | Case, model: nn.Module | CaptureCache, sample: Any, **options: Any) -> Pipe:
    """Return a pipe over all ranks of the pool, by `autopart.compile` for a model or from captures that are kept."""
    one_each = {} if "plan" in options else {"replicas": 1}  # tests of replicas pass their own
    options = {"costs": "analytic", "loss_fn": case.loss_fn, **one_each, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autopart.CaptureWarning)
        if isinstance(model, nn.Module):
            return autopart.compile(model, cluster(), sample=sample, **options)
        return Pipe(model, parse_cluster(cluster()), read_options(**options), sample)


def refusal_of(call: Callable[[], Any]) -> AutopartError | None:
    """Return the autopart error that a call raises, or None."""
    try:
        call()
    except AutopartError as error:
        return error
    return None


def compared(pipe: autopart.Pipe, loss: torch.Tensor, plain: torch.Tensor, model: nn.Module) -> Difference | None:
    """Compare loss, gradients and buffers of a pipe with those of a model in one process. Collective; returned by rank
    0.
    """
    found, state = pipe.gradients(), pipe.state_dict()
    return difference(loss.item(), found, state, Expected.of(plain, model)) if pipe.rank == 0 else None


@functools.cache
def expected_of(name: str, dtype: torch.dtype, rows: int, micros: int, without: tuple[str, ...] = ()) -> Expected:
    """Return the results of a step in one process. without: batch keys to leave out."""
    case = EVERY[name]
    model, batch = case.model(dtype=dtype), case.data(rows, dtype)
    if without:
        batch = {key: value for key, value in batch.items() if key not in without}
    return Expected.of(plain_step(case, model, batch, micros), model)


def compare(name: str, stages: int | None) -> tuple[float, Difference | None, int]:
    """Compare one training step with one process.

    Every rank returns its loss and the number of stages, rank 0 also the difference.
    """
    case = EVERY[name]
    batch = case.data(10)
    with compiled(case, fresh(name), batch, stages=stages, schedule="1f1b", micro_batches=2) as pipe:
        loss, ran = pipe.step(batch).item(), len(pipe.plan.stages)
        found, state, leads = pipe.gradients(), pipe.state_dict(), pipe.rank == 0
    return loss, difference(loss, found, state, expected_of(name, torch.float32, 10, 1)) if leads else None, ran


def accumulate(name: str, stages: int, schedule: str, micros: int, sizes: list[int]) -> Any:
    """Accumulate steps of different sizes and compare the summed gradients and the last loss with one process."""
    case = ALL[name]
    reference = case.model()
    options = {"stages": stages, "schedule": schedule, "micro_batches": micros}
    pipe = compiled(case, fresh(name), case.batch(sizes[0]), **options)
    for rows in sizes:
        loss = pipe.step(case.batch(rows))
        expected = plain_step(case, reference, case.batch(rows), micros)
    return compared(pipe, loss, expected, reference)


def lengths(stages: int, shapes: list[tuple[int, int]]) -> Any:
    """Step the tied language model over batches of these (rows, length); return one difference each."""
    case = ALL["tied"]
    captures, reference = fresh("tied"), case.model()
    found = []
    pipe = None
    for rows, length in shapes:
        batch = tokens(rows, length)
        if pipe is None:
            pipe = compiled(case, captures, batch, stages=stages, schedule="1f1b", micro_batches=2)
        for model in (captures.model, reference):
            model.zero_grad()
        loss = pipe.step(batch)
        found.append(compared(pipe, loss, plain_step(case, reference, batch, 2), reference))
    return found


def warned(name: str) -> list[str]:
    """Return the warnings of compile."""
    case = ALL[name]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        autopart.compile(
            case.model(), cluster(), sample=case.batch(8), loss_fn=case.loss_fn, micro_batches=2, costs="analytic"
        )
    return [str(w.message) for w in seen if issubclass(w.category, autopart.CaptureWarning)]


def frozen_gradients(name: str) -> Any:
    """Return which parameters held here require and have a gradient after a step, and all names with a gradient."""
    case = ALL[name]
    pipe = compiled(case, fresh(name), case.batch(8), micro_batches=2, stages=4)
    pipe.step(case.batch(8))
    held = {n: (p.requires_grad, p.grad is not None) for n, p in pipe.named_parameters() if p.numel()}
    return held, set(pipe.gradients())

"""One training step of an architecture of the zoo, in stages, against the plain model."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, replace
from typing import Any

import torch
from in_process import CPU, replay
from zoo_models import find

from autopart.capture import CaptureCache
from autopart.capture.batch import Batch, flatten
from autopart.files.clusters import parse_cluster
from autopart.ir.errors import AutopartError
from autopart.ir.graph import LossReduction
from autopart.options import Options, read_options
from autopart.planning import Planned, make_plan
from autopart.runtime.tensors import LocalTensors
from autopart.session.compare import (
    BUFFERS,
    PLAIN,
    RANDOM,
    Outcome,
    Verification,
    compared,
    couples_rows,
    fresh_copy,
    plain_outcome,
    precision_of,
    verify_step,
)
from autopart.session.stage_code import StageCode

ROWS, STAGES, MICROS = 8, 3, 4
EXACT, REFUSED, WRONG, CRASHED, BROKEN = "exact", "refused", "wrong", "crashed", "not run"


@dataclass(frozen=True)
class Row:
    """What became of one architecture.

    verdict: "exact"; "refused", by one of our own errors; "wrong"; "crashed", by any other error, a time-out or a
    signal; "not run": the plain model itself failed.  error: the largest relative error of a gradient.
    """

    name: str
    kind: str
    model: str
    verdict: str
    error: float = 0.0
    loss_error: float = 0.0
    cause: str = ""
    why: str = ""
    where: str = ""
    fix: str = ""
    reference: str = ""
    stages: int = 0
    parameters: int = 0
    seconds: float = 0.0


def step(name: str, *, processes: bool = False) -> Row:
    """One step of this architecture: planned for three stages that this process plays one after another, or for two
    real processes."""
    arch = find(name)
    began = time.perf_counter()
    row = Row(name, arch.kind, arch.model, BROKEN)
    try:
        model, sample = arch.make(), arch.batch(ROWS)
        batch = flatten(sample, with_target=arch.loss is not None)
        plain = plain_outcome(fresh_copy(model), batch, arch.loss, (ROWS,), [1.0])
        row = replace(row, parameters=len(plain.gradients))
    except Exception as error:
        return _ended(replace(row, **_told(error)), began)
    try:
        run = _in_processes if processes else _in_process
        found = run(model, sample, batch, arch.loss, plain)
        verdict = replace(row, verdict=EXACT if found.ok else WRONG, stages=2 if processes else STAGES)
        verdict = replace(verdict, error=found.largest, loss_error=found.loss_error, reference=found.reference)
        if not found.ok:
            worst = [f"{d.kind} {d.name}: {d.error:.1e}" for d in (*found.gradients, *found.buffers) if not d.ok]
            verdict = replace(
                verdict, cause=f"loss {found.loss:.6g} for {found.expected_loss:.6g}", why="; ".join(worst[:3])
            )
    except AutopartError as error:
        told = {
            "cause": f"{type(error).__name__}: {error.what}",
            "why": error.why,
            "where": error.where,
            "fix": error.fix,
        }
        verdict = replace(row, verdict=REFUSED, **told)
    except Exception as error:
        verdict = replace(row, verdict=CRASHED, **_told(error))
    return _ended(verdict, began)


def _ended(row: Row, began: float) -> Row:
    return replace(row, seconds=round(time.perf_counter() - began, 2))


def _told(error: BaseException) -> dict[str, str]:
    first = (str(error).splitlines() or [""])[0]
    place = traceback.extract_tb(error.__traceback__)[-1]
    return {"cause": f"{type(error).__name__}: {first}", "where": f"{place.filename}:{place.lineno}"}


def _options(loss: Any, stages: int) -> Options:
    return read_options(
        loss_fn=loss, stages=stages, micro_batches=MICROS, costs="analytic", schedule="1f1b", recompute="off",
        optimizer="sgd", cache=False,
    )  # fmt: skip


def _in_processes(model: Any, sample: Any, batch: Batch, loss: Any, plain: Outcome) -> Verification:
    """On two ranks, as a user would verify."""
    import autopart

    return autopart.launch(_rank, "cpu:2", model, sample, loss)[0]


def _rank(model: Any, sample: Any, loss: Any) -> Verification:
    torch.set_num_threads(1)
    return verify_step(model, parse_cluster("cpu:2"), sample, _options(loss, 2))


def _in_process(model: Any, sample: Any, batch: Batch, loss: Any, plain: Outcome) -> Verification:
    """Planned, split and played here."""
    made = _planned(model, batch, loss, STAGES)
    graph, rows = made.captured.graph, made.plan.micro_rows
    shares = loss_shares(made, batch)
    found = _played(made, batch, shares)
    reference, expected = PLAIN, plain
    if any(op.random for op in graph.ops):
        reference, expected = RANDOM, _played(_planned(model, batch, loss, 1), batch, shares)
    elif graph.updates or couples_rows(graph):
        reference, expected = BUFFERS, plain_outcome(fresh_copy(model), batch, loss, rows, shares)
    return compared(found, expected, {}, precision_of(graph), None, reference)


def _planned(model: Any, batch: Batch, loss: Any, stages: int) -> Planned:
    captures = CaptureCache(fresh_copy(model), loss)
    return make_plan(captures, batch, parse_cluster(f"cpu:{stages}"), _options(loss, stages))


def _played(made: Planned, batch: Batch, shares: list[float]) -> Outcome:
    micros = _micros(made, batch)
    played = replay(made.captured, made.plan, micros, shares)
    return Outcome(played.loss.item(), played.gradients, played.buffers)


def _micros(made: Planned, batch: Batch) -> list[dict[str, torch.Tensor]]:
    names = made.captured.graph.inputs
    return [dict(zip(names, piece, strict=True)) for piece in batch.micro(made.plan.micro_rows)]


def loss_shares(made: Planned, batch: Batch) -> list[float]:
    """Share of each micro-batch's loss in the whole loss, as the rank of the first stage counts it."""
    rows, weight = made.plan.micro_rows, made.weight
    if weight.kind == "sum":
        return [1.0] * len(rows)
    if weight.value is None:
        return [count / sum(rows) for count in rows]
    counts = [_count(made, weight, inputs) for inputs in _micros(made, batch)]
    return [count / sum(counts) if sum(counts) else 1 / len(counts) for count in counts]


def _count(made: Planned, weight: LossReduction, inputs: dict[str, torch.Tensor]) -> float:
    code = StageCode(LocalTensors(CPU), CPU)
    assert weight.value is not None
    code.add_counter(made.captured, weight.value)
    return code.count(weight, made.captured.graph.rows, inputs)

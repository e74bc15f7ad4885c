"""Batch statistics of stages with replicas, compared with one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

import autopart
from autopart.ir.errors import AutopartError
from autopart.ir.plan import Plan, Stage
from autopart.session.step.parts import micro_cut
from support.jobs.replica_jobs import Counts, replica_options
from support.jobs.step_jobs import EVERY, cluster, compiled, fresh, refusal_of
from support.models.small_models import Small, floats, mse
from support.oracles.one_process import (
    Difference,
    Expected,
    case_rows,
    counters_of,
    difference,
    plain_loss,
    plain_step,
    rows_of,
)

Shares = tuple[tuple[int, ...] | str, ...]
"""For each stage the relative shares of rows of its replicas, () for equal ones, or "turn" for the policy."""


class Pictures(nn.Module):
    """A model of batch norms over images, which accepts single rows; with a branch and a norm without running
    statistics.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(3, track_running_stats=place != 1) for place in range(3))
        self.last = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norms[0](self.first(x)))
        x = x + self.norms[1](self.second(x)) * torch.sigmoid(self.norms[2](self.third(x)))
        return self.last(x.mean((2, 3)))


PICTURES = Small(Pictures, lambda n: (floats(n, 3, 4, 4), floats(n, 2, seed=9)), mse, coupled=True)
DTYPE = torch.float64


def _case(name: str) -> Any:
    return EVERY.get(name, PICTURES)


def _model(name: str) -> Any:
    return fresh(name, DTYPE) if name in EVERY else PICTURES.model(dtype=DTYPE)


def normed(counts: Counts) -> dict[str, Any]:
    """Compare one step of a replicated stage with one process that runs the replicas' parts in order.

    Also compares each rank's running statistics with those of the first replica's parts alone.
    """
    case, rows = EVERY["batch_norm"], 12
    batch, model, first = case.data(rows), case.model(), case.model()
    with compiled(case, fresh("batch_norm"), batch, **replica_options(counts, 2)) as pipe:
        loss = pipe.step(batch).item()
        gradients = pipe.gradients()
        buffers = {n: t.clone() for n, t in pipe.session.tensors.held.items() if "running" in n or "tracked" in n}
    each = rows // 2 // counts[0]
    expected, again = 0.0, counters_of(first)
    for place, start in enumerate(range(0, rows, each)):
        part = case_rows(batch, start, start + each)
        share = plain_loss(case, model, part) * (each / rows)
        share.backward()
        expected += share.item()
        if place % counts[0] == 0:
            again()
            plain_loss(case, first, part)
    wanted = {n: t for n, t in first.named_buffers() if n in buffers}
    off = max((buffers[n].double() - t.double()).abs().max().item() for n, t in wanted.items())
    found = difference(loss, gradients, {}, Expected.of(torch.tensor(expected), model))
    return {"difference": found, "buffers": off, "compared": len(wanted)}


def synced(
    name: str,
    counts: Counts,
    micros: int,
    rows: tuple[int, ...],
    recompute: str = "off",
    shares: Shares = (),
    cuts: tuple[str, ...] = (),
) -> list[Difference]:
    """Take accumulating steps with batch statistics over whole micro-batches and compare with one process.

    Return the differences of losses, gradients and buffers on every rank.
    """
    case, found = _case(name), []
    reference, sample = case.model(dtype=DTYPE), case.data(rows[0], DTYPE)
    options: dict[str, Any] = {"sync_batchnorm": True}
    asked = replica_options(counts, micros, recompute=recompute, cuts=cuts)
    if shares:
        options["plan"] = _dealt(name, sample, shares, options | asked)
    with compiled(case, _model(name), sample, **options | ({} if shares else asked)) as pipe:
        assert not shares or tuple(_share(stage) for stage in pipe.plan.stages) == shares
        for count in rows:
            batch = case.data(count, DTYPE)
            loss = pipe.step(batch).item()
            cut = micro_cut(count, pipe.plan.micro_rows)
            expected = Expected.of(plain_step(case, reference, batch, len(cut)), reference)
            found.append(difference(loss, pipe.gradients(), pipe.state_dict(), expected, DTYPE))
    return found


def _dealt(name: str, sample: Any, shares: Shares, options: dict[str, Any]) -> Plan:
    """Return a plan whose replicas have the given shares, as a user may edit them in the plan file."""
    case = _case(name)
    plan = autopart.plan(
        case.model(dtype=DTYPE), cluster(), sample=sample, loss_fn=case.loss_fn, costs="analytic", **options
    )
    stages = [
        replace(stage, policy="turn") if isinstance(own, str) else replace(stage, shares=own)
        for stage, own in zip(plan.stages, shares, strict=True)
    ]
    return replace(plan, decision=replace(plan.decision, stages=tuple(stages)))


def _share(stage: Stage) -> tuple[int, ...] | str:
    return stage.policy if stage.policy == "turn" else stage.shares


def refused_in_turn() -> str:
    """Return the error for synchronized batch statistics with replica_policy="turn"."""
    options = replica_options((2,), 2, sync_batchnorm=True, replica_policy="turn")
    return str(refusal_of(lambda: compiled(PICTURES, PICTURES.model(), PICTURES.data(8), **options).close()))


def in_turn(name: str, counts: Counts, micros: int, rows: tuple[int, ...], recompute: str = "off") -> dict[str, Any]:
    """Compare steps with replica_policy="turn" with one process over the micro-batches.

    Also compares this rank's buffers with one process over the micro-batches of the first replica of its stage.
    """
    case, found, off = _case(name), [], 0.0
    reference, first = case.model(dtype=DTYPE), case.model(dtype=DTYPE)
    asked = replica_options(counts, micros, recompute=recompute, replica_policy="turn")
    with compiled(case, _model(name), case.data(rows[0], DTYPE), **asked) as pipe:
        stage = next(iter(pipe.plan.decision.stages_of_rank(pipe.rank)), None)
        count = counts[stage] if stage is not None else 1
        for step_rows in rows:
            batch = case.data(step_rows, DTYPE)
            loss = pipe.step(batch).item()
            cut = micro_cut(step_rows, pipe.plan.micro_rows)
            expected = Expected.of(plain_step(case, reference, batch, len(cut)), reference)
            found.append(difference(loss, pipe.gradients(), {}, expected, DTYPE))
            again = counters_of(first)
            for micro in range(0, len(cut), count):
                again()
                plain_loss(case, first, case_rows(batch, sum(cut[:micro]), sum(cut[: micro + 1])))
        held = {n: t for n, t in pipe.session.tensors.held.items() if "running" in n or "tracked" in n}
        wanted = dict(first.named_buffers())
        off = max(((t - wanted[n]).abs().max().item() for n, t in held.items()), default=0.0)
    return {"differences": found, "buffers": off, "compared": len(held), "rows": rows_of(batch)}


def verified(name: str, counts: Counts, synced_norms: bool = True) -> tuple[bool, str, int, str]:
    """Return the result of `verify` for a plan with replicas: ok, reference, number of buffers, or the error."""
    case = _case(name)
    try:
        found = autopart.verify(
            case.model(dtype=DTYPE), cluster(), sample=case.data(13, DTYPE), loss_fn=case.loss_fn, costs="analytic",
            sync_batchnorm=synced_norms, **replica_options(counts, 2),
        )  # fmt: skip
    except AutopartError as error:
        return False, "", 0, str(error)
    return found.ok, found.reference, len(found.buffers), ""

"""Steps of stages with replicas, beside one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import autopart
from autopart.ir.errors import BatchError
from autopart.session.parts import micro_cut
from support.one_process import Difference, Expected, case_rows, difference, plain_loss, plain_step
from support.small_models import Small, floats, mse
from support.sparse_jobs import Bag, batches, optimizers
from support.step_jobs import EVERY, cluster, compiled, fresh

Counts = tuple[int, ...]


def asked_replicas(counts: Counts, micros: int, **options: Any) -> dict[str, Any]:
    """Options for so many replicas of each stage."""
    return {"stages": len(counts), "replicas": counts, "micro_batches": micros, "schedule": "1f1b", **options}


def replicated(
    name: str,
    counts: Counts,
    micros: int,
    rows: tuple[int, ...],
    recompute: str = "auto",
    transport: str = "auto",
    policy: str | None = None,
) -> tuple[list[Difference] | None, Counts]:
    """Steps with so many rows each, accumulated, with so many replicas of each stage, against one process.  Every rank
    returns the replicas that were planned, rank 0 how far off each step was."""
    case, found = EVERY[name], []
    reference = case.model()
    asked = asked_replicas(counts, micros, recompute=recompute, transport=transport, replica_policy=policy)
    with compiled(case, fresh(name), case.data(rows[0]), **asked) as pipe:
        planned = tuple(len(stage.ranks) for stage in pipe.plan.stages)
        assert all(stage.policy == (policy or "split") for stage in pipe.plan.stages if len(stage.ranks) > 1)
        assert recompute != "all" or all(stage.recompute for stage in pipe.plan.stages)
        for count in rows:
            loss = pipe.step(case.data(count)).item()
            gradients, state = pipe.gradients(), pipe.state_dict()
            if pipe.rank == 0:
                expected = Expected.of(plain_step(case, reference, case.data(count), micros), reference)
                found.append(difference(loss, gradients, state, expected))
        leads = pipe.rank == 0
    return (found if leads else None), planned


def trained(name: str, counts: Counts, steps: int, clip: float, policy: str = "split") -> dict[str, Any]:
    """AdamW with clipping: losses and norms beside those of one process; the stage of this rank and what it holds."""
    case = EVERY[name]
    reference, batch = case.model(), case.data(7)
    with compiled(case, fresh(name), batch, **asked_replicas(counts, 2, replica_policy=policy)) as pipe:
        held = dict(pipe.named_parameters())
        mine = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
        losses, norms = [], []
        for _ in range(steps):
            losses.append((pipe.step(batch).item(), plain_step(case, reference, batch, 2).item()))
            norms.append((pipe.clip_grad_norm_(clip).item(), clip_grad_norm_(reference.parameters(), clip).item()))
            for optimizer in (mine, theirs):
                optimizer.step()
                optimizer.zero_grad()
        reference.eval()
        evaluated = pipe.eval_loss(case.data(5)).item(), plain_loss(case, reference, case.data(5)).item()
        return {
            "losses": losses,
            "norms": norms,
            "evaluated": evaluated,
            "stage": pipe.plan.decision.stage_of_rank(pipe.rank),
            "held": {n: p.detach().clone() for n, p in held.items()},
        }


def masked(counts: Counts, recompute: str) -> tuple[list[float], dict[str, torch.Tensor | None]]:
    """Losses of two steps with dropout, and the gradients."""
    case = EVERY["dropped"]
    with compiled(
        case, fresh("dropped"), case.data(7), **asked_replicas(counts, 2, seed=3, recompute=recompute)
    ) as pipe:
        losses = [pipe.step(case.data(7)).item() for _ in range(2)]
        return losses, pipe.gradients()


def normed(counts: Counts) -> dict[str, Any]:
    """Batch statistics: one step of replicas of one stage against the plain model over their parts in order; and the
    running statistics of each rank against those of the first replica's parts alone."""
    case, rows = EVERY["batch_norm"], 12
    batch, model, first = case.data(rows), case.model(), case.model()
    with compiled(case, fresh("batch_norm"), batch, **asked_replicas(counts, 2)) as pipe:
        loss = pipe.step(batch).item()
        gradients = pipe.gradients()
        buffers = {n: t.clone() for n, t in pipe.session.tensors.held.items() if "running" in n or "tracked" in n}
    each = rows // 2 // counts[0]
    expected = 0.0
    for place, start in enumerate(range(0, rows, each)):
        part = case_rows(batch, start, start + each)
        share = plain_loss(case, model, part) * (each / rows)
        share.backward()
        expected += share.item()
        if place % counts[0] == 0:
            plain_loss(case, first, part)
    wanted = {n: t for n, t in first.named_buffers() if n in buffers}
    off = max((buffers[n].double() - t.double()).abs().max().item() for n, t in wanted.items())
    found = difference(loss, gradients, {}, Expected.of(torch.tensor(expected), model))
    return {"difference": found, "buffers": off, "compared": len(wanted)}


class Pictures(nn.Module):
    """Batch norms over pictures, of which one row is enough; a branch, and one without running statistics."""

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


def synced(name: str, counts: Counts, micros: int, rows: tuple[int, ...], recompute: str = "off") -> list[Difference]:
    """Batch statistics of whole micro-batches, in steps of so many rows, accumulated, beside one process over the same
    micro-batches: losses, gradients and buffers, on every rank."""
    case, found = EVERY.get(name, PICTURES), []
    dtype = torch.float64
    model = fresh(name, dtype) if name in EVERY else case.model(dtype=dtype)
    reference, options = case.model(dtype=dtype), {"sync_batchnorm": True, "recompute": recompute}
    with compiled(case, model, case.data(rows[0], dtype), **asked_replicas(counts, micros, **options)) as pipe:
        for count in rows:
            batch = case.data(count, dtype)
            loss = pipe.step(batch).item()
            cut = micro_cut(count, pipe.plan.micro_rows)
            expected = Expected.of(plain_step(case, reference, batch, len(cut)), reference)
            found.append(difference(loss, pipe.gradients(), pipe.state_dict(), expected, dtype))
    return found


def sparse(replicas: int, zero: int = 0) -> dict[str, Any]:
    """Embeddings with sparse gradients in one stage: losses, norms, the state; and whether gradients stay sparse."""
    steps = batches()
    pipe = autopart.compile(
        Bag(False),
        cluster(),
        sample=steps[0],
        stages=1,
        replicas=replicas,
        micro_batches=1,
        costs="analytic",
        zero=zero,
    )
    with pipe:
        steppers = optimizers(pipe.named_parameters(), False)
        losses, norms = [], []
        for batch in steps:
            losses.append(pipe.step(*batch).item())
            kinds = {n: p.grad.is_sparse for n, p in pipe.named_parameters() if p.grad is not None}
            norms.append(pipe.clip_grad_norm_(0.05).item())
            for stepper in steppers:
                stepper.step()
                stepper.zero_grad()
        return {"losses": losses, "norms": norms, "state": pipe.state_dict(), "sparse": kinds}


def given_other_batches() -> str:
    """What a step says when each rank brings rows of its own."""
    case = EVERY["stack"]
    with compiled(case, fresh("stack"), case.data(8), **asked_replicas((2,), 2)) as pipe:
        x, y = case.data(8)
        try:
            pipe.step((x + pipe.rank, y))
        except BatchError as error:
            return str(error)
        return ""


def moved(counts: Counts, other: Counts) -> Difference | None:
    """A step under one plan and one under another, accumulated."""
    case = EVERY["tied"]
    batch, model = case.data(7), case.model()
    cpus = cluster()
    plans = [
        autopart.plan(
            case.model(), cpus, sample=batch, loss_fn=case.loss_fn, costs="analytic", **asked_replicas(wanted, 2)
        )
        for wanted in (counts, other)
    ]
    with compiled(case, fresh("tied"), batch, plan=plans[0]) as pipe:
        pipe.step(batch)
        pipe.adopt(plans[1])
        loss = pipe.step(batch).item()
        found, state, leads = pipe.gradients(), pipe.state_dict(), pipe.rank == 0
    for _ in range(2):
        expected = plain_step(case, model, batch, 2)
    return difference(loss, found, state, Expected.of(expected, model)) if leads else None

"""Steps of stages with replicas, beside one process."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

import autopart
from autopart.ir.errors import BatchError
from support.one_process import Difference, Expected, case_rows, difference, plain_loss, plain_step
from support.sparse_jobs import Bag, batches, optimizers
from support.step_jobs import EVERY, cluster, compiled, fresh

Counts = tuple[int, ...]


def _asked(counts: Counts, micros: int, **options: Any) -> dict[str, Any]:
    return {"stages": len(counts), "replicas": counts, "micro_batches": micros, "schedule": "1f1b", **options}


def replicated(
    name: str, counts: Counts, micros: int, rows: tuple[int, ...], recompute: str = "auto", transport: str = "auto"
) -> tuple[list[Difference] | None, Counts]:
    """Steps with so many rows each, accumulated, with so many replicas of each stage, against one process.  Every rank
    returns the replicas that were planned, rank 0 how far off each step was."""
    case, found = EVERY[name], []
    reference = case.model()
    asked = _asked(counts, micros, recompute=recompute, transport=transport)
    with compiled(case, fresh(name), case.data(rows[0]), **asked) as pipe:
        planned = tuple(len(stage.ranks) for stage in pipe.plan.stages)
        assert recompute != "all" or all(stage.recompute for stage in pipe.plan.stages)
        for count in rows:
            loss = pipe.step(case.data(count)).item()
            gradients, state = pipe.gradients(), pipe.state_dict()
            if pipe.rank == 0:
                expected = Expected.of(plain_step(case, reference, case.data(count), micros), reference)
                found.append(difference(loss, gradients, state, expected))
        leads = pipe.rank == 0
    return (found if leads else None), planned


def trained(name: str, counts: Counts, steps: int, clip: float) -> dict[str, Any]:
    """AdamW with clipping: losses and norms beside those of one process; the stage of this rank and what it holds."""
    case = EVERY[name]
    reference, batch = case.model(), case.data(7)
    with compiled(case, fresh(name), batch, **_asked(counts, 2)) as pipe:
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
    with compiled(case, fresh("dropped"), case.data(7), **_asked(counts, 2, seed=3, recompute=recompute)) as pipe:
        losses = [pipe.step(case.data(7)).item() for _ in range(2)]
        return losses, pipe.gradients()


def normed(counts: Counts) -> dict[str, Any]:
    """Batch statistics: one step of replicas of one stage against the plain model over their parts in order; and the
    running statistics of each rank against those of the first replica's parts alone."""
    case, rows = EVERY["batch_norm"], 12
    batch, model, first = case.data(rows), case.model(), case.model()
    with compiled(case, fresh("batch_norm"), batch, **_asked(counts, 2)) as pipe:
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


def sparse(replicas: int) -> dict[str, Any]:
    """Embeddings with sparse gradients in one stage: losses, norms, the state; and whether gradients stay sparse."""
    steps = batches()
    pipe = autopart.compile(
        Bag(False), cluster(), sample=steps[0], stages=1, replicas=replicas, micro_batches=1, costs="analytic"
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
    with compiled(case, fresh("stack"), case.data(8), **_asked((2,), 2)) as pipe:
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
        autopart.plan(case.model(), cpus, sample=batch, loss_fn=case.loss_fn, costs="analytic", **_asked(wanted, 2))
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

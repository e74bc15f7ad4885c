"""Training in bf16 and fp16 over stages, beside the same loop in one process under torch.autocast."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
from torch import nn

import autopart
from autopart.capture.autocast import autocast_for
from autopart.capture.batch import flatten
from autopart.ir.errors import NonFiniteError
from autopart.session.parts import parts_of
from support.one_process import case_rows, gradients_of, plain_loss
from support.step_jobs import EVERY, cluster

ADAMW = {"lr": 1e-2, "weight_decay": 0.1}


def piecewise_step(
    case: Any, model: nn.Module, batch: Any, weights: list[tuple[int, float]], precision: Any, scaler: Any = None
) -> float:
    """A step of one process in a precision, over micro-batches of (rows, share of the loss)."""
    autocast = autocast_for(precision, "cpu")
    total, start = 0.0, 0
    for rows, share in weights:
        if not share:  # no rows, or a mean over no label: 0/0
            start += rows
            continue
        with autocast.region() if autocast is not None else contextlib.nullcontext():
            loss = plain_loss(case, model, case_rows(batch, start, start + rows)).float() * share
        (loss if scaler is None else scaler.scale(loss)).backward()
        total, start = total + loss.item(), start + rows
    return total


def trained(name: str, precision: str, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """Losses of both, the largest relative error of a weight at the end, and of the first step's gradients."""
    case = EVERY[name]
    model, reference = case.model(), case.model()
    batches = [case.data(8), case.data(12)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = autopart.compile(
            model, cluster(), sample=batches[0], loss_fn=case.loss_fn, micro_batches=4, precision=precision,
            costs="analytic", **options,
        )  # fmt: skip
    mine = torch.optim.AdamW(pipe.parameters(), **ADAMW)
    theirs = torch.optim.AdamW(reference.parameters(), **ADAMW)
    scaler = torch.amp.GradScaler("cpu", growth_interval=4) if precision == "fp16" else None
    if pipe.scaler is not None:
        pipe.scaler.growth_interval = 4
    losses, first, scales, skipped = [], {}, [], 0
    plain = case.model()  # in fp32
    fourth, whole = torch.optim.AdamW(plain.parameters(), **ADAMW), []
    for step in range(steps):
        batch = batches[step % 2]
        loss = pipe.step(batch).item()
        divided = max((stage.division for stage in pipe.plan.stages), key=lambda division: division.count)
        rows, parts = pipe.session.loss_weights(flatten(batch, with_target=case.loss_fn is not None))
        shares = list(zip(parts_of(rows, divided), parts.of[divided].shares, strict=True))
        losses.append((loss, piecewise_step(case, reference, batch, shares, precision, scaler)))
        if scaler is not None:
            scaler.unscale_(theirs)
        if not step and not pipe.skipped:
            found = pipe.gradients()
            first = {n: _relative(found[n], expected) for n, expected in gradients_of(reference).items()}
        skipped += pipe.skipped
        if not pipe.skipped:
            mine.step()
            whole.append(piecewise_step(case, plain, batch, shares, "fp32"))
            fourth.step()
            fourth.zero_grad()
        else:
            whole.append(whole[-1] if whole else losses[-1][1])
        if scaler is None:
            theirs.step()
        else:
            scaler.step(theirs)
            scaler.update()
            assert pipe.scaler is not None
            scales.append((pipe.scaler.get_scale(), scaler.get_scale()))
        mine.zero_grad()
        theirs.zero_grad()
    state, expected = pipe.state_dict(), reference.state_dict()
    weights = {n: _relative(state[n], expected[n]) for n in expected}
    evaluated = pipe.eval_loss(batches[0]).item()
    remembered = state._metadata["autopart"]  # type: ignore[attr-defined]
    pipe.close()
    return {
        "losses": losses, "weights": max(weights.values()), "first": max(first.values(), default=0.0),
        "scales": scales, "whole": whole, "skipped": skipped, "evaluated": evaluated, "remembered": remembered,
    }  # fmt: skip


def _relative(found: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    if found is None or expected is None:
        return 0.0 if found is expected else 1.0
    size = expected.double().norm().item()
    return (found.double() - expected.double()).norm().item() / (size or 1.0)


class Overflowing(nn.Module):
    """Of whose gradients only those of the first layer grow with the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8, bias=False) for _ in range(3))
        for layer, weight in ((self.first, 1e-3), (self.second, 0.125), (self.third, 0.01)):
            nn.init.constant_(layer.weight, weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x) * 0.01 + 1.0)).float().pow(2).mean()


def overflow(non_finite: str, replicas: tuple[int, ...] | None = None) -> dict[str, Any]:
    """A step whose gradients are infinite on the first stage alone, of replicas on the last, between two that are
    well."""
    model = Overflowing()
    good = torch.ones(4, 8)
    bad = good.clone()
    bad[0 if replicas is None else 3 :] = 6e4
    cuts = ["second"] if replicas is None or len(replicas) == 2 else []
    pipe = autopart.compile(
        model, cluster(), sample=(good,), cuts=cuts, stages=len(cuts) + 1, micro_batches=2, precision="fp16",
        costs="analytic", non_finite=non_finite, replicas=replicas,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-5)
    scaler = pipe.scaler
    assert scaler is not None
    seen = []
    for batch in (good, bad, good):
        before = {n: p.detach().clone() for n, p in pipe.named_parameters()}
        raised: Any = contextlib.nullcontext()
        try:
            pipe.step((batch,))
        except NonFiniteError as error:
            raised = str(error)
        empty = all(p.grad is None for p in pipe.parameters())
        optimizer.step()
        optimizer.zero_grad()
        moved = any(not torch.equal(p, before[n]) for n, p in pipe.named_parameters())
        seen.append({
            "skipped": pipe.skipped, "empty": empty, "moved": moved, "scale": scaler.scale,
            "raised": raised if isinstance(raised, str) else "",
        })  # fmt: skip
    kept = pipe.state_dict()
    scaler.scale = 1.0
    pipe.load_state_dict(kept)
    loaded, trains = scaler.scale, bool(dict(pipe.named_parameters()))
    pipe.close()
    return {"seen": seen, "loaded": loaded, "trains": trains}


def accumulated() -> dict[str, Any]:
    """An overflow between two good steps leaves what they added up."""
    pipe = autopart.compile(
        Overflowing(), cluster(), sample=(torch.ones(4, 8),), cuts=["second"], micro_batches=2, precision="fp16",
        costs="analytic",
    )  # fmt: skip
    pipe.step((torch.ones(4, 8),))
    first = pipe.gradients()
    pipe.step((torch.full((4, 8), 6e4),))
    kept = pipe.gradients()
    pipe.step((torch.ones(4, 8),))
    twice = pipe.gradients()
    pipe.close()
    return {
        "kept": all(torch.equal(kept[n], first[n]) for n in first),  # type: ignore[arg-type]
        "twice": max(_relative(twice[n], 2 * first[n]) for n in first),  # type: ignore[operator]
    }


class WithoutKernel(nn.Module):
    """Of which one op does not run in half precision on CPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x * torch.special.bessel_j0(x.detach())).float().pow(2).mean()


def _refused_step(pipe: autopart.Pipe) -> str:
    """What a step of the pipe says when it fails; the pipe is closed."""
    try:
        pipe.step((torch.ones(4, 8),))
    except autopart.AutopartError as error:
        return str(error)
    finally:
        pipe.close(sync=False)
    return ""


def no_kernel() -> str:
    """What is raised for an op that the device does not have in half precision."""
    pipe = autopart.compile(
        WithoutKernel(), cluster(), sample=(torch.ones(4, 8),), cuts=["second"], micro_batches=1, precision="fp16",
        costs="analytic",
    )  # fmt: skip
    return _refused_step(pipe)


def scales_differ() -> str:
    """What is raised when one rank's scale is another one."""
    pipe = autopart.compile(
        Overflowing(), cluster(), sample=(torch.ones(4, 8),), cuts=["second"], micro_batches=2, precision="fp16",
        costs="analytic",
    )  # fmt: skip
    assert pipe.scaler is not None
    pipe.scaler.scale = 2.0 ** (10 + pipe.rank)
    return _refused_step(pipe)

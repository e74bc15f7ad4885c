"""bf16 and fp16 over stages match torch.autocast and torch.amp.GradScaler in one process, on every rank."""

from __future__ import annotations

import contextlib
import itertools
import statistics
from typing import Any

import pytest
import torch
from support.jobs.any_plan import plan_for
from support.jobs.step_jobs import EVERY, cluster, compiled, fresh, refusal_of
from support.languages.setups import DRAWN, Setup
from support.oracles.one_process import case_rows, gradients_of, plain_loss
from torch import nn

import autopart
from autopart.capture.trace.autocast import autocast_for
from autopart.ir.errors import NonFiniteError
from autopart.ir.shares import Division, parts

ADAMW = {"lr": 1e-2, "weight_decay": 0.1}
Shares = dict[Division, list[tuple[int, float]]]
"""(rows, share of the loss) of every part of a batch, by how replicas divide its micro-batches."""


def piecewise_step(
    case: Any, model: nn.Module, batch: Any, weights: list[tuple[int, float]], precision: Any, scaler: Any = None
) -> float:
    """Accumulate gradients in one process over parts of (rows, share of the loss) and return the loss."""
    autocast = autocast_for(precision, "cpu")
    total, start = 0.0, 0
    for rows, share in weights:
        if not share:  # no rows, or no label that counts: its mean would be 0/0
            start += rows
            continue
        with autocast.region() if autocast is not None else contextlib.nullcontext():
            loss = plain_loss(case, model, case_rows(batch, start, start + rows)).float() * share
        (loss if scaler is None else scaler.scale(loss)).backward()
        total, start = total + loss.item(), start + rows
    return total


def last_stages(pipe: autopart.Pipe) -> dict[str, int]:
    """Return the last stage that reads each parameter."""
    stage_of = {op: number for number, stage in enumerate(pipe.plan.stages) for op in stage.ops}
    found: dict[str, int] = {}
    for op in pipe.session.graph.ops:
        for name in op.params:
            found[name] = max(found.get(name, 0), stage_of[op.name])
    return found


def stagewise_step(
    case: Any,
    model: nn.Module,
    batch: Any,
    shares: Shares,
    homes: dict[str, Division],
    precision: Any,
    scaler: Any = None,
) -> float:
    """Take a step in one process in which each parameter gets the gradient summed over the parts named in `homes`.

    In half precision the gradient of two rows in one call is rounded once, and may be infinite where those of single
    rows are not. A tied weight uses the parts of the last stage that reads it.
    """
    losses, gradients = {}, {}
    for division, weights in shares.items():
        model.zero_grad()
        losses[division] = piecewise_step(case, model, batch, weights, precision, scaler)
        gradients[division] = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[homes[name]][name] if name in homes else None
    return next(iter(reversed(losses.values())))


class Plain:
    """The same training in one process for rank 0 of a pipe, over the parts that its replicas compute."""

    def __init__(self, case: Any, pipe: autopart.Pipe, precision: str) -> None:
        self.losses: list[float] = []
        self.scales: list[float] = []
        self.model = case.model()
        self._case, self._precision = case, precision
        self._homes = {name: pipe.plan.stages[stage].division for name, stage in last_stages(pipe).items()}
        self._optimizer = torch.optim.AdamW(self.model.parameters(), **ADAMW)
        self._scaler = torch.amp.GradScaler("cpu", growth_interval=4) if precision == "fp16" else None

    def backward(self, batch: Any, shares: Shares) -> None:
        """Store the loss and the unscaled gradients of a step."""
        step = stagewise_step(self._case, self.model, batch, shares, self._homes, self._precision, self._scaler)
        self.losses.append(step)
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)

    def update(self) -> None:
        """Take the optimizer's step unless gradients are infinite."""
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()
            self.scales.append(self._scaler.get_scale())
        self._optimizer.zero_grad()


def trained(name: str, precision: str, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train in a pipe and return this rank's losses and scales, and what the state dict records.

    Rank 0 also returns the losses and scales of one process and the largest relative error of a gradient in the first
    step that was not skipped.
    """
    case = EVERY[name]
    batches = [case.data(8), case.data(12)]
    asked = options if "plan" in options else {"micro_batches": 4, "precision": precision, "replicas": 1, **options}
    pipe = compiled(case, fresh(name, precision=precision), batches[0], **asked)
    losses, scales, first = [], [], {}
    with pipe:
        plain = Plain(case, pipe, precision) if pipe.rank == 0 else None
        optimizer = torch.optim.AdamW(pipe.parameters(), **ADAMW)
        if pipe.scaler is not None:
            pipe.scaler.growth_interval = 4
        for step in range(steps):
            batch = batches[step % 2]
            losses.append(pipe.step(batch).item())
            micro_rows, each = pipe.session.road.rows, pipe.session.road.executor.preparation.shares
            shares = {
                division: [
                    (rows, share[0])
                    for micro, replicas in enumerate(micros)
                    for rows, share in zip(parts(division, micro, micro_rows[micro]), replicas, strict=True)
                ]
                for division, micros in each.items()
            }
            found = pipe.gradients() if not first and not pipe.skipped else {}
            if plain is not None:
                plain.backward(batch, shares)
                first = first or {n: _relative(found[n], g) for n, g in gradients_of(plain.model).items() if n in found}
                plain.update()
            first = first or dict.fromkeys(found, 0.0)
            if not pipe.skipped:
                optimizer.step()
            if pipe.scaler is not None:
                scales.append(pipe.scaler.get_scale())
            optimizer.zero_grad()
        remembered = pipe.state_dict()._metadata["autopart"]  # type: ignore[attr-defined]
    return {
        "losses": losses, "scales": scales, "remembered": remembered, "first": max(first.values()),
        "plain": None if plain is None else {"losses": plain.losses, "scales": plain.scales},
    }  # fmt: skip


def trained_with_split_backwards(name: str, precision: Any, steps: int) -> dict[str, Any]:
    """Return `trained` under a plan whose backwards are split in a drawn order."""
    setup = Setup(name, (8, 8), 2, (1, 1), 2, schedule=DRAWN, seed=4, micros=4, dtype="float32", precision=precision)
    return trained(name, precision, steps, {"plan": plan_for(setup)})


def _relative(found: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    if found is None or expected is None:
        return 0.0 if found is expected else 1.0
    size = expected.double().norm().item()
    return (found.double() - expected.double()).norm().item() / (size or 1.0)


class Overflowing(nn.Module):
    """A model in which only the gradients of the first layer grow with the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8, bias=False) for _ in range(3))
        for layer, weight in ((self.first, 1e-3), (self.second, 0.125), (self.third, 0.01)):
            nn.init.constant_(layer.weight, weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x) * 0.01 + 1.0)).float().pow(2).mean()


def overflow(non_finite: str, replicas: tuple[int, ...] | None = None) -> dict[str, Any]:
    """Take a step whose gradients overflow on one stage or replica, between two steps with finite gradients."""
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
    loaded, trains = scaler.scale, any(p.numel() for p in pipe.parameters())
    pipe.close()
    return {"seen": seen, "loaded": loaded, "trains": trains}


def accumulated() -> dict[str, Any]:
    """Accumulate an overflowing step between two good ones and return whether the gradients kept their sum."""
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
    """A model with one op that has no half precision kernel on CPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x * torch.special.bessel_j0(x.detach())).float().pow(2).mean()


def _refused_step(pipe: autopart.Pipe) -> str:
    """Return the text of the error that a step raises. Closes the pipe."""
    error = refusal_of(lambda: pipe.step((torch.ones(4, 8),)))
    pipe.close(sync=False)
    return str(error)


def no_kernel() -> str:
    """Return the error for an op without a half precision kernel on the device."""
    pipe = autopart.compile(
        WithoutKernel(), cluster(), sample=(torch.ones(4, 8),), cuts=["second"], micro_batches=1, precision="fp16",
        costs="analytic",
    )  # fmt: skip
    return _refused_step(pipe)


def scales_differ() -> str:
    """Return the error for ranks with different loss scales."""
    pipe = autopart.compile(
        Overflowing(), cluster(), sample=(torch.ones(4, 8),), cuts=["second"], micro_batches=2, precision="fp16",
        costs="analytic",
    )  # fmt: skip
    assert pipe.scaler is not None
    pipe.scaler.scale = 2.0 ** (10 + pipe.rank)
    return _refused_step(pipe)


SLOW = pytest.mark.slow


ARCHITECTURES = ("tied", "gpt2", "llama", "bert")
EPS = {"bf16": 2**-7, "fp16": 2**-10}
"""Rounding error of one operation: calls of other shapes round differently."""
NOISE = 5e-2
"""Largest divergence of losses: two runs of 50 steps in one process, split into other parts, differ by up to 4 %."""
TOGETHER = 1e-4
"""While losses differ by less than this, overflows must be in the same steps."""


def _check(results, precision, steps, at_most=2e-2, first=1e-6):
    """Check that losses and scales are equal on all ranks and match one process.

    at_most: allowed divergence of losses after rounding errors of earlier steps have grown; first: allowed error of
    gradients before any update. If only one side overflows, at the edge of the range, it lags by one step from there
    on: the last steps must agree.
    """
    plain, ours = results[0]["plain"], results[0]
    apart = [abs(mine - wanted) / abs(wanted) for mine, wanted in zip(ours["losses"], plain["losses"], strict=True)]
    pairs = zip(ours["scales"], plain["scales"], strict=True)
    same = next((step for step, (mine, wanted) in enumerate(pairs) if mine != wanted), steps)
    assert apart[0] <= 1e-6 and max(apart[: same + 1]) <= at_most, apart
    mine, wanted = (statistics.mean(run["losses"][-10:]) for run in (ours, plain))
    assert abs(mine - wanted) <= at_most * wanted
    alike = next((step for step, far in enumerate(apart) if far > TOGETHER), steps)
    assert ours["scales"][:alike] == plain["scales"][:alike] and len(ours["scales"]) == len(plain["scales"])
    assert all(1 / 4 <= mine / wanted <= 4 for mine, wanted in zip(ours["scales"], plain["scales"], strict=True))
    for result in results:
        assert result["losses"] == ours["losses"] and result["scales"] == ours["scales"]
        assert len(result["scales"]) == (steps if precision == "fp16" else 0)
        assert ("scaler" in result["remembered"]) == (precision == "fp16")
        assert result["first"] <= first


@pytest.mark.parametrize(
    ("name", "precision", "steps", "options"),
    [
        ("tied", "fp16", 6, {"stages": 2}),
        ("tied", "bf16", 2, {"stages": 2, "recompute": "all", "schedule": "gpipe"}),
        pytest.param("tied", "bf16", 6, {"stages": 2}, marks=SLOW),
        pytest.param("tied", "fp16", 2, {"stages": 2, "recompute": "all", "schedule": "gpipe"}, marks=SLOW),
        *(
            pytest.param(name, precision, 50, {"stages": 2}, marks=SLOW)
            for name, precision in itertools.product(ARCHITECTURES, ("bf16", "fp16"))
        ),
    ],
)
def test_a_loss_curve_matches_autocast_in_one_process(pair, name, precision, steps, options):
    _check(pair.run(trained, name, precision, steps, options), precision, steps, 1e-6 if steps < 10 else 2e-2)


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=SLOW)])
def test_split_backwards_round_as_autocast_does(pair, precision):
    for result in pair.run(trained_with_split_backwards, "tied", precision, 3):
        assert result["first"] <= 1e-6
        if result["plain"] is not None:
            assert result["losses"] == pytest.approx(result["plain"]["losses"], rel=1e-6)
            assert result["scales"] == result["plain"]["scales"]


def test_an_overflow_on_one_stage_skips_the_step_on_all_ranks(pair):
    for result in pair.run(overflow, "auto"):
        before, at, after = result["seen"]
        assert not before["skipped"] and before["moved"] and before["scale"] == 65536.0
        assert at == {"skipped": True, "empty": True, "moved": False, "scale": 32768.0, "raised": ""}
        assert not after["skipped"] and after["moved"]
        assert result["loaded"] == 32768.0


@pytest.mark.parametrize(
    ("name", "precision", "steps", "counts"),
    [
        pytest.param("tied", "bf16", 4, (2, 1), marks=SLOW),
        pytest.param("tied", "fp16", 4, (2, 1), marks=SLOW),
        *(
            pytest.param(name, precision, 50, counts, marks=SLOW)
            for name, precision, counts in (("gpt2", "bf16", (2,)), ("bert", "fp16", (1, 2)), ("llama", "fp16", (2, 2)))
        ),
    ],
)
def test_replicas_match_autocast_in_one_process(workers, name, precision, steps, counts):
    """The reference sums each parameter's gradient over the parts of its stage's replicas, so that overflows are in the
    same steps.

    Gradients from a stage with another number of replicas may differ by one rounding in half precision.
    """
    options = {"stages": len(counts), "replicas": counts}
    results = workers.run(trained, name, precision, steps, options)
    _check(results, precision, steps, at_most=NOISE, first=EPS[precision])


@pytest.mark.parametrize("replicas", [(2,), pytest.param((2, 1), marks=SLOW), pytest.param((1, 2), marks=SLOW)])
def test_an_overflow_on_one_replica_skips_the_step_on_all_ranks(workers, pair, replicas):
    for result in (pair if sum(replicas) == 2 else workers).run(overflow, "auto", replicas):
        before, at, after = result["seen"]
        assert not before["skipped"] and before["scale"] == 65536.0
        assert at == {"skipped": True, "empty": True, "moved": False, "scale": 32768.0, "raised": ""}
        assert not after["skipped"]
        assert before["moved"] == after["moved"] == result["trains"]


def test_non_finite_raise_raises_on_all_ranks(pair):
    for result in pair.run(overflow, "raise"):
        before, at, after = result["seen"]
        assert not before["raised"] and not after["raised"] and after["moved"]
        assert "first.weight on rank 0" in at["raised"] and at["empty"] and not at["moved"]


def test_an_overflow_keeps_gradients_accumulated_by_other_steps(pair):
    for result in pair.run(accumulated):
        assert result["kept"] and result["twice"] <= 1e-6


def test_different_loss_scales_on_ranks_are_reported(pair):
    assert all("scaled by 1024 on rank 0 and by 2048 on rank 1" in message for message in pair.run(scales_differ))


def test_an_op_without_a_half_precision_kernel_is_named_with_a_fix(pair):
    messages = pair.run(no_kernel)
    assert all("bessel_j0" in text and "not implemented for 'Half'" in text for text in messages), messages
    assert any("test_precision.py" in text and "x.float()" in text for text in messages), messages

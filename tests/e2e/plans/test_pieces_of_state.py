"""With tensor parallelism replicas of a piece share its optimizer state, and pieces have fp32 masters: all train like
one process, to the bit where the arithmetic is the same."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.jobs.state.pieces import BESIDE, EXACT, HALF, SHARED, adamw, batch, compiled, gpt, masters_of, state_of
from support.languages.graphs import cluster
from support.models.tokens.by_hand import Gpt
from support.models.zoo import CASES
from support.workers import Workers
from torch import nn

import autopart
from autopart.ir.shares import largest_share
from autopart.runtime.sums import replicas
from autopart.runtime.sums.shared_values import SharedValues
from autopart.session import placement

# -- shared state ------------------------------------------------------------------------------------------------------


def trained(world: int, given: dict[str, Any], zero: int) -> dict[str, Any]:
    """Train three steps under a plan of these options, with whole or shared state."""
    more = {key: given[key] for key in ("dtype", "dropout", "master_weights", "precision", "transport") if key in given}
    asked = {key: value for key, value in given.items() if key not in more}
    with compiled(world, **more, **asked) as first:
        plan = first.plan
    plan = replace(plan, decision=replace(plan.decision, zero=zero))
    with compiled(world, **more, plan=plan) as pipe:
        optimizer = adamw(pipe.parameters())
        found: list[Any] = []
        for seed in (1, 2, 3):
            found += [pipe.step(*batch(seed)).item(), pipe.gradients(), float(pipe.clip_grad_norm_(0.1))]
            optimizer.step()
            optimizer.zero_grad()
        own = {name: t.nbytes for name, t in pipe.named_parameters() if t.numel()}
        cut = {*pipe.session.standing.context.placement.cuts}
        with pipe.full_parameters():
            full = {name: p.detach().clone() for name, p in pipe.model.named_parameters()}
        return {
            "steps": found, "state": {**pipe.state_dict()}, "masters": masters_of(pipe), "full": full,
            "gradients": found[-2], "numbers": [*found[::3], *found[2::3], pipe.eval_loss(*batch(4)).item()],
            "bytes": state_of(optimizer), "own": own, "cut": cut, "plan": pipe.plan,
        }  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [
        HALF,
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"transport": "fake-nccl"}, marks=pytest.mark.slow),
        pytest.param({"bucket_bytes": 300, "precision": "fp16", "dtype": torch.float32}, marks=pytest.mark.slow),
        pytest.param({"recompute": "all", "schedule": "zb-h1", "micro_batches": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_replicas_of_a_piece_share_its_state(more: dict[str, Any], workers: Workers) -> None:
    """Gradients of pieces, which two replicas add, are equal to the bit; those of whole tensors are sums of four in
    another order, and so all that follows is equal but for rounding."""
    whole, shared = (workers.run(trained, 4, {**BESIDE, **more}, zero) for zero in (0, 1))
    off = 2e-2 if "dtype" in more else 1e-10
    for before, after in zip(whole, shared, strict=True):
        (loss, gradients, _), (other, others, _) = before["steps"][:3], after["steps"][:3]
        assert loss == other and after["plan"].decision.zero == 1
        assert all(torch.equal(gradients[name], others[name]) for name in before["cut"]) and before["cut"]
        for what in ("gradients", "state", "masters", "full", "numbers"):
            near(before[what], after[what], off)
    for rank, result in enumerate(shared):
        own, others = result["own"].keys(), shared[(rank + 2) % 4]["own"].keys()  # of the rank with the same pieces
        assert not own & others and before["cut"] <= own | others
    assert sum(result["bytes"] for result in shared) <= sum(result["bytes"] for result in whole) / 2
    sizes = whole[0]["own"].values()
    assert max(sum(result["own"].values()) for result in shared) <= largest_share(sizes, 2)


def near(found: Any, expected: Any, off: float) -> None:
    """Check that tensors, by name, or numbers differ by a part of their norm at most."""
    assert len(found) == len(expected)
    for name in found if isinstance(found, dict) else range(len(found)):
        one, two = torch.as_tensor(found[name]).double(), torch.as_tensor(expected[name]).double()
        assert (one - two).norm() <= off * two.norm() + 1e-13, name


def test_the_planner_shares_the_state_of_pieces_where_memory_demands_it() -> None:
    given = {"sample": batch(0), "costs": "analytic", "micro_batches": 2, "recompute": "off", **BESIDE}
    whole, shared = (autopart.plan(gpt(), cluster(4), zero=zero, **given) for zero in (0, 1))
    needs = [max(estimate.peak_bytes for estimate in plan.outlook.estimates) for plan in (whole, shared)]
    assert needs[1] < needs[0]
    found = autopart.plan(gpt(), cluster(4, memory=needs[1]), **given)
    assert found.decision == replace(shared.decision, zero=1) and found.decision.shards == 2
    assert not autopart.plan(gpt(), cluster(4, memory=needs[0]), **given).decision.zero


# -- masters -----------------------------------------------------------------------------------------------------------


class Whole(nn.Module):
    """Two products of small whole numbers: sums of them are exact in bf16, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)
        made = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=made))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.down(self.up(x).relu()) * y).sum()


def whole_batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(0, 2, (4, size), generator=made).bfloat16() for size in (4, 2))
    return x, y


def with_whole_numbers(given: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    options = {"costs": "analytic", "micro_batches": 2, "sample": whole_batch(0), "master_weights": True, **given}
    with autopart.compile(Whole().bfloat16(), "cpu:4", **options) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=2**-10)
        loss = pipe.step(*whole_batch(1)).item()
        gradients = pipe.gradients()
        optimizer.step()
        own = {name: tuple(p.shape) for name, p in pipe.named_parameters()}
        return {"loss": loss, "gradients": gradients, "masters": masters_of(pipe), "own": own, **pipe.state_dict()}


@pytest.mark.parametrize("zero", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_masters_of_pieces_are_those_of_one_process_where_sums_are_exact(zero: int, workers: Workers) -> None:
    model = Whole().bfloat16()
    loss = model(*whole_batch(1))
    loss.backward()
    results = workers.run(with_whole_numbers, {**BESIDE, "zero": zero})
    assert {result["own"].get("up.weight") for result in results} - {None} == {(4, 4)}
    for result in results:
        assert result["loss"] == loss.item()
        for name, parameter in model.named_parameters():
            expected = parameter.detach().float() - 2**-10 * parameter.grad.float()
            assert torch.equal(result["gradients"][name], parameter.grad.float())
            assert torch.equal(result["masters"][name], expected)
            assert torch.equal(result[name], expected.bfloat16())


def verified(name: str, dtype: torch.dtype, given: dict[str, Any]) -> Any:
    torch.set_num_threads(1)
    model, sample = CASES[name].model(dtype=dtype), CASES[name].data(4, dtype)
    options = {"costs": "analytic", "micro_batches": 2, "master_weights": True, **given}
    found = autopart.verify(model, "cpu:4", sample=sample, **options)
    return found.ok, found.loss_error, found.largest


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_steps_with_masters_differ_from_one_process_by_rounding(
    name: str, dtype: torch.dtype, workers: Workers
) -> None:
    """Both in half precision, of which each sum over ranks is one rounding more."""
    ok, loss, largest = workers.run(verified, name, dtype, SHARED)[0]
    assert ok and loss < 1e-2 and largest < 0.1


class Lopsided(nn.Module):
    """A product half of whose columns get gradients that are infinite in fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        for layer, weight in ((self.up, 0.01), (self.down, 0.01)):
            nn.init.constant_(layer.weight, weight)
        nn.init.constant_(self.down.weight[:, 4:], 100.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x)).float().mean()


def overflowing(zero: int) -> tuple[list[bool], bool, list[str]]:
    """Return which steps are skipped, whether skipped ones changed nothing, and what overflowed on this rank."""
    torch.set_num_threads(1)
    good, bad = torch.ones(4, 8), torch.full((4, 8), 1000.0)
    options = {"costs": "analytic", "micro_batches": 1, "sample": good, "precision": "fp16", **BESIDE, "zero": zero}
    with autopart.compile(Lopsided(), "cpu:4", **options) as pipe:
        assert pipe.scaler is not None
        pipe.scaler.scale, skipped, same = 16.0, list[bool](), True
        optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3)
        for x in (good, bad, good):
            before = {name: p.detach().clone() for name, p in pipe.named_parameters()}
            pipe.step(x)
            skipped.append(pipe.skipped)
            if not pipe.skipped:
                optimizer.step()
            same &= not pipe.skipped or all(p.grad is None for _, p in pipe.named_parameters())
            same &= pipe.skipped == all(torch.equal(before[n], p) for n, p in pipe.named_parameters())
            optimizer.zero_grad()
        return skipped, same, [*before]


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1])
def test_all_ranks_skip_a_step_of_which_one_has_an_infinite_gradient(zero: int, workers: Workers) -> None:
    for skipped, same, _ in workers.run(overflowing, zero):
        assert skipped == [False, True, False] and same


# -- what stands guard -------------------------------------------------------------------------------------------------


def guarded(trap: str) -> list[str]:
    """Train with shared state of pieces, with or without a guard; return what is wrong."""
    model = gpt()
    optimizer = adamw(model.parameters())
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        if "sent" in trap:
            right = SharedValues.begin

            def begin(self: SharedValues, only: int | None = None) -> None:
                kept, self._shared = self._shared, [each for each in self._shared if not each[0].parted]
                right(self, only)
                self._shared = kept

            patch.setattr(SharedValues, "begin", begin)
        if "summed" in trap:
            patch.setattr(replicas, "_open_parts", lambda *given: None)
        if "kept" in trap:
            keeps = placement.Placement.keeps
            patch.setattr(
                placement.Placement, "keeps", lambda self, rank, name: name == "up.0.weight" or keeps(self, rank, name)
            )
        with compiled(4, **SHARED) as pipe:
            own = adamw(pipe.parameters())
            for seed in (1, 2):
                loss, expected = pipe.step(*batch(seed)).item(), model(*batch(seed))
                expected.backward()
                found += [f"loss {seed}"] * (abs(loss / expected.item() - 1) > EXACT)
                for name, gradient in pipe.gradients().items():
                    reference = dict(model.named_parameters())[name].grad
                    near = gradient is not None and torch.allclose(gradient, reference, rtol=1e-8, atol=1e-11)
                    found += [f"gradient {seed} of {name}"] * (not near)
                for each in (own, optimizer):
                    each.step()
                    each.zero_grad()
            states = [name for name, p in pipe.named_parameters() if p in own.state]
            found += [f"state of {name}" for name, _ in pipe.named_parameters() if name not in states and _.numel()]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trap", "says"),
    [
        ("", "^$"),
        ("values of pieces that nobody sent", "^loss 2"),
        ("pieces that nothing summed", "^gradient 1"),
        ("pieces that two ranks kept", "^state of up.0.weight"),
    ],
)
def test_without_its_guard_shared_state_is_wrong(trap: str, says: str, workers: Workers) -> None:
    found = workers.run(guarded, trap)
    assert any(re.search(says, " ".join(each)) for each in found), found
    assert trap or not any(found)


# -- dropout -----------------------------------------------------------------------------------------------------------


def dropped(given: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    options = {"sample": batch(0), "costs": "analytic", "micro_batches": 2, **given}
    found = autopart.verify(Gpt(dropout=0.2).double(), "cpu:4", **options)
    return found.ok, found.loss_error, found.largest


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"recompute": "all", "schedule": "zb-h1"}], ids=str)
def test_replicas_of_a_group_draw_the_numbers_of_one_process(more: dict[str, Any], workers: Workers) -> None:
    ok, loss, largest = workers.run(dropped, {**SHARED, **more})[0]
    assert ok and max(loss, largest) < EXACT

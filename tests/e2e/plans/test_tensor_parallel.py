"""Ranks that divide the weights and the work of a stage train like one process."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.extending.shards_in_process import captured_at
from support.jobs.state.pieces import EXACT, batch, gpt
from support.models.tokens.by_hand import Gpt
from support.models.zoo import CASES
from support.workers import Workers
from torch import nn
from torch.optim import swa_utils

import autopart
from autopart.files.plans import plan_from_json, plan_to_json
from autopart.ir.actions import COMPUTE, SEND
from autopart.ir.errors import BatchError
from autopart.ir.program import inside
from autopart.passes.program.messages import check_messages
from autopart.passes.program.routing import route
from autopart.passes.program.verify import check_program
from autopart.report.page.page import plan_page
from autopart.report.plan_diff import diff_plans
from autopart.runtime.sums.replicas import ReplicaSums
from autopart.session.placement import Placement


def options(world: int, **given: Any) -> dict[str, Any]:
    return {"cluster": f"cpu:{world}", "sample": batch(0), "costs": "analytic", "micro_batches": 2, **given}


def trained(world: int, given: dict[str, Any]) -> dict[str, Any]:
    """Train a few steps and evaluate, and return what was found."""
    torch.set_num_threads(1)
    with autopart.compile(gpt(), **options(world, **given)) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        found = []
        for seed in (1, 2):
            optimizer.zero_grad()
            loss = pipe.step(*batch(seed))
            norm = pipe.clip_grad_norm_(0.1)
            found.append((float(loss), float(norm), pipe.gradients()))
            optimizer.step()
        with pytest.raises(autopart.UsageError, match="Adafactor may look at whole tensors, and this"):
            torch.optim.Adafactor(pipe.parameters()).step()
        own = {name: tuple(p.shape) for name, p in pipe.named_parameters()}
        state = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
        evaluated = float(pipe.eval_loss(*batch(3)))
        step = pipe.timeline(*batch(3))
        return {"steps": found, "own": own, "state": state, "loss": evaluated, "plan": pipe.plan, "timeline": step}


def plain() -> tuple[list[Any], nn.Module]:
    model = gpt()
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for seed in (1, 2):
        optimizer.zero_grad()
        loss = model(*batch(seed))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        found.append((loss.item(), norm.item(), {name: p.grad.clone() for name, p in model.named_parameters()}))
        optimizer.step()
    return found, model


def require_like_one_process(results: list[dict[str, Any]]) -> None:
    expected, model = plain()
    for result in results:
        for (loss, norm, gradients), (other, other_norm, reference) in zip(result["steps"], expected, strict=True):
            assert (loss, norm) == pytest.approx((other, other_norm), rel=EXACT)
            for name, gradient in reference.items():
                torch.testing.assert_close(gradients[name], gradient, rtol=EXACT, atol=1e-13)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(result["state"][name], tensor, rtol=1e-8, atol=1e-10)
        if "loss" in result:
            evaluated = model.eval()(*batch(3)).item()
            assert result["loss"] == pytest.approx(evaluated, rel=1e-8)


def test_two_ranks_of_a_stage_train_like_one_process(pair: Workers) -> None:
    results = pair.run(trained, 2, {"tensor_parallel": 2, "stages": 1})
    require_like_one_process(results)
    own = results[0]["own"]
    assert own["qkv.0.weight"] == (24, 16) and own["out.0.weight"] == (16, 8) and own["words.weight"] == (12, 16)
    assert own["norms.0.weight"] == (16,)
    plan = results[0]["plan"]
    assert plan.decision.shards == 2 and plan.stages[0].ranks == (0, 1)
    assert plan_from_json(plan_to_json(plan)).decision == plan.decision
    assert "divided among 2 ranks (tensor parallelism)" in plan.explain()


def test_two_stages_of_two_ranks_train_like_one_process(workers: Workers) -> None:
    results = workers.run(trained, 4, {"tensor_parallel": 2, "stages": 2})
    require_like_one_process(results)
    plan = results[0]["plan"]
    assert [stage.ranks for stage in plan.stages] == [(0, 1), (2, 3)]
    alone = autopart.plan(gpt(), **options(4, stages=2))
    assert "stage 0 ranks" in diff_plans(plan, alone)
    measured, simulated = results[0]["timeline"], autopart.simulate(plan, gpt(), "cpu:4", sample=batch(0))
    assert all(result["timeline"] == measured for result in results)
    computes = [
        {rank: [s.action for s in own if s.action.is_a.role == COMPUTE] for rank, own in step.by_rank().items()}
        for step in (measured, simulated)
    ]
    assert computes[0] == computes[1] and computes[0].keys() == {0, 1, 2, 3}
    page = plan_page(plan, measured=measured)
    assert all(f'"rank {rank}"' in page for rank in range(4)) and '"rank 2 (x2)"' in page


def resumed(world: int, given: dict[str, Any], folder: str, *, load: bool) -> dict[str, Any]:
    """Train one step, from a checkpoint or from the first values, and save it."""
    torch.set_num_threads(1)
    with autopart.compile(gpt(), **options(world, **given)) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        loaded = None
        if load:
            pipe.load(folder, optimizer)
            loaded = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
        loss = pipe.step(*batch(1 + load))
        norm = pipe.clip_grad_norm_(0.1)
        gradients = pipe.gradients()
        optimizer.step()
        if not load:
            pipe.save(folder, optimizer)
        with pipe.full_parameters():
            full = {name: p.detach().clone() for name, p in pipe.model.named_parameters()}
        state = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
        assert all(torch.equal(full[name].to(tensor), tensor) for name, tensor in state.items() if name in full)
        return {"loaded": loaded, "state": state, "steps": (float(loss), float(norm), gradients)}


SAVED: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (2, {"tensor_parallel": 2, "stages": 1}, {"stages": 2}),
    (2, {"stages": 2}, {"tensor_parallel": 2, "stages": 1}),
    (4, {"tensor_parallel": 4, "stages": 1}, {"stages": 3}),
    (4, {"tensor_parallel": 4, "stages": 1}, {"tensor_parallel": 2, "stages": 2}),
    (4, {"tensor_parallel": 2, "stages": 2}, {"tensor_parallel": 4, "stages": 2, "stages_per_rank": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "first", "then"), SAVED)
def test_checkpoints_are_of_whole_tensors(
    world: int, first: dict[str, Any], then: dict[str, Any], pair: Workers, workers: Workers, tmp_path: Path
) -> None:
    pool = pair if world == 2 else workers
    saved = pool.run(partial(resumed, load=False), world, first, str(tmp_path))
    again = pool.run(partial(resumed, load=True), world, then, str(tmp_path))
    for before, after in zip(saved, again, strict=True):
        assert all(torch.equal(after["loaded"][name], tensor) for name, tensor in before["state"].items())
    require_like_one_process([{**a, "steps": [s["steps"], a["steps"]]} for s, a in zip(saved, again, strict=True)])


def carried(world: int, given: dict[str, Any], other: dict[str, Any]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Train a step, go on under another plan, train another one; return both, and the average of the weights."""
    torch.set_num_threads(1)
    found = []
    with autopart.compile(gpt(), **options(world, **given)) as pipe:
        for seed in (1, 2):
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            found.append((pipe.step(*batch(seed)).item(), pipe.gradients()))
            optimizer.step()
            optimizer.zero_grad()
            if seed == 1:
                if pipe.plan.decision.shards > 1:
                    again = pipe.replan(optimizer)
                    assert not again.adopted and again.reason.startswith("the plan that runs is still the best one")
                    assert again.before_s == pytest.approx(pipe.plan.step_ns * 1e-9, rel=1e-6)
                plan = autopart.plan(gpt(), **options(world, **other))
                pipe.adopt(plan)
                assert pipe.plan.decision.shards == other.get("tensor_parallel", 1)
        averaged = autopart.AveragedModel(pipe, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
        for seed in (3, 4):
            pipe.step(*batch(seed))
            torch.optim.SGD(pipe.parameters(), lr=0.1).step()
            averaged.update_parameters()
        with averaged.applied():
            return found, {name: tensor.clone() for name, tensor in pipe.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "other"),
    [
        ({"tensor_parallel": 2, "stages": 2}, {"tensor_parallel": 4, "stages": 1}),
        ({"tensor_parallel": 4, "stages": 1}, {"stages": 4}),
        ({"stages": 2, "replicas": 2}, {"tensor_parallel": 2, "stages": 2}),
    ],
)
def test_weights_move_to_a_plan_with_other_pieces_and_averages_are_of_whole_tensors(
    given: dict[str, Any], other: dict[str, Any], workers: Workers
) -> None:
    results = workers.run(carried, 4, given, other)
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averaged = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    for number, seed in enumerate((1, 2, 3, 4)):
        loss = model(*batch(seed))
        loss.backward()
        for found, _ in results if number < 2 else ():
            own, gradients = found[number]
            assert own == pytest.approx(loss.item(), rel=EXACT)
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(gradients[name], parameter.grad, rtol=EXACT, atol=1e-13)
        optimizer.step()
        if number < 2:
            optimizer.zero_grad()
        if number >= 2:
            averaged.update_parameters(model)
    for _, state in results:
        for name, tensor in averaged.module.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-12)


def guarded(trap: str) -> str:
    """Train a step, with or without a guard; return what is wrong, "" for nothing."""
    torch.set_num_threads(1)
    expected, _ = plain()
    own = batch(1)
    with pytest.MonkeyPatch.context() as patch:
        if "norm" in trap:
            right = Placement.owned_by
            patch.setattr(Placement, "owned_by", lambda self, rank: {**right(self, 0), **right(self, rank)})
        if "summed" in trap:
            patch.setattr(ReplicaSums, "_launch", lambda self, bucket, group: None)
        if "batches" in trap and int(os.environ["RANK"]):
            own = batch(9)[0], own[1]
        if trap.endswith("unseen"):
            patch.setattr("autopart.session.executors.preparation.digest", lambda tensors: 1.0)
        with autopart.compile(gpt(), **options(2, tensor_parallel=2, stages=1)) as pipe:
            try:
                loss = pipe.step(*own).item()
            except BatchError as error:
                return str(error)
            norm, gradients = float(pipe.clip_grad_norm_(0.1)), pipe.gradients()
    plain_loss, plain_norm, others = expected[0]
    off = [name for name, other in others.items() if not torch.allclose(gradients[name], other, rtol=EXACT, atol=1e-13)]
    wrong = ["loss"] * (abs(loss / plain_loss - 1) > EXACT) + ["norm"] * (abs(norm / plain_norm - 1) > EXACT)
    return ", ".join([*wrong, *off])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trap", "says"),
    [
        ("", "^$"),
        ("a norm that counts whole parameters on every rank", "^norm, "),
        ("gradients of whole parameters that nothing summed", "^norm, "),
        ("batches that differ in a group", "replicas of the first stage were given different batches"),
        ("batches that differ in a group, unseen", "^loss, norm, "),
    ],
)
def test_without_its_guard_a_step_is_wrong(trap: str, says: str, pair: Workers) -> None:
    found = pair.run(guarded, trap)
    assert all(re.search(says, each) for each in found), found


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        {"stages": 1, "replicas": 2},
        {"stages": 1, "tensor_parallel": 4},
        {"stages": 2, "recompute": "all"},
        {"stages": 2, "schedule": "zb-h1", "micro_batches": 4},
        {"stages": 4, "stages_per_rank": 2, "micro_batches": 4},
    ],
)
def test_other_plans_train_like_one_process(given: dict[str, Any], workers: Workers) -> None:
    require_like_one_process(workers.run(trained, 4, {"tensor_parallel": 2, **given}))


def dropped(given: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    given = {"sample": batch(0), "costs": "analytic", "micro_batches": 2, **given}
    found = autopart.verify(Gpt(dropout=0.2).double(), "cpu:4", **given)
    return found.ok, found.loss_error, found.largest, found.table()


@pytest.mark.slow
def test_dropout_draws_the_numbers_of_one_process(workers: Workers) -> None:
    ok, loss, largest, table = workers.run(dropped, {"tensor_parallel": 2, "stages": 2, "recompute": "all"})[0]
    assert ok and max(loss, largest) < EXACT
    rows = {line.split()[0]: line for line in table.splitlines()}
    assert rows["qkv.0.weight"].endswith("axis 0 by 2, each of 3 blocks") and rows["down.1.weight"].endswith(
        "axis 1 by 2"
    )
    assert rows["norms.0.weight"].endswith("whole")


def verified(name: str, world: int, given: dict[str, Any], dtype: torch.dtype = torch.float64) -> Any:
    torch.set_num_threads(1)
    case = CASES[name]
    sample = case.data(4, dtype)
    found = autopart.verify(case.model(dtype=dtype), f"cpu:{world}", sample=sample, costs="analytic", **given)
    return found.ok, found.loss_error, found.largest


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "vit", "qwen3"])
def test_models_are_verified_on_two_and_four_ranks(name: str, pair: Workers, workers: Workers) -> None:
    exact = CASES[name].double
    for pool, given in (
        (pair, {"stages": 1, "micro_batches": 2}),
        (workers, {"stages": 2, "micro_batches": 2, "cuts": ()}),
    ):
        ok, loss, largest = pool.run(verified, name, pool.world, {"tensor_parallel": 2, **given})[0]
        assert ok and max(loss, largest) < (EXACT if exact else 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_differs_by_rounding(precision: str, pair: Workers) -> None:
    given = {"tensor_parallel": 2, "stages": 1, "micro_batches": 2, "precision": precision}
    ok, loss, _ = pair.run(verified, "llama", 2, given, torch.float32)[0]
    assert ok and loss < 1e-2


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"schedule": "pipedream"}, "pipedream"),
        ({"replica_policy": "turn"}, "replicas in turn"),
    ],
)
def test_what_does_not_run_with_tensor_parallelism_is_refused_by_name(given: dict[str, Any], what: str) -> None:
    with pytest.raises(autopart.RefusedError, match=f"does not run with {what}.* yet"):
        autopart.plan(gpt(), **options(4, tensor_parallel=2, **given))


class Noisy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return (x + torch.randn_like(x)).square().mean()


def test_random_ops_other_than_dropout_are_refused_with_a_way_out_that_is_theirs() -> None:
    with pytest.raises(
        autopart.RefusedError, match=r"(?s)random numbers of randn_like.*what it draws as an input"
    ) as seen:
        autopart.plan(Noisy(), "cpu:2", sample=torch.ones(4, 8), tensor_parallel=2)
    assert __file__ in str(seen.value) and "dropout" not in str(seen.value)


def test_auto_takes_the_fastest_of_all_that_fit_and_shows_the_others() -> None:
    plans = {n: autopart.plan(gpt(), **options(4, tensor_parallel=n, stages=1)) for n in (1, 2, 4, "auto")}
    best = plans["auto"]
    assert best.step_ns == min(plan.step_ns for plan in plans.values())
    others = {each.name: each for each in best.outlook.alternatives if "tensor_parallel" in each.name}
    expected = {f"tensor_parallel={n}": p for n, p in plans.items() if n not in ("auto", best.decision.shards)}
    assert others.keys() == expected.keys()
    for name, other in others.items():
        if "not searched" in other.why:
            assert best.step_ns <= other.step_ns <= expected[name].step_ns
        else:
            assert other.step_ns == expected[name].step_ns


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_members_of_a_group_run_the_same_computes_in_one_order(schedule: str) -> None:
    """The lemma behind exchanges inside of computes: each group is one that a compute is proven to bring together, its
    members have equal sequences of computes, and messages go to the same place of another group."""
    plan = autopart.plan(gpt(), **options(4, tensor_parallel=2, stages=2, schedule=schedule, micro_batches=4))
    graph = captured_at(gpt(), batch(0))[0].graph
    program = check_messages(check_program(route(plan.decision, graph), schedule))
    for stage in plan.stages:
        first, second = (
            [action for action in program.part(rank) if action.is_a.role == COMPUTE] for rank in stage.ranks
        )
        assert first == second and first
        assert all(inside(program, action) == (("shards", stage.ranks),) for action in first)
    moved = [each for action in program.order if action.is_a.role == SEND for each in program.transfers(action)]
    assert moved and all((each.src_rank - each.dst_rank) % 2 == 0 for each in moved)


def test_groups_lie_inside_of_the_innermost_level() -> None:
    with pytest.raises(autopart.UsageError, match="tensor_parallel is 2, and the innermost level"):
        autopart.plan(gpt(), **options(3, tensor_parallel=2))


def test_dropout_inside_of_a_kernel_of_attention_is_refused_by_module() -> None:
    model = CASES["gpt2"].model(dropout=0.1)
    with pytest.raises(autopart.RefusedError, match=r"attention with dropout cannot be divided[\s\S]*h\.0\.attn"):
        autopart.plan(model, "cpu:2", sample=CASES["gpt2"].data(4), costs="analytic", tensor_parallel=2)

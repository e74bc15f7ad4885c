"""Pieces of masters and of optimizer state in checkpoints, and under another plan: nothing is lost or rounded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs.state.pieces import BESIDE, EXACT, HALF, SHARED, adamw, alone, batch, compiled, gpt, masters_of
from support.workers import Workers

import autopart
from autopart.files.checkpoints.document import read_document
from autopart.files.checkpoints.tensor_files import opened
from autopart.session.session import Session

# -- checkpoints -------------------------------------------------------------------------------------------------------


def saved(world: int, given: dict[str, Any], folder: str) -> tuple[list[Any], str]:
    """Train two steps, and save."""
    with compiled(world, **given) as pipe:
        optimizer = adamw(pipe.parameters())
        losses = []
        for seed in (1, 2):
            losses.append(pipe.step(*batch(seed)).item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, str(pipe.save(folder, optimizer))


def saved_again(world: int, given: dict[str, Any], folder: str, other: str) -> tuple[list[Any], str]:
    """Load a checkpoint, save it at once, and train on."""
    with compiled(world, **given) as pipe:
        optimizer = adamw(pipe.parameters())
        pipe.load(folder, optimizer)
        path = str(pipe.save(other, optimizer))
        losses = []
        for seed in (3, 4):
            losses.append(pipe.step(*batch(seed)).item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, path


def stored(path: str) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint."""
    found = opened(Path(path), read_document(Path(path)))
    return {name: of.read(name) for of in (found.weights, found.more) for name in of.by_name}


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, HALF], ids=["double", "masters"])
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (SHARED, {"stages": 4}),
        (SHARED, {"stages": 2, "replicas": 2, "zero": 1}),
        (SHARED, {"tensor_parallel": 4, "stages": 1}),
        (SHARED, {"tensor_parallel": 2, "stages": 2}),
        ({"stages": 1, "replicas": 4, "zero": 1}, SHARED),
        ({"tensor_parallel": 4, "stages": 1}, SHARED),
    ],
)
def test_a_checkpoint_is_the_same_under_any_plan_bit_by_bit(
    first: dict[str, Any], then: dict[str, Any], more: dict[str, Any], workers: Workers, tmp_path: Path
) -> None:
    one = workers.run(saved, 4, {**first, **more}, str(tmp_path / "first"))
    two = workers.run(saved_again, 4, {**then, **more}, str(tmp_path / "first"), str(tmp_path / "then"))
    before, after = stored(one[0][1]), stored(two[0][1])
    assert before.keys() == after.keys() and any(name.startswith("optimizer/") for name in before)
    assert more == {} or any(name.startswith("master/") for name in before)
    assert all(torch.equal(before[name], after[name]) for name in before)
    if not more:
        assert [*one[0][0], *two[0][0]] == pytest.approx(alone((1, 2, 3, 4))[0], rel=EXACT)


def with_state_lost(folder: str) -> str:
    """Save while the first rank has no state of one of its pieces."""
    with compiled(4, **BESIDE) as pipe:
        optimizer = adamw(pipe.parameters())
        pipe.step(*batch(1))
        optimizer.step()
        if pipe.rank == 0:
            del optimizer.state[dict(pipe.named_parameters())["up.0.weight"]]["exp_avg"]
        with pytest.raises(autopart.CheckpointError) as refused:
            pipe.save(folder, optimizer)
        return str(refused.value)


@pytest.mark.slow
def test_state_that_a_rank_lost_is_not_saved_without_it(workers: Workers, tmp_path: Path) -> None:
    for text in workers.run(with_state_lost, str(tmp_path)):
        assert re.search(r"optimizer/exp_avg/up\.0\.weight cannot be saved[\s\S]*not cut like", text), text


# -- another plan ------------------------------------------------------------------------------------------------------


def carried(dtype: torch.dtype, plans: list[dict[str, Any]]) -> tuple[list[float], dict[str, torch.Tensor], list[int]]:
    """Train two steps under each plan with one optimizer; return losses, values at the end and ranks in a group."""
    masters = dtype != torch.float64
    losses, shards = [], []
    with compiled(4, dtype, master_weights=masters, **plans[0]) as pipe:
        optimizer = adamw(pipe.parameters())
        for number, given in enumerate(plans):
            if number:
                options = {"sample": batch(0), "costs": "analytic", "micro_batches": 2, "master_weights": masters}
                pipe.adopt(autopart.plan(gpt(dtype), "cpu:4", **options, **given), optimizer)
            for seed in (1, 2):
                losses.append(pipe.step(*batch(2 * number + seed)).item())
                optimizer.step()
                optimizer.zero_grad()
            shards.append(pipe.plan.decision.shards)
        return losses, {**pipe.state_dict(), **masters_of(pipe)}, shards


PLANS: list[dict[str, Any]] = [
    {"tensor_parallel": 2, "stages": 2},
    {"tensor_parallel": 4, "stages": 1},
    {"stages": 4},
    SHARED,
    {"stages": 2, "replicas": 2, "zero": 1},
]


@pytest.mark.slow
def test_the_state_of_an_optimizer_moves_between_pieces(workers: Workers) -> None:
    results = workers.run(carried, torch.float64, PLANS)
    expected, model = alone(range(1, 1 + 2 * len(PLANS)))
    for losses, state, shards in results:
        assert losses == pytest.approx(expected, rel=1e-9) and shards == [2, 4, 1, 2, 1]
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
def test_masters_move_between_pieces_with_the_state(workers: Workers) -> None:
    """A loss that is the same for values of a checkpoint: nothing is rounded on the way."""
    through = workers.run(carried, torch.bfloat16, [SHARED, {"tensor_parallel": 4, "stages": 1}, SHARED])[0]
    twice = workers.run(carried, torch.bfloat16, [SHARED, SHARED, SHARED])[0]
    assert through[0][:2] == twice[0][:2]
    assert through[0] == pytest.approx(twice[0], rel=2e-2)


def uncut(session: Session, masters: dict[str, torch.Tensor]) -> None:
    """Take masters over as they are, whole."""
    for name in masters:
        session.tensors.masters.take_over(name, session.tensors.held[name], masters[name])


def restored(trap: str) -> tuple[bool, bool]:
    """Return whether masters come back from a state that is loaded before there is a plan, and are not rounded."""
    with compiled(4, **SHARED, **HALF) as pipe:
        optimizer = adamw(pipe.parameters())
        for seed in (1, 2):
            pipe.step(*batch(seed))
            optimizer.step()
            optimizer.zero_grad()
        state, masters = pipe.state_dict(), masters_of(pipe)
    options = {"costs": "analytic", "micro_batches": 2, "master_weights": True, **SHARED}
    with pytest.MonkeyPatch.context() as patch:
        if trap:
            patch.setattr("autopart.state.core.take_masters", uncut)
        with autopart.compile(gpt(torch.bfloat16), "cpu:4", **options) as pipe:
            pipe.load_state_dict(state)
            pipe.step(*batch(1))
            found = masters_of(pipe)
    exact = any(not torch.equal(master, master.bfloat16().float()) for master in masters.values())
    return all(torch.equal(found[name], masters[name]) for name in masters), exact


@pytest.mark.slow
@pytest.mark.parametrize("trap", ["", "masters that are not cut"])
def test_masters_of_pieces_come_back_from_a_state_that_was_loaded_before_the_plan(trap: str, workers: Workers) -> None:
    assert workers.run(restored, trap) == [(not trap, True)] * 4

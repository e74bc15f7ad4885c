"""Another plan while training goes on: the same optimizer, its state, and whether it pays."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.jobs import replan_jobs as jobs
from support.workers import Workers

from autopart.extras.freezing.carried import spread
from autopart.ir.shares import Piece, cut, overlap

pytestmark = pytest.mark.timeout(200)
STEPS = 8


def plans(ranks: int = 2) -> list[Any]:
    return [
        jobs.plan_of(ranks, stages=2, replicas=1, cuts=("layers.1",), micro_batches=2, schedule="1f1b"),
        jobs.plan_of(ranks, stages=1, replicas=2, micro_batches=2, zero=1),
        jobs.plan_of(ranks, stages=2, replicas=1, cuts=("layers.4",), micro_batches=3, schedule="gpipe"),
        jobs.plan_of(ranks, stages=1, replicas=2, micro_batches=1, zero=0),
    ]


def same_training(found: Sequence[Any], expected: tuple[list[float], dict[str, Any], dict[str, Any]]) -> None:
    """Compare losses, weights and the optimizer's state of all ranks with those of one process, in fp64."""
    losses, state, moments = expected
    joined: dict[str, Any] = {}
    for own_losses, own_state, own_moments, *_ in found:
        assert own_losses == pytest.approx(losses, rel=1e-12)
        for name, tensor in state.items():
            torch.testing.assert_close(own_state[name], tensor, rtol=1e-10, atol=1e-12)
        joined |= own_moments
    assert joined.keys() == moments.keys()
    for name, value in moments.items():
        torch.testing.assert_close(joined[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[] if k == "adamw" else pytest.mark.slow) for k in jobs.OPTIMIZERS]
)
def test_an_optimizer_goes_on_with_its_state_under_four_plans(pair: Workers, kind: str) -> None:
    found = pair.run(jobs.changing, kind, plans(), 2, STEPS)
    same_training(found, jobs.alone(kind, STEPS))


def test_layers_freeze_and_the_plan_follows(pair: Workers) -> None:
    frozen, at = [0, 0, 3, 3, 3, 5], [2, 5]
    found = pair.run(jobs.replanned, "adamw", frozen, at, STEPS)
    same_training(found, jobs.alone("adamw", STEPS, frozen))
    for first, second in zip(*(each[3] for each in found), strict=True):
        assert first.reason == second.reason and first.adopted == second.adopted
        assert first.adopted == (first.took_s > 0)
        assert first.before_s >= first.after_s or not first.adopted


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_is_said_to_move_moves(pair: Workers, dtype: torch.dtype) -> None:
    """Weights, masters and gradients from their owners, and the optimizer's state."""
    found = pair.run(jobs.moved, dtype)
    said = {amount for amount, _ in found}
    assert said == {sum(sent for _, sent in found)} and said != {0}


def test_an_optimizer_that_was_left_behind_is_refused(pair: Workers) -> None:
    for error in pair.run(jobs.forgotten, plans()[:2]):
        assert "before the plan was changed" in error.what and "pipe.adopt(plan, optimizer)" in error.fix


PARTS = st.sampled_from([(0, 1, 1), (0, 2, 1), (0, 3, 1), (0, 4, 1), (1, 2, 1), (0, 2, 3)])
"""The axis, parts and blocks of a tensor."""


@given(st.lists(st.tuples(PARTS, PARTS, st.integers(1, 2), st.integers(1, 2), st.integers(0, 9)), max_size=8))
def test_every_rank_that_lacks_a_piece_gets_all_of_it_from_ranks_that_have_it(
    tensors: list[tuple[tuple[int, int, int], tuple[int, int, int], int, int, int]],
) -> None:
    """Each rank has one piece before, and wants one."""
    having: dict[Piece, list[int]] = {}
    wanting: dict[Piece, list[int]] = {}
    sizes: dict[Piece, int] = {}
    for number, (before, after, had, wanted, size) in enumerate(tensors):
        for ranks, (axis, parts, blocks), copies in ((having, before, had), (wanting, after, wanted)):
            for piece in cut(f"p{number}", axis, parts, blocks):
                ranks[piece] = [piece.index + copy * parts for copy in range(copies)]
        sizes |= {piece: size for piece in having if piece.name == f"p{number}"}
    routes = spread(having, wanting, sizes)
    got: dict[tuple[Piece, int], Fraction] = {}
    for (source, piece), rank, target in routes:
        assert rank in having[source] and (rank == target or target not in having[source])
        got[piece, target] = got.get((piece, target), Fraction(0)) + overlap(source, piece)
    lacking = {(piece, target) for piece in wanting for target in wanting[piece] if target not in having.get(piece, ())}
    assert got == {(piece, target): Fraction(1, piece.parts) for piece, target in lacking}

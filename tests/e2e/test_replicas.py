"""Stages on several ranks: rows are divided, gradients summed, and results equal one process."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from support.grids import with_rotated
from support.jobs import random_plan_jobs, replica_jobs
from support.jobs.sparse_jobs import alone
from support.models.zoo import CASES
from support.workers import Workers


@pytest.fixture(scope="session")
def trio(own_cache):
    """A pool of three processes, for plans that leave no process idle."""
    with Workers(3, timeout=240) as pool:
        yield pool


COUNTS = ((2,), (4,), (2, 1), (1, 2), (2, 2), (3, 1), (1, 3))  # (2,), (4,), (2, 2) replicate whole pipelines
ARCHITECTURES = [name for name, case in CASES.items() if not case.coupled]  # others: test_batch_statistics.py


def _check(
    workers: Workers,
    name: str,
    counts: tuple[int, ...],
    micros: int,
    rows: tuple[int, ...],
    recompute: str = "auto",
    transport: str = "auto",
    policy: str | None = None,
) -> None:
    found, planned = workers.run(replica_jobs.replicated, name, counts, micros, rows, recompute, transport, policy)[0]
    assert planned == counts
    for difference in found:
        assert difference.within(torch.float32), difference


@pytest.mark.parametrize(
    ("name", "counts", "micros", "rows"),
    [
        ("tied", (2, 1), 2, (7, 7)),  # a tied parameter; all labels ignored on one replica
        ("shared_by_all", (1, 3), 2, (7, 2)),  # then fewer rows than replicas
        ("skips", (2, 2), 3, (10,)),
        pytest.param("exp_of_scores", (2, 2), 2, (8,), marks=pytest.mark.slow),
        pytest.param("unused_grad", (3, 1), 2, (7, 1), marks=pytest.mark.slow),
        pytest.param("transposed", (1, 2), 2, (8,), marks=pytest.mark.slow),
    ],
)
def test_replicas_equal_one_process(workers, name, counts, micros, rows):
    _check(workers, name, counts, micros, rows)


@pytest.mark.parametrize(
    ("name", "counts", "micros", "transport"),
    [
        ("shared_by_all", (1, 3), 4, "auto"),  # tied over stages whose ranks take different micro-batches
        pytest.param("skips", (2, 2), 3, "auto", marks=pytest.mark.slow),
        pytest.param("skips", (4,), 5, "auto", marks=pytest.mark.slow),
        ("tied", (3, 1), 5, "fake-nccl"),
    ],
)
def test_replicas_that_take_micro_batches_in_turn_equal_one_process(workers, name, counts, micros, transport):
    _check(workers, name, counts, micros, (11, 2), transport=transport, policy="turn")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "slower", "rows", "options"),
    [
        ("llama_tied", (1, 3), (16, 7), {}),
        ("gpt2", (1, 2, 4, 2), (18, 13), {}),
        ("bert", (2, 1, 1, 3), (24, 5), {}),
        ("t5", (1, 4, 2, 2), (20, 9), {"stages": 2, "replicas": 2}),
        ("convnext", (1, 2, 3, 1), (16, 11), {"stages": 1, "replicas": 4}),
        ("tied", (3, 1, 2, 5), (22, 9), {"zero": 1, "recompute": "all"}),
    ],
)
def test_a_plan_for_devices_of_different_speeds_equals_one_process(workers, pair, name, slower, rows, options):
    """The planner must choose unequal shares."""
    found, planned = (pair if len(slower) == 2 else workers).run(
        replica_jobs.uneven_devices, name, slower, rows, options
    )[0]
    unequal = 0
    for ranks, shares in planned:
        for (a, mine), (b, other) in itertools.combinations(zip(ranks, shares, strict=True), 2):
            assert (mine >= other) if slower[a] < slower[b] else (mine <= other or slower[a] == slower[b])
        unequal += len(set(shares)) > 1
    assert unequal, planned
    for difference in found:
        assert difference.within(torch.float32), difference


@pytest.mark.slow
def test_a_real_model_with_replicas_trains_as_in_one_process(workers):
    _check(workers, "llama_tied", (2, 1), 2, (9,), recompute="all")


@pytest.mark.parametrize(("name", "counts"), [("tied", (2, 2)), ("shared_by_all", (3, 1))])
def test_replicas_are_equal_bit_by_bit_after_many_steps(workers, name, counts):
    results = workers.run(replica_jobs.trained, name, counts, 10, 0.1)
    for result in results:
        for found, expected in (*result["losses"], *result["norms"], result["evaluated"]):
            assert found == pytest.approx(expected, rel=1e-4)
        for other in results:
            for held in result["held"].keys() & other["held"].keys():
                assert torch.equal(result["held"][held], other["held"][held])
    assert sorted(result["stage"] for result in results) == [s for s, count in enumerate(counts) for _ in range(count)]


@pytest.mark.parametrize(("counts", "recompute"), [((3, 1), "off"), ((1, 2), "all")])
def test_dropout_masks_do_not_depend_on_replicas(workers, counts, recompute):
    expected, gradients = workers.run(replica_jobs.masked, (1, 1), "off")[0]
    found, others = workers.run(replica_jobs.masked, counts, recompute)[0]
    assert found == pytest.approx(expected, rel=1e-6)
    for name, gradient in gradients.items():
        assert torch.allclose(others[name], gradient, rtol=1e-5, atol=1e-7), name


@pytest.mark.parametrize("zero", [0, 1])
def test_sparse_gradients_stay_sparse(pair, zero):
    losses, norms, _, state = alone(False)
    results = pair.run(replica_jobs.sparse, 2, zero)
    for mine in [results] if zero else [[result] for result in results]:
        assert {name.partition(".")[0]: kind for result in mine for name, kind in result["sparse"].items()} == {
            "words": True, "bag": True, "layer": False, "head": False,
        }  # fmt: skip
    for result in results:
        assert all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(result["losses"], losses, strict=True))
        assert all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(result["norms"], norms, strict=True))
        assert all(torch.allclose(result["state"][name], tensor) for name, tensor in state.items())


def test_gradients_kept_by_the_user_are_not_changed_by_the_next_step(pair):
    assert pair.run(replica_jobs.kept_gradients) == [{"same": True, "apart": True, "freed": True}] * 2


def test_replicas_with_different_batches_are_refused(pair):
    for text in pair.run(replica_jobs.different_batches):
        assert "different batches" in text and "DistributedSampler" in text


def test_a_pipe_adopts_another_number_of_replicas(workers):
    assert workers.run(replica_jobs.moved, (2, 1), (1, 3))[0].within(torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "counts", "policy", "recompute"),
    with_rotated((ARCHITECTURES, COUNTS, ("split", "turn")), ("off", "all")),
)
def test_every_architecture_with_replicas_equals_one_process(workers, name, counts, policy, recompute):
    """Compared after a step and after accumulating another one with fewer rows.

    Parts are uneven, and one of four replicas has no row.
    """
    _check(workers, name, counts, 2 if policy == "split" else 4, (10, 7), recompute, policy=policy)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "counts"), list(itertools.product(("gpt2", "bert", "vit"), ((3,), (2, 1), (1, 2)))))
def test_replicas_on_all_ranks_equal_one_process(trio, name, counts):
    _check(trio, name, counts, 2, (10, 7))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "counts", "policy"),
    [
        (name, counts, policy)
        for name in CASES
        for counts in ((2, 1), (1, 2), (2, 2), (3, 1))
        for policy in ("split", "turn")
        if policy == "split" or sum(counts) == 4
    ],
)
def test_replicas_of_every_architecture_are_equal_bit_by_bit_after_many_steps(workers, name, counts, policy):
    held: dict[str, torch.Tensor] = {}
    for result in workers.run(replica_jobs.trained, name, counts, 10, 0.1, policy):
        assert name not in ARCHITECTURES or result["losses"][0][0] == pytest.approx(result["losses"][0][1], rel=1e-5)
        assert result["losses"][-1][0] < result["losses"][0][0]
        for parameter, found in result["held"].items():
            assert torch.equal(held.setdefault(parameter, found), found), parameter


def _check_random_plans(workers: Workers, seeds: range) -> None:
    found = workers.run(random_plan_jobs.random_plans, list(seeds))[0]
    assert not [text for text, good in found if good is False]
    assert sum(good is None for _, good in found) <= 0.6 * len(found)  # most cuts leave every stage something to train


@pytest.mark.slow
def test_random_models_under_random_plans_equal_one_process(workers):
    _check_random_plans(workers, range(2))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(100, 500, 20))
def test_many_random_models_under_random_plans_equal_one_process(workers, start):
    _check_random_plans(workers, range(start, start + 20))

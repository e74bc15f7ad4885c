"""Any model under any plan equals one process: losses, gradients, buffers, then parameters and the optimizer's state.

What a setup may have stands in `support.languages.setups`; a failure prints the smallest setup that still fails, as a
script.  Tolerances stand in `support.oracles.any_plan`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from support.jobs.any_plan import Refused, play
from support.languages.setups import REAL, Setup, drawn, smallest
from support.layouts import LAID
from support.oracles.any_plan import alone, judged, outcome, small_failure
from support.workers import Workers

from autopart.passes.program.orders import V

CHUNK = 25
PAIRED, FOUR = (10, 23, 29, 36, 44, 45, 46), (12, 29, 33, 35)
"""Seeds that run by default, on two and on four ranks; each rank by itself has what its stage computes."""
TOGETHER_PAIRED, TOGETHER_FOUR = (10, 38, 1042), (20, 35, 38, 84, 8305)
"""The same, of setups in which ranks compute together."""
EXAMPLES = {
    "four slices of grouped attention": Setup(
        "decoder",
        (4, 3),
        counts=(1, 1),
        schedule="1f1b",
        micros=2,
        slices=(7, 5, 3, 1),
        by_options=True,
        evaluated=True,
    ),
    "batch norms over all rows of replicas, in several steps": Setup(
        "batch_norm", (9, 8, 8), counts=(2,), schedule="1f1b", micros=2, synced=True, by_options=True
    ),
    "a replica without rows completes stages in an order of its own": Setup(
        "tied", (4, 4), counts=(2,), per_rank=2, schedule="weights last", micros=3, bucket_bytes=64
    ),
    "a loss that is scaled in fp16, over replicas": Setup(
        "stack", (8, 8), counts=(2,), schedule="1f1b", micros=2, dtype="float32", precision="fp16", zero=1
    ),
    "replicas that draw random numbers, and a batch of one row": Setup("dropped", (6, 1), counts=(2,), micros=2),
    "a folded schedule of a model that recomputes a part of itself": Setup(
        "checkpointed", (8, 6), counts=(1, 1), per_rank=2, placement=V, schedule="zb-v", micros=4
    ),
    "split backwards of some stages beside recomputed ones with dropout": Setup(
        "decoder_dropout",
        (4, 4),
        counts=(1, 1),
        per_rank=2,
        placement=V,
        schedule="zb-v",
        micros=3,
        recompute=1.0,
        whole=0.5,
        seed=7,
    ),
}
"""On two ranks, what default seeds do not draw."""


def check(pool: Workers, *setups: Setup) -> Counter[str]:
    """Run setups and count what became of them.  Fails with the smallest one that is wrong."""
    found: Counter[str] = Counter()
    for setup in setups:
        kind = outcome(setup, pool).kind
        assert kind != "wrong", small_failure(setup, pool)
        found[kind] += 1
    return found


def test_drawn_setups_on_two_ranks_equal_one_process(pair: Workers) -> None:
    assert check(pair, *(drawn(seed, 2, shards=1) for seed in PAIRED))["equal"] == len(PAIRED)


def test_drawn_setups_on_four_ranks_equal_one_process(workers: Workers) -> None:
    assert check(workers, *(drawn(seed, 4, shards=1) for seed in FOUR))["equal"] == len(FOUR)


def test_ranks_that_compute_together_equal_one_process(pair: Workers, workers: Workers) -> None:
    paired, four = [drawn(seed, 2) for seed in TOGETHER_PAIRED], [drawn(seed, 4) for seed in TOGETHER_FOUR]
    assert all(any(setup.zero and setup.masters and setup.shards > 1 for setup in own) for own in (paired, four))
    found = check(pair, *paired) + check(workers, *four)
    assert found["equal"] == len(TOGETHER_PAIRED + TOGETHER_FOUR)


def test_tensors_that_do_not_lie_in_the_order_of_their_axes(pair: Workers) -> None:
    names = ("laid_images", "laid_weights", "laid_complex", "laid_expanded")
    found = check(pair, *(drawn(seed, 2, model=name, shards=1) for seed, name in enumerate(names)))
    assert found["equal"] == len(names)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", LAID)
def test_every_order_in_memory_equals_one_process_or_is_refused(name: str, pair: Workers, workers: Workers) -> None:
    found = check(pair, *(drawn(seed, 2, model=name, shards=1) for seed in range(4)))
    found += check(workers, *(drawn(seed, 4, model=name, shards=1) for seed in range(4, 8)))
    assert found["refused"] <= 6


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_equals_one_process(name: str, pair: Workers) -> None:
    assert check(pair, EXAMPLES[name])["equal"]


def test_an_order_that_would_not_be_exact_is_refused_by_name(pair: Workers) -> None:
    for found in pair.run(play, Setup("batch_norm", (9, 9), per_rank=2, schedule="out of order", micros=3)):
        assert isinstance(found, Refused) and "runs micro-batch 1 behind 2" in found.text and "fix:" in found.text


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(0, 400, CHUNK))
def test_many_setups_equal_one_process_or_are_refused(first: int, pair: Workers, workers: Workers) -> None:
    """Every second chunk runs on four ranks."""
    pool = workers if first // CHUNK % 2 else pair
    found = check(pool, *(drawn(seed, pool.world) for seed in range(first, first + CHUNK)))
    assert found["refused"] <= CHUNK // 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", REAL)
def test_every_architecture_equals_one_process_or_is_refused(name: str, pair: Workers, workers: Workers) -> None:
    found = check(pair, *(drawn(seed, 2, model=name) for seed in range(4)))
    found += check(workers, *(drawn(seed, 4, model=name) for seed in range(4, 8)))
    assert found["refused"] <= 4


# -- the test itself -------------------------------------------------------------------------------------------------


def test_each_thing_that_is_compared_is_found_where_it_is_off() -> None:
    setup = Setup("batch_norm", (4, 5), micros=2, optimizer="adam")
    right = alone(setup)
    assert judged(setup, [right]).kind == "equal"

    def off(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
        return {**tensors, name: tensors[name] * (1 + 1e-6)}

    gradient = {n: None if g is None else g for n, g in right.gradients[1].items()}
    first = right.gradients[1]["first.weight"]
    assert first is not None
    wrongs = {
        "loss": replace(right, losses=[right.losses[0], right.losses[1] * (1 + 1e-6)]),
        "gradient 1": replace(right, gradients=[right.gradients[0], {**gradient, "first.weight": first * (1 + 1e-6)}]),
        "running_var": replace(right, state=off(right.state, "body.norms.0.running_var")),
        "change": replace(right, state=off(right.state, "first.weight")),
        "value": replace(right, values=off(right.values, "first.weight")),
        "exp_avg_sq": replace(
            right, optimizer={**right.optimizer, "first.bias": off(right.optimizer["first.bias"], "exp_avg_sq")}
        ),
        "no rank updates": replace(right, values={n: v for n, v in right.values.items() if n != "first.bias"}),
    }
    for what, wrong in wrongs.items():
        found = judged(setup, [wrong])
        assert found.kind == "wrong" and what in found.text, (what, found)


def test_a_failure_is_reduced_to_the_options_that_it_needs() -> None:
    big = Setup(
        "gpt2", (9, 8, 3), 4, (2, 2), 1, schedule="zb-h1", micros=4, shares=((1, 2), ()), zero=1, recompute=0.4,
        bucket_bytes=64, dtype="float32", transport="fake-nccl", by_options=True, seed=77,
    )  # fmt: skip
    least = smallest(big, lambda setup: setup.zero and setup.micros >= 2 and max(setup.counts) > 1)
    assert least == replace(Setup("stack", counts=least.counts, world=least.world), zero=1, micros=2, rows=least.rows)
    assert "by_hand(Setup(" in least.script() and "'" not in least.script().split("'")[1]


def test_setups_differ_in_everything_that_may_be_drawn() -> None:
    setups = [drawn(seed, 4, compiled=0.05) for seed in range(400)]
    for name in (
        "shards",
        "schedule",
        "per_rank",
        "micros",
        "counts",
        "zero",
        "dtype",
        "precision",
        "frozen",
        "backend",
        "whole",
    ):
        assert len({getattr(setup, name) for setup in setups}) > 1, name

"""bf16 and fp16 over stages match torch.autocast and torch.amp.GradScaler in one process, on every rank."""

from __future__ import annotations

import itertools
import statistics

import pytest
from support.jobs.precision_jobs import (
    accumulated,
    no_kernel,
    overflow,
    scales_differ,
    trained,
    trained_with_split_backwards,
)

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
        *(("tied", precision, 6, {"stages": 2}) for precision in ("bf16", "fp16")),
        ("tied", "bf16", 2, {"stages": 2, "recompute": "all", "schedule": "gpipe"}),
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
        ("tied", "fp16", 4, (2, 1)),
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
    assert any("precision_jobs.py" in text and "x.float()" in text for text in messages), messages

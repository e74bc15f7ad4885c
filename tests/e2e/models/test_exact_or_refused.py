"""Models and scripts that could mislead a capture: a step equals one process or is refused with the reason."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.grids import sampled
from support.jobs import misleading_jobs as jobs
from support.models.misleading_models import SCRIPTS
from support.workers import Workers

from autopart.ir.errors import AutopartError, RefusedError, UsageError

REFUSED: dict[str, tuple[type[AutopartError], str]] = {
    "an axis": (RefusedError, "softmax along the rows"),
    "a branch on the rows": (RefusedError, "1.0 in the program is 2.0 at 16 rows"),
    "a renormed embedding": (RefusedError, "changes parameter e.weight in place"),
    "a counter": (RefusedError, "reads attribute n and then changes it"),
    "a weight replaced": (RefusedError, "parameter l.1.weight was replaced"),
    "a layer replaced": (RefusedError, "parameter l.1.weight was replaced"),
    "a state assigned": (RefusedError, "parameter l.0.weight was replaced"),
    "a hook": (RefusedError, "a forward hook is registered"),
    "Python's random": (RefusedError, "draws random numbers from Python's random module"),
    "its own generator": (RefusedError, "reads attribute rng and then changes it"),
    "memory from None": (RefusedError, "reads attribute mem and then changes it"),
    "memories in a list": (RefusedError, "reads attribute mems and then changes it"),
    "backward in forward": (RefusedError, "backward() is called in forward()"),
    "no gradient": (RefusedError, "nothing to train"),
    "everything frozen": (RefusedError, "nothing to train"),
}


@pytest.mark.parametrize("name", sampled((name for name in SCRIPTS if name not in REFUSED), 5))
def test_a_script_trains_as_in_one_process(pair: Workers, name: str) -> None:
    losses, gradients, error = pair.run(jobs.piped, name)[0]
    expected, plain = jobs.alone(name)
    assert error is None
    assert losses == pytest.approx(expected, rel=1e-5)
    for found, wanted in zip(gradients, plain, strict=True):
        assert_gradients(found, wanted)


@pytest.mark.parametrize("name", sampled(REFUSED, 4))
def test_a_script_that_cannot_be_exact_is_refused_with_the_reason(pair: Workers, name: str) -> None:
    losses, gradients, error = pair.run(jobs.piped, name)[0]
    kind, words = REFUSED[name]
    assert type(error) is kind and words in str(error) and error.fix
    if losses:  # steps before the refusal were exact
        expected, plain = jobs.alone(name)
        assert losses == pytest.approx(expected[: len(losses)], rel=1e-5)
        assert_gradients(gradients[0], plain[0])


def assert_gradients(found: dict[str, Any], wanted: dict[str, torch.Tensor]) -> None:
    for name, gradient in found.items():
        if name not in wanted:
            assert gradient is None or not gradient.any(), name
            continue
        assert gradient is not None, name
        error = (gradient - wanted[name]).norm().item()
        assert error <= 1e-5 * wanted[name].norm().item() + 1e-8, name
    assert wanted.keys() <= found.keys()


def test_after_close_the_model_holds_the_trained_weights_and_can_be_compiled_again(pair: Workers) -> None:
    expected, plain = jobs.trained_alone(5)
    for losses, synced, closed in pair.run(jobs.trained_and_compiled_again, 3, 2):
        assert losses == pytest.approx(expected, rel=1e-5)
        for name, tensor in jobs.trained_alone(3)[1].items():
            torch.testing.assert_close(synced[name], tensor, rtol=1e-5, atol=1e-7)
        for name, tensor in plain.items():
            torch.testing.assert_close(closed[name], tensor, rtol=1e-5, atol=1e-7)


def test_closing_without_sync_empties_tensors_of_other_ranks(pair: Workers) -> None:
    held = pair.run(jobs.closed_without_sync)
    for mine, sizes in held:
        assert mine and all((size > 0) == (name in mine) for name, size in sizes.items())
    assert sorted(name for mine, _ in held for name in mine) == sorted(jobs.Net().state_dict())


def test_a_step_of_a_closed_pipe_is_refused(pair: Workers) -> None:
    for error in pair.run(jobs.step_after_close):
        assert type(error) is UsageError and "closed" in error.what


def test_dropout_continues_from_a_loaded_state(pair: Workers) -> None:
    for whole, parted, set_by_hand in pair.run(jobs.resumed):
        assert parted == whole and set_by_hand == whole
        assert len(set(whole)) == len(whole)


@pytest.mark.parametrize(("first", "second"), [("step", "eval_loss"), ("state_dict", "step"), ("step", "close")])
def test_different_calls_on_ranks_are_reported_at_once(pair: Workers, first: str, second: str) -> None:
    for error, loss in pair.run(jobs.different_calls, first, second):
        assert type(error) is UsageError and "different calls" in error.what
        assert f"rank 0 calls {first}" in error.why and f"rank 1 calls {second}" in error.why
        assert loss is None or math.isfinite(loss)


def test_a_batch_that_one_rank_cannot_read_is_reported_everywhere_and_training_continues(pair: Workers) -> None:
    for error, loss in pair.run(jobs.unreadable_on_one_rank):
        assert "rank 1" in error.where and "bad" in error.what
        assert math.isfinite(loss)


def test_a_model_changed_on_one_rank_is_reported_everywhere(pair: Workers) -> None:
    for error in pair.run(jobs.changed_on_one_rank):
        assert "changed in different ways" in error.what
        assert "rank 0: no change" in error.why and "rank 1: beta was 0.1 and is 0.9" in error.why


def test_a_capture_leaves_no_fake_tensor_behind(pair: Workers) -> None:
    for kinds, again in pair.run(jobs.caches_after_a_capture):
        assert kinds == ["Tensor"] * len(kinds) and math.isfinite(again)

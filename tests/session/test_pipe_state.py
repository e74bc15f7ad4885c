"""Parameters and state of a pipe: what stays after a skipped step, a failed step and `close`, and on every rank."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs import state_jobs as jobs
from support.models.zoo import CASES
from support.workers import Workers
from torch import nn

import autopart
from autopart.ir.errors import NonFiniteError, RunError, UsageError


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x))).float().square().mean()


def compiled(model: nn.Module, **options: Any) -> autopart.Pipe:
    return autopart.compile(model, "cpu:1", sample=torch.ones(8, 4), costs="analytic", **options)


@pytest.mark.parametrize("non_finite", ["skip", "raise"])
def test_a_step_that_is_not_finite_leaves_buffers_as_before(non_finite: str) -> None:
    model = Normed()
    with compiled(model, non_finite=non_finite, micro_batches=2) as pipe:
        pipe.step(torch.randn(8, 4))
        before = pipe.state_dict()
        bad = torch.randn(8, 4)
        bad[3] = float("nan")
        try:
            pipe.step(bad)
            assert non_finite == "skip"
        except NonFiniteError as error:
            assert non_finite == "raise" and "buffers are as before" in error.fix
        assert pipe.skipped
        for name, tensor in pipe.state_dict().items():
            assert torch.equal(tensor, before[name]), name
        pipe.step(torch.randn(8, 4))
        assert not torch.equal(pipe.state_dict()["norm.running_mean"], before["norm.running_mean"])


def test_ten_skipped_steps_in_a_row_are_warned_of_once_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    batch = torch.ones(8, 4), torch.ones(8, 4)
    pipe = autopart.compile(
        model, "cpu:1", sample=batch, loss_fn=nn.functional.mse_loss, precision="fp16", costs="analytic"
    )
    with pipe, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(25):
            pipe.step(batch)
    told = [warning for warning in seen if warning.category is autopart.NonFiniteWarning]
    assert len(told) == 1 and told[0].filename == __file__
    assert "10 training steps in a row" in str(told[0].message) and "gradient of 0.bias on rank 0" in str(
        told[0].message
    )


def test_a_state_of_a_wrapped_model_names_the_prefix_and_partial_states_load_where_asked() -> None:
    model = Normed()
    with compiled(model) as pipe:
        state = pipe.state_dict()
        with pytest.raises(UsageError, match="does not belong") as caught:
            pipe.load_state_dict({f"module.{name}": tensor for name, tensor in state.items()})
        assert "begin with 'module.'" in caught.value.why and "removeprefix('module.')" in caught.value.fix
        part = {"last.weight": torch.full((4, 4), 2.0), "head": torch.ones(1)}
        with pytest.raises(UsageError, match="does not belong"):
            pipe.load_state_dict(part)
        missing, unexpected = pipe.load_state_dict(part, strict=False)
        assert unexpected == ["head"] and sorted([*missing, "last.weight"]) == sorted(state)
        found = pipe.state_dict()
        assert (found["last.weight"] == 2.0).all() and torch.equal(found["first.weight"], state["first.weight"])


def test_a_target_given_to_predict_is_named() -> None:
    inputs, target = torch.ones(8, 4), torch.ones(8, 4)
    with autopart.compile(
        nn.Linear(4, 4), "cpu:1", sample=(inputs, target), loss_fn=nn.functional.mse_loss, costs="analytic"
    ) as pipe:
        with pytest.raises(UsageError, match="a pair that the model does not take") as caught:
            pipe.predict((inputs, target))
        assert "pipe.predict(inputs)" in caught.value.fix
        assert pipe.predict(inputs).shape == (8, 4)


def test_after_close_rank_plan_and_table_are_still_there() -> None:
    pipe = compiled(Normed())
    plan, table = pipe.plan, pipe.explain()
    pipe.close()
    assert (pipe.rank, pipe.plan, pipe.explain(), pipe.world_size) == (0, plan, table, 1)
    assert pipe.needs_data
    with pytest.raises(UsageError, match="closed"):
        pipe.state_dict()


def test_after_a_failed_step_a_state_says_what_can_still_be_had() -> None:
    with compiled(Normed()) as pipe:
        pipe.step(torch.randn(8, 4))
        state = pipe.state_dict()
        pipe.session.calls.note_failure("a step failed", RuntimeError("the op gave up"))
        with pytest.raises(RunError, match="takes no further step") as caught:
            pipe.state_dict()
        assert "pipe.local_state_dict()" in caught.value.fix
        assert all(torch.equal(tensor, state[name]) for name, tensor in pipe.local_state_dict().items())
        assert pipe.local_state_dict().keys() == state.keys()


def test_an_older_pipe_is_refused_once_a_newer_one_of_its_model_has_trained() -> None:
    model = Normed()
    first = compiled(model)
    first.step(torch.randn(8, 4))
    second = compiled(model)
    first.step(torch.randn(8, 4))  # the newer one has not trained yet
    second.step(torch.randn(8, 4))
    for call in (lambda: first.step(torch.randn(8, 4)), first.state_dict, first.sync_model):
        with pytest.raises(UsageError, match="another pipe of this model") as caught:
            call()
        assert "close this pipe" in caught.value.fix
    first.close()
    second.step(torch.randn(8, 4))
    second.close()


def test_closing_an_older_pipe_keeps_what_a_newer_one_trained(pair: Workers) -> None:
    for synced, closed in pair.run(jobs.older_closed_last):
        assert synced.keys() == closed.keys()
        for name, tensor in synced.items():
            assert torch.equal(closed[name], tensor), name


def test_after_a_failed_step_every_rank_still_returns_its_part_of_the_state(pair: Workers) -> None:
    (before, first, left_first), (_, second, left_second) = pair.run(jobs.parts_after_failure)
    whole = {**first, **second}
    assert whole.keys() == before.keys() and first.keys() != whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, before[name]), name
    assert left_first | left_second == before.keys()


def test_an_optimizer_over_named_parameters_is_made_on_a_rank_without_any(pair: Workers) -> None:
    counts = pair.run(jobs.one_idle)
    assert [count > 0 for count in counts] == [True, False]


def test_averages_over_named_parameters_are_those_of_the_plain_model(pair: Workers) -> None:
    for found, expected in pair.run(jobs.averaged):
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-7)


def test_a_plan_is_adopted_that_brings_a_constant_to_another_rank(pair: Workers) -> None:
    for error, losses in pair.run(jobs.constants_adopted):
        assert error == "" and losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_clipping_by_the_norm_of_one_rank_is_refused_and_by_value_is_not(pair: Workers) -> None:
    for by_norm, by_value in pair.run(jobs.clipped_by_torch):
        assert by_norm == "use pipe.clip_grad_norm_(max_norm)" and not by_value
    with compiled(Normed()) as pipe:
        pipe.step(torch.randn(8, 4))
        assert torch.nn.utils.clip_grad_norm_(pipe.parameters(), 1e9) > 0


@pytest.mark.slow
def test_training_goes_on_after_rank_0_saved_the_model_with_transformers(pair: Workers, tmp_path: Path) -> None:
    results = pair.run(jobs.saved_pretrained, str(tmp_path))
    state, losses = results[0]
    assert losses[0] > losses[1] > losses[2] and results[1][1] == losses
    saved = type(CASES["llama"].model()).from_pretrained(tmp_path).state_dict()
    assert saved.keys() == state.keys()
    for name, tensor in saved.items():
        assert torch.equal(tensor, state[name]), name

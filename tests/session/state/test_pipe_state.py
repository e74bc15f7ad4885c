"""Parameters and state of a pipe: what stays after a skipped step, a failed step and `close`, and on every rank."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs.failures.failing_jobs import CASE, armed
from support.jobs.step_jobs import cluster, compiled
from support.models.zoo import CASES
from support.workers import Workers
from torch import nn

import autopart
from autopart.ir.errors import NonFiniteError, RunError, UsageError


def _stack() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


DATA = (torch.linspace(-1, 1, 32).view(8, 4), torch.ones(8, 4))


def _opened(model: nn.Module, **options: Any) -> autopart.Pipe:
    return autopart.compile(
        model, cluster(), sample=DATA, loss_fn=nn.functional.mse_loss, costs="analytic", micro_batches=2,
        **{"stages": 2, **options},
    )  # fmt: skip


def _train(pipe: autopart.Pipe, steps: int) -> None:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for _ in range(steps):
        pipe.step(DATA)
        optimizer.step()
        optimizer.zero_grad()


def older_closed_last() -> Any:
    """Return the model's state after the newer of two pipes was closed and after the older one was closed too."""
    model = _stack()
    first = _opened(model, cuts=["4"])
    second = _opened(model, cuts=["2"])
    _train(second, 2)
    second.close()
    synced = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first.close()
    return synced, dict(model.state_dict())


def parts_after_failure() -> Any:
    """Return the state before a failing step, this rank's part of it afterwards, and what the closed model holds."""
    batch = CASE.batch(8)
    pipe = compiled(CASE, CASE.model(), batch, cuts=["layers.2"], micro_batches=2)
    pipe.step(batch)
    before = pipe.state_dict()
    with armed("forward", "raise", 2), contextlib.suppress(autopart.RunError):
        pipe.step(batch)
    part = pipe.local_state_dict()
    model = pipe.model
    pipe.close()
    return dict(before), dict(part), {name for name, tensor in model.state_dict().items() if tensor.numel()}


def one_idle() -> int:
    """Return how many numbers this rank's optimizer updates when the plan uses only one of two ranks."""
    with _opened(_stack(), stages=1, replicas=1) as pipe:
        optimizer = torch.optim.AdamW([parameter for _, parameter in pipe.named_parameters()])
        pipe.step(DATA)
        optimizer.step()
        return sum(parameter.numel() for parameter in pipe.parameters())


def averaged() -> Any:
    """Return the exponential moving average over three steps, gathered from the ranks and computed in one process."""
    model, plain = _stack(), _stack()
    with _opened(model) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        average = {name: parameter.detach().clone() for name, parameter in pipe.named_parameters()}
        for _ in range(3):
            pipe.step(DATA)
            optimizer.step()
            optimizer.zero_grad()
            for name, parameter in pipe.named_parameters():
                average[name].lerp_(parameter.detach(), 0.5)
        with torch.no_grad():
            for name, parameter in pipe.named_parameters():
                parameter.copy_(average[name])
        found = dict(pipe.state_dict())
    averages = torch.optim.swa_utils.AveragedModel(plain, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    averages.n_averaged += 1  # otherwise the first update replaces the average
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        nn.functional.mse_loss(plain(DATA[0]), DATA[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        averages.update_parameters(plain)
    return found, dict(averages.module.state_dict())


class Constant(nn.Module):
    """A model that multiplies by a tensor created in forward() and by a plain tensor attribute."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.scales = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.middle(self.first(x)) * torch.tensor([1.0, 0.5, 2.0, 1.0]) * self.scales
        return self.last(x).square().mean()


def constants_adopted() -> Any:
    """Return the error of adopting another cut, and the losses before and after it."""
    options = {"costs": "analytic", "micro_batches": 2, "stages": 2}
    sample = DATA[0]
    other = autopart.plan(Constant(), cluster(), sample=sample, cuts=["middle"], **options)
    with autopart.compile(Constant(), cluster(), sample=sample, cuts=["last"], **options) as pipe:
        losses, error = [pipe.step(sample).item()], ""
        try:
            pipe.adopt(other)
        except Exception as raised:
            error = repr(raised)
        losses.append(pipe.step(sample).item())
        return error, losses


def clipped_by_torch() -> Any:
    """What torch's functions that clip gradients raise over the parameters of two stages, "" for nothing."""
    found = []
    with _opened(_stack(), cuts=["2"]) as pipe:
        pipe.step(DATA)
        for clip in (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_):
            try:
                clip(pipe.parameters(), 1.0)
                found.append("")
            except autopart.UsageError as error:
                found.append(error.fix)
    return found


def saved_pretrained(folder: str) -> Any:
    """The state of a model of transformers that rank 0 saved between two steps, and the losses around that."""
    case = CASES["llama"]
    model, batch = case.model(), case.data(4, torch.float32)
    options: Any = {"costs": "analytic", "micro_batches": 2, "stages": 2}
    losses = []
    with autopart.compile(model, cluster(), sample=batch, **options) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for _ in range(2):
            losses.append(pipe.step(batch).item())
            optimizer.step()
            optimizer.zero_grad()
            pipe.save_pretrained(folder)
        losses.append(pipe.step(batch).item())
        state = pipe.state_dict()
    return state, losses


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x))).float().square().mean()


def normed(model: nn.Module, **options: Any) -> autopart.Pipe:
    return autopart.compile(model, "cpu:1", sample=torch.ones(8, 4), costs="analytic", **options)


@pytest.mark.parametrize("non_finite", ["skip", "raise"])
def test_a_step_that_is_not_finite_leaves_buffers_as_before(non_finite: str) -> None:
    model = Normed()
    with normed(model, non_finite=non_finite, micro_batches=2) as pipe:
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
    with normed(model) as pipe:
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
    pipe = normed(Normed())
    plan, table = pipe.plan, pipe.explain()
    pipe.close()
    assert (pipe.rank, pipe.plan, pipe.explain(), pipe.world_size) == (0, plan, table, 1)
    assert pipe.needs_data
    with pytest.raises(UsageError, match="closed"):
        pipe.state_dict()


def test_after_a_failed_step_a_state_says_what_can_still_be_had() -> None:
    with normed(Normed()) as pipe:
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
    first = normed(model)
    first.step(torch.randn(8, 4))
    second = normed(model)
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
    for synced, closed in pair.run(older_closed_last):
        assert synced.keys() == closed.keys()
        for name, tensor in synced.items():
            assert torch.equal(closed[name], tensor), name


def test_after_a_failed_step_every_rank_still_returns_its_part_of_the_state(pair: Workers) -> None:
    (before, first, left_first), (_, second, left_second) = pair.run(parts_after_failure)
    whole = {**first, **second}
    assert whole.keys() == before.keys() and first.keys() != whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, before[name]), name
    assert left_first | left_second == before.keys()


def test_an_optimizer_over_named_parameters_is_made_on_a_rank_without_any(pair: Workers) -> None:
    counts = pair.run(one_idle)
    assert [count > 0 for count in counts] == [True, False]


def test_averages_over_named_parameters_are_those_of_the_plain_model(pair: Workers) -> None:
    for found, expected in pair.run(averaged):
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-7)


def test_a_plan_is_adopted_that_brings_a_constant_to_another_rank(pair: Workers) -> None:
    for error, losses in pair.run(constants_adopted):
        assert error == "" and losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_clipping_by_the_norm_of_one_rank_is_refused_and_by_value_is_not(pair: Workers) -> None:
    for by_norm, by_value in pair.run(clipped_by_torch):
        assert by_norm == "use pipe.clip_grad_norm_(max_norm)" and not by_value
    with normed(Normed()) as pipe:
        pipe.step(torch.randn(8, 4))
        assert torch.nn.utils.clip_grad_norm_(pipe.parameters(), 1e9) > 0


@pytest.mark.slow
def test_training_goes_on_after_rank_0_saved_the_model_with_transformers(pair: Workers, tmp_path: Path) -> None:
    results = pair.run(saved_pretrained, str(tmp_path))
    state, losses = results[0]
    assert losses[0] > losses[1] > losses[2] and results[1][1] == losses
    saved = type(CASES["llama"].model()).from_pretrained(tmp_path).state_dict()
    assert saved.keys() == state.keys()
    for name, tensor in saved.items():
        assert torch.equal(tensor, state[name]), name

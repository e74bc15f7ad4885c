"""What is captured and shown to combine, and what is refused with its own reason, place and advice."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopart
from autopart.batch.batch import flatten
from autopart.capture import capture
from autopart.capture.cache import CaptureCache
from autopart.ir.errors import CaptureError, RefusedError
from autopart.ir.graph import LossReduction, Size
from autopart.planning.derive.family import capture_family
from autopart.planning.derive.probe import run
from autopart.planning.derive.reduction import loss_reduction

Body = Callable[..., Any]
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("seen", torch.ones(4))
        self.body = body

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.body(self, *inputs)


def combined(body: Body, *inputs: torch.Tensor) -> LossReduction:
    """How its losses combine; raises what compile raises."""
    captures, batch = CaptureCache(Net(body)), flatten(inputs or (X,))
    return loss_reduction(capture_family(captures, batch, Size(2), [Size(2), Size(3)]), [(2, 2, 2, 2)], "auto")


def check_exact(body: Body, *inputs: torch.Tensor) -> None:
    """The captured program has the loss and the gradients of the model."""
    model, inputs = Net(body), inputs or (X,)
    captured = capture(model, flatten(inputs))
    loss = run(captured, list(inputs), {captured.graph.outputs[0]})[captured.graph.outputs[0]]
    expected = model(*inputs)
    torch.testing.assert_close(loss, expected)
    weights = [model.layer.weight, model.layer.bias]
    pairs = (torch.autograd.grad(found, weights, allow_unused=True) for found in (loss, expected))
    for found, wanted in zip(*pairs, strict=True):
        torch.testing.assert_close(found, wanted)


# -- random numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [
    lambda m, x: (F.gumbel_softmax(m.layer(x)) * x).mean(),
    lambda m, x: torch.distributions.Normal(m.layer(x), 1.0).rsample().square().mean(),
    lambda m, x: (m.layer(x) * torch.empty_like(x).uniform_()).mean(),
], ids=["exponential", "normal", "uniform"])  # fmt: skip
def test_random_fills_draw_row_by_row(body: Body) -> None:
    assert combined(body).kind == "rows"


def _seeded(m: Net, x: torch.Tensor) -> torch.Tensor:
    np.random.seed(3)
    random.seed(3)
    return m.layer(x).mean() * float(np.random.rand()) * random.random()


def _drawn_before(m: Net, x: torch.Tensor) -> torch.Tensor:
    factor = float(np.random.rand())
    np.random.seed(3)
    return m.layer(x).mean() * factor


def test_numbers_drawn_after_forward_seeded_its_generator_are_the_same_in_every_forward() -> None:
    check_exact(_seeded)


def test_numbers_drawn_before_forward_seeds_its_generator_are_refused_at_their_line() -> None:
    with pytest.raises(RefusedError, match=r"numpy\.random") as caught:
        combined(_drawn_before)
    assert "_drawn_before" in caught.value.where


# -- losses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [
    lambda m, x: (m.layer(x), m.layer(x).square().mean()),
    lambda m, x: {"total_loss": m.layer(x).square().mean(), "logits": m.layer(x)},
], ids=["logits, loss", "total_loss"])  # fmt: skip
def test_the_only_number_that_a_model_returns_is_its_loss(body: Body) -> None:
    assert combined(body).kind == "rows"


def test_of_several_numbers_none_is_guessed_and_all_are_named() -> None:
    with pytest.raises(CaptureError, match="'first', 'second' are one number each"):
        combined(lambda m, x: {"first": m.layer(x).mean(), "second": m.layer(x).sum()})


def test_targets_that_are_0_or_1_stay_0_or_1_in_the_numeric_test() -> None:
    def loss(m: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        probability = torch.special.ndtr(m.layer(x))  # an op that has no rule
        return F.binary_cross_entropy(probability, y)

    assert combined(loss, X, (X > 0).float()).kind == "rows"


def test_a_term_with_the_coefficient_0_couples_nothing() -> None:
    def loss(m: Net, x: torch.Tensor) -> torch.Tensor:
        routes = m.layer(x).softmax(-1)
        return m.layer(x).square().mean() + 0.0 * (routes.mean(0) * routes.amax(0)).sum()

    assert combined(loss).kind != "any"
    check_exact(loss)


def test_a_buffer_that_micro_batches_change_is_refused_with_place_and_advice() -> None:
    def loss(m: Net, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            m.seen.mul_(0.9).add_(0.1 * x.mean(0))
        return (m.layer(x) * m.seen).mean()

    with pytest.raises(RefusedError, match="seen") as caught:
        combined(loss)
    assert "test_refusals.py:" in caught.value.where and "after the step" in caught.value.fix


# -- what torch has no derivative of, or hides ---------------------------------------------------------------------


def _spectral(m: Net, x: torch.Tensor) -> torch.Tensor:
    found = torch.fft.rfft(m.layer(x), dim=1)
    out = torch.zeros(x.shape[0], 3, dtype=found.dtype)
    out[:, :2] = found[:, :2] * (1 + 2j)
    out[:, 2] = found[:, 0]
    return torch.fft.irfft(out, n=4, dim=1).square().mean()


def test_a_complex_tensor_written_by_slice_is_exact() -> None:
    check_exact(_spectral)


def _clamped(m: Net, x: torch.Tensor) -> torch.Tensor:
    m.layer.weight.data.clamp_(-0.1, 0.1)
    return m.layer(x).mean()


def _masked(m: Net, x: torch.Tensor) -> torch.Tensor:
    m.layer.weight.data *= 0.5
    return m.layer(x).mean()


def _replaced(m: Net, x: torch.Tensor) -> torch.Tensor:
    m.layer.weight.data = m.layer.weight.data * 0.5
    return m.layer(x).mean()


@pytest.mark.parametrize("body", [_clamped, _masked, _replaced])
def test_a_parameter_changed_through_data_is_refused_by_name_and_line(body: Body) -> None:
    with pytest.raises(RefusedError, match=r"layer\.weight in place, through \.data") as caught:
        combined(body)
    assert body.__name__ in caught.value.where


def test_a_parameter_read_through_data_is_captured() -> None:
    check_exact(lambda m, x: (m.layer(x) * m.layer.weight.data.sum()).mean())


# -- control flow --------------------------------------------------------------------------------------------------


def _experts(m: Net, x: torch.Tensor) -> torch.Tensor:
    hidden = m.layer(x)
    out, chosen = torch.zeros_like(hidden), hidden.argmax(-1)
    for expert in range(4):
        rows = torch.where(chosen == expert)[0]
        out.index_add_(0, rows, hidden[rows] * expert)
    return out.mean()


def test_a_loop_over_experts_is_told_of_shapes_and_not_of_layer_drop() -> None:
    with pytest.raises(CaptureError) as caught:
        combined(_experts)
    assert "each on all tokens" in caught.value.fix and "layer drop" not in caught.value.fix


def _branch(m: Net, x: torch.Tensor) -> torch.Tensor:
    return m.layer(x).mean() if m.layer(x).sum() > 0 else x.mean()


def _layer_drop(m: Net, x: torch.Tensor) -> torch.Tensor:
    return m.layer(x).mean() if torch.rand(()) < 0.5 else m.layer(m.layer(x)).mean()


def test_layer_drop_is_named_where_the_branch_depends_on_random_numbers_alone() -> None:
    for body, named in ((_branch, False), (_layer_drop, True)):
        with pytest.raises(CaptureError) as caught:
            combined(body)
        assert ("layer drop" in caught.value.fix) == named


# -- torch.func ----------------------------------------------------------------------------------------------------


def _slope_of_inputs(m: Net, x: torch.Tensor) -> torch.Tensor:
    slope = torch.func.vmap(torch.func.grad(lambda row: m.layer(row).tanh().sum()))(x)
    return slope.square().mean()


def _inner_step(m: Net, x: torch.Tensor) -> torch.Tensor:
    weights = dict(m.layer.named_parameters())

    def inner(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(m.layer, weights, (x,)).square().mean()

    slopes = torch.func.grad(inner)(weights)
    return inner({name: weight - 0.1 * slopes[name] for name, weight in weights.items()})


def _slope_forwards(m: Net, x: torch.Tensor) -> torch.Tensor:
    return torch.func.jvp(lambda x: m.layer(x).tanh(), (x,), (torch.ones_like(x),))[1].square().mean()


@pytest.mark.parametrize("body", [_slope_of_inputs, _inner_step])
def test_a_gradient_of_torch_func_is_refused_by_its_own_name_and_the_advice_works(body: Body) -> None:
    with pytest.raises(RefusedError, match=r"torch\.func") as caught:
        combined(body)
    assert "test_refusals.py" in caught.value.where and "torch.func.jvp" in caught.value.fix
    check_exact(_slope_forwards)


# -- packed sequences ------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Reads rows of several lengths, packed or masked as the refusal says."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head, self.packed = nn.LSTM(4, 4, batch_first=True), nn.Linear(8, 1), packed

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        if self.packed:
            given = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            out, (last, _) = self.rnn(given)
            out, last = nn.utils.rnn.pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])[0], last[-1]
        else:
            out = self.rnn(x)[0] * (torch.arange(x.shape[1]) < lengths[:, None])[..., None]
            last = out[torch.arange(len(x)), lengths - 1]
        return self.head(torch.cat([out.sum(1), last], -1)).square().mean()


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_packed_sequences_are_refused_and_the_advice_is_exact(micro_batches: int) -> None:
    batch = {"x": X[:, None].repeat(1, 5, 1) * torch.arange(1, 6)[:, None], "lengths": torch.tensor([5, 1, 2, 3] * 2)}
    options: dict[str, Any] = {"sample": batch, "micro_batches": micro_batches, "costs": "analytic", "cache": False}
    plain = Recurrent(packed=True)
    expected = plain(**batch)
    expected.backward()
    with pytest.raises(RefusedError, match="pack_padded_sequence") as caught:
        autopart.compile(plain, "cpu:1", **options)
    assert "test_refusals.py" in caught.value.where and "out[torch.arange(len(x)), lengths - 1]" in caught.value.fix
    with autopart.compile(Recurrent(packed=False), "cpu:1", **options) as pipe:
        assert pipe.step(batch).item() == pytest.approx(expected.item(), rel=1e-5)
        for name, gradient in pipe.gradients().items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad)


# -- losses of a whole batch -------------------------------------------------------------------------------------------


def _contrastive(m: Net, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(m.layer(x) @ x.T, torch.arange(len(x)))


def _pairs(m: Net, x: torch.Tensor) -> torch.Tensor:
    chosen, rejected = m.layer(x).sum(-1).view(-1, 2).unbind(-1)
    return -F.logsigmoid(chosen - rejected).mean()


def _by_frequency(m: Net, x: torch.Tensor) -> torch.Tensor:
    found = F.embedding_bag((x > 0).long(), m.layer.weight, scale_grad_by_freq=True, mode="sum")
    return (found + m.layer.bias).square().mean()


@pytest.mark.parametrize("body", [_contrastive, _pairs, _by_frequency])
def test_a_batch_that_cannot_be_cut_is_one_micro_batch_where_that_is_left_open(body: Body) -> None:
    options: dict[str, Any] = {"sample": X, "costs": "analytic", "cache": False}
    with pytest.raises(RefusedError, match="micro_batches=1"):
        autopart.compile(Net(body), "cpu:1", micro_batches=4, **options)
    plain = Net(body)
    expected = plain(X)
    expected.backward()
    with autopart.compile(Net(body), "cpu:1", **options) as pipe:
        assert len(pipe.plan.micro_rows) == 1
        assert any("one micro-batch" in note for note in pipe.plan.notes)
        assert pipe.step(X).item() == pytest.approx(expected.item(), rel=1e-5)
        for name, gradient in pipe.gradients().items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad)

"""The numeric test of row independence: what passes, what must not, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopart
from autopart.batch.batch import Batch, flatten
from autopart.capture import Captured, capture
from autopart.ir.graph import Size
from autopart.planning.derive.probe import prove_rows, run
from autopart.planning.derive.trial_data import resampled

Loss = Callable[..., torch.Tensor]


class Model(nn.Module):
    """f of inputs and the model as a loss."""

    def __init__(self, f: Loss) -> None:
        super().__init__()
        self.f = f
        self.w = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.bn = nn.BatchNorm1d(4)
        self.route = nn.Linear(4, 3)
        self.experts = nn.Parameter(torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0)))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.f(self, *inputs)


def both(f: Loss, *inputs: torch.Tensor, rows: tuple[int, int] = (2, 5)) -> tuple[Captured, Captured, Batch]:
    torch.manual_seed(3)
    model, batch = Model(f), flatten(tuple(inputs))
    small, large = (capture(model, batch, size=Size(n)) for n in rows)
    return small, large, batch


def proven(f: Loss, *inputs: torch.Tensor, rows: tuple[int, int] = (2, 5)) -> dict[str, bool]:
    """For every value that one might ask about, whether it passes; the last one before the reduction is "end"."""
    small, large, batch = both(f, *inputs, rows=rows)
    names = [v.name for v in large.graph.values]
    passed = prove_rows(small, large, names, batch)
    loss = next(op for op in reversed(large.graph.ops) if op.target.startswith(("aten.mean", "aten.sum")))
    return {n: n in passed for n in names} | {"end": loss.reads[0] in passed}


def data() -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


def routed(s: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Rows sorted by expert, put through it, and put back."""
    order = s.route(x).argmax(-1).argsort(stable=True)
    y = x[order] * s.w
    return y[order.argsort()].tanh().mean()


def squared(s: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return ((x * s.w)[x[:, 0].argsort()] ** 2).mean()


def centred(s: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = x * s.w
    return (y - y.mean(0)).mean()


def gradient_only(s: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The values keep rows apart, the gradients do not."""
    y = x * s.w
    return (y + (y.amax(0) - y.amax(0).detach())).mean()


def test_sorting_and_sorting_back_passes_where_the_rows_are_back() -> None:
    found = proven(routed, data())
    assert found["end"] and not found["index"] and found["index_1"]


@pytest.mark.parametrize("rows", [(2, 3), (1, 6)])
def test_any_two_sizes_will_do(rows: tuple[int, int]) -> None:
    assert proven(routed, data(), rows=rows)["end"]


@pytest.mark.parametrize("f", [squared, centred, gradient_only])
def test_what_depends_on_other_rows_does_not_pass(f: Loss) -> None:
    assert not proven(f, data())["end"]


def test_a_batch_of_equal_rows_proves_nothing() -> None:
    assert not proven(centred, torch.ones(6, 4))["end"]


def test_integers_must_be_equal_and_sums_are_never_slices() -> None:
    found = proven(lambda s, x: ((x.argsort(0) + x.argsort(1)) * s.w).mean(), data())
    assert not found["argsort"] and found["argsort_1"] and not found["add"] and not found["mean"]


def test_randomness_and_batch_statistics_are_taken_out() -> None:
    found = proven(lambda s, x: (F.dropout(s.bn(x), 0.5) * s.w + torch.rand_like(x)).mean(), data())
    assert found["end"]


def test_other_random_numbers_prove_nothing() -> None:
    found = proven(lambda s, x: (torch.bernoulli(x.sigmoid()) * x * s.w).mean(), data())
    assert not found["end"]


def test_the_model_is_left_alone() -> None:
    small, large, batch = both(lambda s, x: (s.bn(x) * s.w).mean(), data())
    before = {n: t.clone() for n, t in large.tensors.items()}
    state = torch.get_rng_state()
    prove_rows(small, large, [v.name for v in large.graph.values], batch)
    assert all(torch.equal(t, before[n]) for n, t in large.tensors.items())
    assert all(t.grad is None for t in large.tensors.values())
    assert torch.equal(state, torch.get_rng_state())


def test_constants_are_compared() -> None:
    def loss(s: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (x * s.w * torch.tensor([1.0, 2, 3, 4])).sum() / torch.tensor(float(len(x)))

    small, large, batch = both(loss, data())
    constants = [p for p in large.graph.params if p.kind == "constant"]
    passed = prove_rows(small, large, [p.name for p in constants], batch)
    assert passed == {p.name for p in constants if p.shape == (4,)} and len(constants) == 2


def test_nothing_is_proven_without_weights() -> None:
    model, batch = Model(routed).to("meta"), flatten(data())
    small, large = (capture(model, batch, size=Size(n)) for n in (2, 3))
    assert prove_rows(small, large, [v.name for v in large.graph.values], batch) == frozenset()


def test_a_program_that_fails_or_makes_nan_on_the_users_data_proves_nothing() -> None:
    assert not proven(lambda s, x: (x.log() * s.w).mean(), data())["end"]


def test_data_that_tells_nothing_is_passed_over() -> None:
    """Positive data: noise makes some of the random data negative, and its logarithm NaN."""
    assert proven(lambda s, x: (x.log() * s.w).mean(), data().abs() + 0.5)["end"]


def test_random_data_is_like_the_users() -> None:
    ids, mask = torch.tensor([[5, 6, 7], [8, 9, 5]]), torch.tensor([[1, 1, 0], [1, 1, 1]])
    batch = flatten({"ids": ids, "mask": mask, "x": torch.ones(2, 3), "whole": torch.arange(5)})
    other = resampled(batch, 7, seed=1)
    found = dict(zip(other.names, other.leaves, strict=True))
    assert found["ids"].shape == (7, 3) and set(found["ids"].flatten().tolist()) <= {5, 6, 7, 8, 9}
    assert all(row in mask.tolist() for row in found["mask"].tolist())
    assert found["x"].shape == (7, 3) and found["x"].unique().numel() > 7
    assert torch.equal(found["whole"], torch.arange(5)) and other.rows == 7


def test_run_gives_the_values_asked_for() -> None:
    small, _, batch = both(lambda s, x: (x * s.w).tanh().mean(), data())
    inputs = list(batch.with_rows(2).tensors)
    found = run(small, inputs, {"tanh", "input.arg0"})
    assert torch.equal(found["tanh"], (inputs[0] * small.tensors["w"]).tanh())
    assert torch.equal(found["input.arg0"], inputs[0])


class Guarded(nn.Module):
    """Looks targets up, of which a comparison leaves out -100, beside an op that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        known = self.word(y.masked_fill(~(y != -100), 0)) + self.word(torch.where(y == -100, 1, y))
        h = torch.as_strided(self.word(x) + known, (*x.shape, 4), (4 * x.shape[1], 4, 1))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten(), reduction="sum")


def test_a_comparison_that_keeps_an_index_in_its_range_is_not_turned_over() -> None:
    torch.manual_seed(0)
    model, reference = Guarded().double(), Guarded().double()
    reference.load_state_dict(model.state_dict())
    x, y = torch.randint(7, (8, 5)), torch.randint(7, (8, 5))
    y[::3, 2:] = -100
    with autopart.compile(model, "cpu:1", sample=(x, y), micro_batches=4, costs="analytic") as pipe:
        loss, expected = pipe.step((x, y)), reference(x, y)
        expected.backward()
        assert abs(loss.item() - expected.item()) < 1e-5
        for name, gradient in pipe.gradients().items():
            torch.testing.assert_close(gradient, reference.get_parameter(name).grad)

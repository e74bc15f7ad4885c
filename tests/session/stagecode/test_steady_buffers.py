"""Buffers that do not depend on the batch are updated once a step; the plan names the others."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from support.extending.own_orders import OWN
from torch import nn
from torch.nn import functional as F

import autopart
from autopart.ir.errors import RefusedError


class Net(nn.Module):
    """Has three buffers that `changes` change in turn."""

    def __init__(self, *changes: Callable[[Net, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.changes = changes
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        for name in ("a", "b", "c"):
            self.register_buffer(name, torch.zeros(6))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.first(x).tanh()
        for change in self.changes:
            h = change(self, h)
        return F.mse_loss(self.last(h).squeeze(1), y, reduction="sum") / 8


def counter(net: Net, h: torch.Tensor) -> torch.Tensor:
    net.a += 1
    return h


def assigned(net: Net, h: torch.Tensor) -> torch.Tensor:
    net.b = net.b * 0.5 + 2
    return h


def read(net: Net, h: torch.Tensor) -> torch.Tensor:
    return h * (1 + net.a * 0.1 + net.b)


def of_weights(net: Net, h: torch.Tensor) -> torch.Tensor:
    net.b.mul_(0.9).add_(net.last.weight.detach()[0], alpha=0.1)
    return h


def of_another(net: Net, h: torch.Tensor) -> torch.Tensor:
    net.a.add_(net.b)
    return h


def spectral(net: Net, h: torch.Tensor) -> torch.Tensor:
    return net.spectral(h)


def rows(net: Net, h: torch.Tensor) -> torch.Tensor:
    net.c += len(h)
    return h


def rows_of_a_constant(net: Net, h: torch.Tensor) -> torch.Tensor:
    net.c += torch.ones(len(h)).sum() + torch.tensor(len(h))
    return h


def of_batch(net: Net, h: torch.Tensor) -> torch.Tensor:
    net.c.mul_(0.5).add_(h.detach().mean(0))
    return h


def counted_by_batch(net: Net, h: torch.Tensor) -> torch.Tensor:
    net.a += 1
    net.c.add_(h.detach().sum(0) / net.a)
    return h


ONCE = (counter, assigned, read, of_weights, of_another, spectral, rows, rows_of_a_constant)


def trained(
    changes: list[Callable[[Net, torch.Tensor], torch.Tensor]], micros: int, schedule: str = "auto"
) -> tuple[autopart.Plan, list[str]]:
    """Train three steps beside torch; return the plan, and the buffers that differ."""
    torch.manual_seed(0)
    model = Net(*changes).double()
    reference = copy.deepcopy(model)
    batches = [(torch.randn(8, 6).double(), torch.randn(8).double()) for _ in range(3)]
    asked = {"sample": batches[0], "micro_batches": micros, "schedule": schedule, "costs": "analytic"}
    with autopart.compile(model, "cpu:1", **asked) as pipe:
        ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (pipe, reference))
        for batch in batches:
            ours.zero_grad(), theirs.zero_grad()
            loss, expected = pipe.step(batch), reference(*batch)
            expected.backward()
            assert abs(float(loss) - expected.item()) <= 1e-6 * abs(expected.item())
            ours.step(), theirs.step()
        for name, value in pipe.model.named_parameters():
            torch.testing.assert_close(value, reference.get_parameter(name), rtol=1e-9, atol=1e-9)
        state = pipe.state_dict()
        plan = pipe.plan
    return plan, [n for n, b in reference.named_buffers() if not torch.allclose(state[n], b, rtol=1e-9, atol=1e-9)]


@pytest.mark.parametrize("seed", range(5))
def test_buffers_that_do_not_depend_on_the_batch_are_updated_once_a_step(seed: int) -> None:
    draw = random.Random(seed)
    _, differing = trained(draw.choices(ONCE, k=draw.randint(1, 4)), draw.choice((1, 2, 4)))
    assert not differing


@pytest.mark.parametrize("change", [of_batch, counted_by_batch])
def test_a_buffer_that_every_micro_batch_updates_is_named_in_the_plan(
    change: Callable[[Net, torch.Tensor], torch.Tensor],
) -> None:
    plan, differing = trained([change], 4)
    assert differing
    assert any(f"buffer {differing[0]}" in note for note in plan.outlook.notes)
    assert not trained([change], 1)[1]


def test_statistics_of_norms_count_steps() -> None:
    plan, differing = trained([lambda net, h: (net.norm(h.detach()), h)[1]], 4)
    assert differing == ["norm.running_mean", "norm.running_var"]
    assert not any("buffer norm" in note for note in plan.outlook.notes)


@pytest.mark.parametrize(("changes", "named"), [([counter], "a"), ([counter, of_batch], "c")])
def test_an_order_is_refused_by_the_buffer_that_each_micro_batch_changes(
    changes: list[Callable[[Net, torch.Tensor], torch.Tensor]], named: str
) -> None:
    schedule = autopart.register_schedule(OWN["out of order"]).name
    with pytest.raises(RefusedError, match="runs micro-batch 2 behind 3") as refused:
        trained(changes, 4, schedule)
    assert refused.value.where == f"stage 0, which updates buffer {named}"

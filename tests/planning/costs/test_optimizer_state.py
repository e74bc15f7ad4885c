"""How much state an optimizer keeps: by name, by class, by instance, by trial."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.languages.refusals import net, planned, refused

from autopart.costs.optimizer_state import ADAM, state_factor
from autopart.ir.errors import UsageError


class Lazy(torch.optim.Optimizer):
    """Keeps a step counter alone."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["step"] = torch.tensor(1.0)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("optimizer", "factor"),
    [
        ("sgd", 0.0),
        ("SGD", 0.0),
        ("momentum", 1.0),
        ("adam", 2.0),
        ("AdamW", 2.0),
        (torch.optim.SGD, 0.0),
        (momentum, 1.0),
        (torch.optim.Adam, 2.0),
        (torch.optim.AdamW, 2.0),
        (lambda params: torch.optim.Adam(params, amsgrad=True), 3.0),
        (lambda params: torch.optim.SGD(params, lr=1e-3), 0.0),
        (Lazy, 0.0),
    ],
)
def test_an_optimizer_has_its_textbook_state(optimizer: Any, factor: float) -> None:
    assert state_factor(optimizer) == (factor, ())


class Open(torch.optim.Adam):
    """Takes any keyword, as wrappers do."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)


def amsgrad(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, amsgrad=True)


@pytest.mark.parametrize(
    ("make", "factor"),
    [
        (torch.optim.SGD, 0.0), (momentum, 1.0), (torch.optim.Adam, 2.0), (torch.optim.AdamW, 2.0), (amsgrad, 3.0),
        (torch.optim.RMSprop, 1.0), (torch.optim.NAdam, 2.0), (Lazy, 0.0), (Open, 2.0),
    ],
)  # fmt: skip
def test_an_optimizer_of_the_users_is_copied_not_used(make: Any, factor: float) -> None:
    model = net()
    optimizer = make(model.parameters())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert state_factor(optimizer) == (factor, ())
    assert not optimizer.state and all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    ("optimizer", "param_bytes", "factor"),
    [("adamw", 2, 2.0), ("adamw+masters", 2, 6.0), ("sgd+masters", 2, 2.0), ("momentum+masters", 2, 4.0),
     ("adamw+masters", 4, 2.0)],
)  # fmt: skip
def test_masters_are_float32_beside_smaller_parameters(optimizer: str, param_bytes: int, factor: float) -> None:
    assert state_factor(optimizer, param_bytes) == (factor, ())


def test_none_is_charged_as_adam_and_said_so() -> None:
    factor, (note,) = state_factor(None)
    assert factor == ADAM and "no optimizer was named" in note and "Adam" in note


def _broken(params: Any) -> Any:
    raise RuntimeError("no such thing as params")


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ("adamax2", ("unknown optimizer 'adamax2'", "sgd, momentum, adam, adamw", "+masters")),
        (3, ("optimizer is a int",)),
        (_broken, ("cannot be tried: RuntimeError", "no such thing as params")),
        (lambda params: None, ("cannot be tried: AttributeError",)),
        (lambda: torch.optim.SGD([torch.zeros(1)], lr=0.1), ("cannot be tried: TypeError",)),
    ],
)
def test_what_is_no_optimizer_is_refused(optimizer: Any, words: tuple[str, ...]) -> None:
    with refused(UsageError, *words):
        state_factor(optimizer)


def test_a_plan_counts_the_state_and_says_when_it_guessed() -> None:
    plans = {name: planned("cpu:1", stages=1, micro_batches=1, optimizer=name) for name in ("sgd", "adamw", None)}
    state = {name: (p.estimates[0].state_bytes, p.estimates[0].optimizer_bytes) for name, p in plans.items()}
    weights = sum(p.numel() * 4 for p in net().parameters())
    assert state == {"sgd": (weights, 0), "adamw": (3 * weights, 2 * weights), None: (3 * weights, 2 * weights)}
    assert [any("no optimizer" in note for note in p.notes) for p in plans.values()] == [False, False, True]
    with refused(UsageError, "unknown optimizer 'adamz'"):
        planned("cpu:1", optimizer="adamz")

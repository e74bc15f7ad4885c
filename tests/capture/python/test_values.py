"""Numbers and texts of a batch that change: what a program does not depend on is captured for once."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopart
from autopart.capture.python.guards import CaptureWarning

Use = Callable[[nn.Module, torch.Tensor, Any], torch.Tensor]


def kept_quiet(x: torch.Tensor, value: Any) -> torch.Tensor:
    try:
        return x * len(str(value))
    except Exception:  # a model may catch anything
        return x


FREE: dict[str, Use] = {
    "not read": lambda model, x, n: x,
    "asked for its type": lambda model, x, n: x * 2 if isinstance(n, (int, float)) else x * 3,
    "asked for None": lambda model, x, n: x if n is not None else x * 3,
    "divides": lambda model, x, n: x / n if isinstance(n, (int, float)) else x,
    "multiplies": lambda model, x, n: n * x if isinstance(n, (int, float)) else x,
    "divided": lambda model, x, n: n / (x + 10) if isinstance(n, (int, float)) else x,
    "in place": lambda model, x, n: x.clone().mul_(n) if isinstance(n, (int, float)) else x,
}
BEGIN = {str: "a1", bytes: b"1"}
READ: dict[str, Use] = {
    "compared": lambda model, x, n: x * 2 if n == model.rare else x,
    "a type of its own": lambda model, x, n: x * 2 if type(n) is int and n == model.rare else x,
    "flag": lambda model, x, n: x * 2 if n else x,
    "repeats": lambda model, x, n: sum((x for _ in range(n)), x) if isinstance(n, int) else x,
    "index": lambda model, x, n: x * (1.0, 2.0, 3.0, 4.0)[n % 4] if isinstance(n, int) else x,
    "picks": lambda model, x, n: x * {3: 2.0}.get(n, 1.0),
    "formatted": lambda model, x, n: x * len(f"{n}"),
    "text": lambda model, x, n: x * (2 if str(n) in ("3", "a1") else 1),
    "attribute": lambda model, x, n: x * getattr(model, f"by_{n}", 1.5),
    "method": lambda model, x, n: x * (2 if isinstance(n, (str, bytes)) and n.startswith(BEGIN[type(n)]) else 1),
    "rounded": lambda model, x, n: x * round(n / 3) if isinstance(n, float) else x,
    "root": lambda model, x, n: x * n**0.5 if isinstance(n, (int, float)) else x,
    "added": lambda model, x, n: x + n if isinstance(n, (int, float)) else x,
    "filled": lambda model, x, n: x * torch.full((), float(n)) if isinstance(n, (int, float)) else x,
    "part": lambda model, x, n: x * x[:, : n % 4 + 1].mean(1, keepdim=True) if isinstance(n, int) else x,
    "caught": lambda model, x, n: kept_quiet(x, n),
    "sorted": lambda model, x, n: x * (sorted([n, n])[0] == model.rare) + x,
    "kept": lambda model, x, n: x * {n: 2.0}[n],
}
USES = FREE | READ
VALUES: dict[str, Callable[[int], Any]] = {
    "int": lambda i: 3 + i, "float": lambda i: 0.3 + i, "text": lambda i: f"a{i}", "bytes": lambda i: b"%d" % i
}  # fmt: skip


class Net(nn.Module):
    rare, by_4 = 6, 2.5

    def __init__(self, *uses: Use) -> None:
        super().__init__()
        self.uses = uses  # the others are not reached
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor, **more: Any) -> torch.Tensor:
        x = self.first(x).tanh()
        for use, (_, value) in zip(self.uses, sorted(more.items()), strict=True):
            x = use(self, x, value)
        return F.cross_entropy(self.last(x), y, reduction="sum") / 8


def captures_of(uses: list[str], kinds: list[str], steps: int = 5) -> list[int]:
    """Train on batches whose values change with every step; compare with torch; return the captures made after each."""
    torch.manual_seed(0)
    functions = [USES[use] for use in uses]
    model, reference = Net(*functions).double(), Net(*functions).double()
    made = []
    reference.load_state_dict(model.state_dict())

    def batch(i: int) -> dict[str, Any]:
        x, y = torch.randn(8, 6, dtype=torch.float64), torch.randint(6, (8,))
        return {"x": x, "y": y} | {f"v{k}": VALUES[kind](i) for k, kind in enumerate(kinds)}

    with autopart.compile(model, "cpu:1", sample=batch(0), micro_batches=2, costs="analytic") as pipe:
        for i in range(steps):
            given = batch(i)
            loss = pipe.step(given)
            expected = reference(**given)
            expected.backward()
            torch.testing.assert_close(torch.tensor(float(loss)), expected.detach().float(), rtol=1e-6, atol=0)
            made.append(pipe.session.captures.made)
        for name, gradient in pipe.gradients().items():
            torch.testing.assert_close(gradient, reference.get_parameter(name).grad, rtol=1e-10, atol=1e-12)
    return made


@pytest.mark.parametrize("use", FREE)
def test_a_value_that_is_not_read_or_only_scales_is_captured_for_once(use: str) -> None:
    for kind in ("int", "text") if use == "not read" else ("float",):
        made = captures_of([use], [kind])
        assert made[2:] == made[2:3] * 3


@pytest.mark.parametrize("seed", range(3))
def test_batches_with_changing_values_match_torch(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(1, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        captures_of(draw.choices(list(USES), k=count), draw.choices(list(VALUES), k=count))


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", VALUES)
def test_every_use_of_every_value_matches_torch(use: str, kind: str) -> None:
    captures_of([use], [kind])


def test_many_values_that_are_read_are_warned_of_by_name() -> None:
    with pytest.warns(CaptureWarning, match="input v0"):
        captures_of(["compared"], ["int"], steps=9)


def test_a_number_that_no_tensor_holds_is_a_value_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VALUES, "huge", lambda i: i << 62)
    captures_of(["not read"], ["huge"])

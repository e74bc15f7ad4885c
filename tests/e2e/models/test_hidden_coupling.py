"""Models that mix the rows of a batch where one experiment does not show it: behind a closed gate, for rare tokens, in
dead or saturated functions.  Each is refused, or its micro-batches equal plain training, also after weights moved."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopart

ROWS, TOKENS, WIDTH, RARE = 8, 5, 8, 10


def _own_rows(x: torch.Tensor) -> torch.Tensor:
    """Sorts the rows and puts them back: exact, and numbers have to show it."""
    order = x[:, 0].argsort()
    return (x[order] * 1.5).tanh()[order.argsort()]


def _overflowing(x: torch.Tensor) -> torch.Tensor:
    place = (x[:, 0] > 0).long().cumsum(0)
    return x * (ROWS + 1 - place).clamp(0, 1)[:, None]


MIXED = {
    "own rows": _own_rows,
    "cumsum": lambda x: x.cumsum(0),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "sorted": lambda x: x.sort(0).values,
    "largest": lambda x: x.cummax(0).values,
    "ranks": lambda x: x[:, 0].argsort().argsort()[:, None].to(x.dtype),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None])[0],
    "reordered": lambda x: x[x[:, 0].argsort()],
    "overflowing": _overflowing,
}
HIDDEN = ("parameter", "tiny parameter", "buffer", "rare token", "rare choice", "dead", "zero head", "infinite", "nan")


class Hidden(nn.Module):
    """Mixes rows, and hides it at first."""

    def __init__(self, mixed: str, hidden: str) -> None:
        super().__init__()
        self.words, self.a, self.head = nn.Embedding(RARE + 1, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.mixed, self.hidden = mixed, hidden
        self.register_buffer("scale", torch.zeros(WIDTH))
        self.gate = nn.Parameter(torch.full((WIDTH,), 1e-8 if hidden == "tiny parameter" else 0.0))
        if hidden == "zero head":
            nn.init.zeros_(self.head.weight)
        if hidden in ("infinite", "nan"):
            with torch.no_grad():
                self.words.weight[0] = float(hidden[:3])

    def forward(self, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.a(self.words(ids)).mean(1)
        mixed, rare = MIXED[self.mixed](x), (ids == RARE).any(1)[:, None]
        match self.hidden:
            case "parameter" | "tiny parameter":
                x = x + self.gate * mixed
            case "buffer":
                x = x + self.scale * mixed
            case "rare token":
                x = x + mixed * rare
            case "rare choice":
                x = torch.where(rare, mixed, x)
            case "dead":
                x = x + F.relu(mixed - 8)
            case _:
                x = x + mixed
        return F.cross_entropy(self.head(x), y)


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """Return a batch; from the third step on with the rare token."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(1, RARE, (ROWS, TOKENS), generator=generator)
    if step > 1:
        ids[::2, 0] = RARE
    return {"ids": ids, "y": torch.randint(3, (ROWS,), generator=generator)}


def wrong(mixed: str, hidden: str) -> str:
    """Return what a run of four steps got wrong; "" for a refusal or an exact run.  Weights move far between them."""
    torch.manual_seed(0)
    model = Hidden(mixed, hidden).double()
    plain = copy.deepcopy(model)
    try:
        with autopart.compile(
            model, "cpu:1", sample=batch_of(0), stages=1, micro_batches=4, costs="analytic", cache=False
        ) as pipe:
            for step in range(4):
                for each in (model, plain):
                    each.zero_grad()
                loss, expected = pipe.step(batch_of(step)).item(), plain(**batch_of(step))
                expected.backward()
                if abs(loss - expected.item()) > 1e-9 * max(1, abs(expected.item())):
                    return f"step {step}: loss {loss}, plain {expected.item()}"
                found = pipe.gradients()
                for name, parameter in plain.named_parameters():
                    if parameter.grad is not None and not torch.allclose(found[name], parameter.grad, rtol=1e-6):
                        return f"step {step}: gradient of {name}"
                torch.manual_seed(step)
                with torch.no_grad():
                    for (_, old), (_, new) in zip(model.state_dict().items(), plain.state_dict().items(), strict=True):
                        old.add_(torch.randn_like(new))
                        new.copy_(old)
    except autopart.RefusedError as error:
        assert mixed != "own rows", f"a model that keeps rows apart is refused: {error}"
        assert "micro_batches=1" in (error.fix or "")
    return ""


CASES = [(mixed, hidden) for mixed in MIXED for hidden in HIDDEN]


@pytest.mark.parametrize(("mixed", "hidden"), random.Random(0).sample(CASES, 12), ids=str)
def test_what_couples_rows_out_of_sight_is_refused_or_exact(mixed: str, hidden: str) -> None:
    assert wrong(mixed, hidden) == ""


@pytest.mark.slow
@pytest.mark.parametrize(("mixed", "hidden"), CASES, ids=str)
def test_all_that_couples_rows_out_of_sight_is_refused_or_exact(mixed: str, hidden: str) -> None:
    assert wrong(mixed, hidden) == ""

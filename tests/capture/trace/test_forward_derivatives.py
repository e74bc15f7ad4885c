"""torch.func.jvp in forward(): exact, or refused with the op and a way out; a refusal leaves the process as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopart

Part = Callable[[torch.Tensor], torch.Tensor]


def _centred(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(-1, keepdim=True)


def _softmax(x: torch.Tensor) -> torch.Tensor:
    e = x.exp()
    return e / e.sum(-1, keepdim=True)


def _norm(x: torch.Tensor) -> torch.Tensor:
    c = _centred(x)
    return c * ((c * c).mean(-1, keepdim=True) + 1e-5).rsqrt()


ADVISED: dict[str, Part] = {
    "x * x": lambda x: x * x,
    "SiLU": lambda x: x * x.sigmoid(),
    "softmax": _softmax,
    "norm": _norm,
    "tanh": torch.tanh,
    "GELU": F.gelu,
}
OTHERS: dict[str, Part] = {
    **{f.__name__: f for f in (F.silu, F.mish, F.selu, F.logsigmoid, F.hardswish, F.elu, F.softplus, F.relu, F.relu6)},
    **{f.__name__: f for f in (torch.square, torch.logsumexp, torch.var, torch.std, torch.exp, torch.sin, torch.rsqrt)},
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "group_norm": lambda x: F.group_norm(x, 2),
    "square of the mean": lambda x: x.square().mean(-1, keepdim=True),
    "product": lambda x: x @ x.mT @ x,
    "views": lambda x: x.reshape(-1, 2, 3).transpose(1, 2).flatten(1),
    "largest": lambda x: x.amax(-1, keepdim=True),
    "sorted": lambda x: x.sort(-1).values,
}
for _name in ("logsumexp", "var", "std"):
    OTHERS[_name] = lambda x, f=OTHERS[_name]: f(x, -1, keepdim=True)  # type: ignore[misc]
OTHERS["rsqrt"] = lambda x: (x * x + 1).rsqrt()


class Slope(nn.Module):
    """Trains on a function and its derivative; beside the op stands a path that keeps its own derivative."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.first, self.last, self.part = nn.Linear(3, 6), nn.Linear(6, 1), part

    def f(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return self.last(self.part(hidden) + 0.5 * hidden)

    def forward(self, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, slope = torch.func.jvp(self.f, (x,), (v,))
        return (out.pow(2) + slope.pow(2)).mean()


class Slopes(nn.Module):
    """Several of them, each with its own weights, whose gradients tell which one is not exact."""

    def __init__(self, parts: Iterable[Part]) -> None:
        super().__init__()
        self.each = nn.ModuleList(map(Slope, parts))

    def forward(self, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.stack([slope(x, v) for slope in self.each]).sum()


def exact(*parts: Part) -> bool:
    """Return whether a step is exact; False for a refusal that says what to do.  The process is as it was."""
    torch.manual_seed(0)
    model = Slopes(parts).double()
    batch = {"x": torch.randn(8, 3).double(), "v": torch.randn(8, 3).double()}
    expected = model(**batch)
    expected.backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    try:
        with autopart.compile(model, "cpu:1", sample=batch, micro_batches=2, costs="analytic", cache=False) as pipe:
            assert abs(pipe.step(batch).item() - expected.item()) < 1e-9
            found = pipe.gradients()
            for name, gradient in want.items():
                torch.testing.assert_close(found[name], gradient)
        done = True
    except (autopart.RefusedError, autopart.CaptureError) as error:
        assert "write the derivative out" in (error.fix or "") and "test_forward_derivatives.py" in error.where, error
        done = False
    assert torch._C._functorch.peek_interpreter_stack() is None
    nn.Linear(2, 2).double()
    model.zero_grad()
    model(**batch).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, want.get(name))
    return done


def test_forward_derivatives_written_as_advised_are_exact() -> None:
    assert exact(*ADVISED.values())


DEFAULT = ("silu", "selu", "square", "softmax", "layer_norm", "square of the mean", "product", "views", "sorted")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DEFAULT else [pytest.mark.slow]) for name in OTHERS]
)
def test_a_forward_derivative_through_any_op_is_exact_or_refused(name: str) -> None:
    exact(OTHERS[name])

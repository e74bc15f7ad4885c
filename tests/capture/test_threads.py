"""A model is captured while other threads use torch, and several threads capture at once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import fx, nn

from autopart.batch.batch import flatten
from autopart.capture.capture import capture
from autopart.ir.errors import RefusedError


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * grad


def use_torch(found: dict[str, Any]) -> None:
    """What a capture changes in the model and defers in itself, in code that is not captured."""
    x = torch.tensor(3.0, requires_grad=True)
    y = Square.apply(x)
    y.register_hook(lambda grad: grad * 2)
    y.backward()
    found["gradient"] = x.grad.item()
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    found["compiled"] = "return x" in fx.GraphModule({}, graph).code


class Meets(nn.Module):
    """While it is traced, another thread does something from start to end."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self._other = other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=self._other)
        thread.start()
        thread.join(60)
        return self.layer(x).mean()


BATCH = flatten(torch.ones(4, 2))


def test_another_thread_uses_torch_as_ever_while_a_model_is_captured() -> None:
    found: dict[str, Any] = {}
    capture(Meets(lambda: use_torch(found)), BATCH)
    assert found == {"gradient": 12.0, "compiled": True}


class Refused(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.register_hook(lambda grad: grad)
        return x.mean()


def test_threads_capture_at_once_and_each_gets_its_own_answer() -> None:
    start = threading.Barrier(3)
    answers: dict[int, str] = {}

    def one(number: int) -> None:
        start.wait(60)
        try:
            answers[number] = capture(nn.Sequential(nn.Linear(2, 1), nn.Flatten(0)) if number else Refused(), BATCH)
        except RefusedError:
            answers[number] = "refused"
        except Exception as error:
            answers[number] = type(error).__name__

    threads = [threading.Thread(target=one, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert answers == {0: "refused", 1: "CaptureError", 2: "CaptureError"}
    with pytest.raises(RefusedError):  # and torch is as it was
        capture(Refused(), BATCH)
    assert Square.apply(torch.tensor(2.0)).item() == 4.0

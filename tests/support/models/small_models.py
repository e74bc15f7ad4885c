"""The eighteen small models of RaNNC's test suite, with a batch and a loss for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

LossFn = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Small:
    """A model and how to train it.

    batch: returns what `Pipe.step` takes for a number of rows; with a loss_fn, (inputs, target). most: largest number
    of stages. coupled: batch statistics couple the rows, so the reference must run the same micro-batches.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss_fn: LossFn | None = None
    most: int = 4
    coupled: bool = False

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Return the model with the same weights at every call, in training mode.

        In fp32 the dtypes stay as built, because some models mix precisions.
        """
        torch.manual_seed(11)
        model = self.make()
        return (model if dtype == torch.float32 else model.to(dtype)).train()

    def data(self, rows: int, dtype: torch.dtype = torch.float32) -> Any:
        """Return a batch with its floating tensors in dtype."""
        return in_dtype(self.batch(rows), dtype)


def in_dtype(batch: Any, dtype: torch.dtype) -> Any:
    """Return the batch with its floating tensors in dtype."""
    return pytree.tree_map(lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, batch)


def floats(*shape: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(high: int, *shape: int, seed: int = 6) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def linear(inputs: int = 3, outputs: int = 3) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def regression(inputs: int, outputs: int) -> Callable[[int], Any]:
    """Return a function that makes inputs and targets for a mean squared error."""
    return lambda rows: (floats(rows, inputs), floats(rows, outputs, seed=8))


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 3), nn.Conv2d(6, 16, 3)
        self.fc1, self.fc2, self.fc3 = nn.Linear(16 * 6 * 6, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), (2, 2))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = x.view(-1, 16 * 6 * 6)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class SharedInput(nn.Module):
    """The input goes to two branches that meet again."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3, self.fc4 = (linear() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc4(self.fc3(self.fc1(x) + self.fc2(x)) + x)


class ForkJoin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3, self.fc4 = (linear() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc1(x)
        return self.fc4(self.fc2(x) + self.fc3(x))


class SharedParam(nn.Module):
    """One weight under two names, used in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = linear(), linear()
        self.fc2.weight = self.fc1.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.relu(self.fc1(x)))


class OneOp(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class TensorMul(nn.Module):
    """A model without parameters that creates a tensor in forward()."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([3.0, 1.0, 2.0]) + torch.ones(3)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding(x)


@torch.jit.script
def counted(x: torch.Tensor, times: int) -> torch.Tensor:
    y = torch.zeros_like(x)
    for i in range(times):
        y += x + i
    return y


class Function(nn.Module):
    """A scripted function with an in-place loop over integers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x * counted((x > 0).long(), 3))


class LossOut(nn.Module):
    """Two inputs; the model computes its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = linear(), linear()

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.fc2(self.fc1(x)), target)


class SharedEmbedding(nn.Module):
    """Embedding and output head are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.gelu(self.hidden(self.embedding(x)))).transpose(1, 2)


class MixedNorm(nn.Module):
    """A layer norm in double precision between layers in single."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = linear(4, 6), linear(6, 4)
        self.norm = nn.LayerNorm(6, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.norm(self.fc1(x).double()).float())


class Nest(nn.Module):
    """Nested modules and containers in the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"a": nn.Sequential(linear(), nn.Tanh(), LossFree()), "b": LossFree()})

    def forward(self, x: dict[str, Any]) -> torch.Tensor:
        return self.inner["b"](self.inner["a"](x["left"]) + x["right"][0]) + x["right"][1]


class LossFree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([linear(), linear()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class WithIdentity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start, self.same, self.end = nn.Identity(), nn.Identity(), nn.Identity()
        self.fc = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.fc(self.same(self.start(x))))


class Normed(nn.Module):
    """Batch norms, each after a linear layer."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear(3, 3) for _ in range(count))
        self.norms = nn.ModuleList(nn.BatchNorm1d(3, momentum=0.1 * (i + 1)) for i in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x))
        return x


@torch.library.custom_op("autopart_tests::cubed", mutates_args=())
def cubed(x: torch.Tensor) -> torch.Tensor:
    return x**3


@cubed.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


cubed.register_autograd(
    lambda ctx, grad: grad * 3 * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


class NativeCall(nn.Module):
    """A custom op with its own backward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(cubed(self.fc1(x)))


def _token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, target, ignore_index=0)


mse = F.mse_loss
SMALL = {
    "basic": Small(LeNet, lambda n: (floats(n, 1, 32, 32), integers(10, n)), F.cross_entropy),
    "small_param": Small(lambda: nn.Sequential(linear(3, 4), linear(4, 3)), regression(3, 3), mse),
    "shared_input": Small(SharedInput, regression(3, 3), mse),
    "fork_join": Small(ForkJoin, regression(3, 3), mse),
    "shared_param": Small(SharedParam, regression(3, 3), mse),
    "one_op": Small(OneOp, regression(3, 3), mse, most=1),
    "tensor_mul": Small(TensorMul, regression(3, 3), mse, most=2),
    "embedding": Small(Embedded, lambda n: (integers(10, n, 16), floats(n, 16, 8)), mse, most=2),
    "function": Small(Function, regression(3, 3), mse),
    "loss_out": Small(LossOut, regression(3, 3)),
    "shared_embedding": Small(SharedEmbedding, lambda n: (integers(10, n, 6), integers(10, n, 6, seed=9)), _token_loss),
    "layer_norm": Small(MixedNorm, regression(4, 4), mse),
    "nest": Small(
        Nest,
        lambda n: (({"left": floats(n, 3), "right": [floats(n, 3, seed=1), 2]},), floats(n, 3, seed=8)),
        mse,
    ),
    "identity": Small(WithIdentity, regression(3, 3), mse, most=2),
    "buffer1": Small(lambda: Normed(1), regression(3, 3), mse, most=2, coupled=True),
    "buffer2": Small(lambda: Normed(2), regression(3, 3), mse, coupled=True),
    "buffer3": Small(lambda: Normed(4), regression(3, 3), mse, coupled=True),
    "native_call": Small(NativeCall, regression(3, 3), mse),
}

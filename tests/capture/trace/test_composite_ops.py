"""Composite ops that the table does not know are taken apart while tracing: aliases, and what is made of known ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autopart
from autopart.batch.batch import flatten
from autopart.capture import Captured, capture
from autopart.capture.python.habits.habits import patched
from autopart.capture.trace.export import quiet
from autopart.capture.trace.functional import functional_graph
from autopart.ir.errors import StageError
from autopart.ir.graph import Size
from autopart.passes.ops.table import has_row

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "concat": lambda x: torch.concat([x, x.tanh()], 1),
    "concatenate": lambda x: torch.concatenate([x, x.tanh()], 1),
    "hstack": lambda x: torch.hstack([x, x.tanh()]),
    "row_stack, of vstack, of cat": lambda x: torch.row_stack([x.T, x.T.tanh()]).T,
    "column_stack": lambda x: torch.column_stack([x, x.tanh()]),
    "dstack": lambda x: torch.dstack([x, x.tanh()]),
    "moveaxis and swapaxes": lambda x: x[..., None].moveaxis(1, 2).swapaxes(1, 2),
    "divide, multiply, subtract": lambda x: torch.divide(torch.multiply(x, x).subtract(x), 2.5),
    "negative, fix": lambda x: x.negative() + x.fix(),
    "special_expit": lambda x: torch.special.expit(x),
    "greater": lambda x: x * x.greater(0.1),
    "arcsinh": lambda x: x.arcsinh(),
    "trapezoid": lambda x: x[..., None] * torch.trapezoid(x, dx=0.5, dim=1)[:, None, None],
    "fliplr": lambda x: x.fliplr() * torch.arange(6.0),
    "float_power": lambda x: x.float_power(2),
}


class Net(nn.Module):
    """Functions, each of a layer of its own, so that its gradients tell whether it is exact."""

    def __init__(self, *functions: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.functions, self.layers = functions, nn.ModuleList(nn.Linear(6, 6) for _ in functions)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch."""
        each = [function(layer(x)).square().mean() for function, layer in zip(self.functions, self.layers, strict=True)]
        return torch.stack(each).sum()


def step(model: nn.Module, x: torch.Tensor, micro_batches: int) -> tuple[torch.Tensor, dict[str, Any]]:
    with autopart.compile(
        model, "cpu:1", sample={"x": x}, micro_batches=micro_batches, costs="analytic", cache=False
    ) as pipe:
        return pipe.step({"x": x}), pipe.gradients()


def test_ops_that_are_made_of_known_ops_are_exact_in_micro_batches() -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    model, plain = Net(*FUNCTIONS.values()), Net(*FUNCTIONS.values())
    expected = plain(x)
    expected.backward()
    assert all(has_row(op.target) for op in capture(plain, flatten({"x": x}), size=Size(2)).graph.ops)
    loss, gradients = step(model, x, micro_batches=2)
    torch.testing.assert_close(loss, expected.detach())
    for key, parameter in plain.named_parameters():
        function = list(FUNCTIONS)[int(key.split(".")[1])]
        torch.testing.assert_close(gradients[key], parameter.grad, msg=lambda text, at=function: f"{at}: {text}")


def test_a_random_op_stays_whole_so_that_its_backward_reads_what_its_forward_drew() -> None:
    def drawn(x: torch.Tensor) -> torch.Tensor:
        return torch.rrelu(x, 0.25, 0.5, training=True)

    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    model = Net(drawn)
    with torch.no_grad():
        model.layers[0].bias.fill_(-100)  # a slope between 0.25 and 0.5 everywhere
    loss, gradients = step(model, x, micro_batches=1)
    slope = loss.sqrt() / 100
    assert 0.25 < slope < 0.5
    assert -100 * 0.5**2 * 2 < gradients["layers.0.bias"].sum() < -100 * 0.25**2 * 2


def test_an_op_of_linear_algebra_stays_whole_so_that_its_error_is_not_lost() -> None:
    def inverse(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(x[:, :4].T @ x[:, :4] * 0)

    with pytest.raises(StageError, match="singular"):
        step(Net(inverse), torch.randn(4, 6), micro_batches=1)


def test_ops_that_an_earlier_capture_took_apart_are_not_taken_apart_again(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    plain = torch.export.ExportedProgram.run_decompositions
    monkeypatch.setattr(
        torch.export.ExportedProgram, "run_decompositions", lambda *args: runs.append(1) or plain(*args)
    )

    def captured(power: float) -> Captured:
        model = Net(lambda x: x.float_power(power).relu().split(3, 1)[1])
        return capture(model, flatten(torch.ones(4, 6)), size=Size(2))

    first, again, other = captured(3.25), captured(3.25), captured(4.25)
    assert len(runs) == 2  # the power is a part of the key
    assert again.graph == first.graph and again.module.code == first.module.code
    assert other.graph.shape_digest() != first.graph.shape_digest()
    values = [[node.meta.get("val") for node in each.module.graph.nodes] for each in (first, again)]
    for mine, before in zip(*values, strict=True):
        if isinstance(mine, torch.Tensor):
            assert (mine.shape, mine.stride(), mine.dtype) == (before.shape, before.stride(), before.dtype)
            assert mine.fake_mode is not before.fake_mode  # type: ignore[attr-defined]


class Structured(nn.Module):
    """Ops that torch generates from one structure each, and a tensor that is made of a number."""

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return a number."""
        wide = torch.cat([x * 2.5 + 1, x.cumsum(-1), -x.cos(), x.pow(2).mean(-1, keepdim=True).rsqrt()], 1)
        read = wide[places].clamp(min=torch.tensor(0.25)).transpose(0, 1).add(1e-6)
        return torch.where(read > 0.5, read.tril(), read.softmax(-1)).sum()


def test_ops_of_one_structure_stay_as_torch_leaves_them() -> None:
    batch = (torch.ones(4, 6), torch.tensor([0, 2, 3]))
    with patched(), quiet():
        found = functional_graph(torch.export.export(Structured(), batch, strict=False))
        expected = torch.export.export(Structured(), batch, strict=False).run_decompositions({}).graph
    assert found is not None
    assert [node.format_node() for node in found.nodes] == [node.format_node() for node in expected.nodes]
    pairs = [(mine.meta["val"], theirs.meta["val"]) for mine, theirs in zip(found.nodes, expected.nodes, strict=True)
             if mine.op != "output"]  # fmt: skip
    assert all((mine.shape, mine.stride(), mine.dtype) == (v.shape, v.stride(), v.dtype) for mine, v in pairs)


def test_a_kernel_that_stands_in_for_that_of_a_device_runs_for_no_key_that_records_ops() -> None:
    keys, included = torch._C.DispatchKey, torch._C._dispatch_is_included_in_alias
    recording = (keys.AutogradCPU, keys.AutogradCUDA, keys.AutogradMeta, keys.AutogradOther, keys.ADInplaceOrView,
                 keys.Functionalize, keys.PreDispatch, keys.Python, keys.AutocastCPU)  # fmt: skip
    for kind in (keys.CompositeExplicitAutograd, keys.CompositeExplicitAutogradNonFunctional):
        assert not any(included(key, kind) for key in recording)
        assert all(included(key, kind) for key in (keys.CPU, keys.CUDA, keys.Meta))

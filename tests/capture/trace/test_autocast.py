"""Autocast captured with the graph: loss and gradients equal, bit by bit, those of plain torch under torch.autocast."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.grids import sampled
from support.jobs.step_jobs import EVERY
from support.oracles.one_process import gradients_of, plain_loss
from torch import nn
from torch.nn import functional as F

import autopart
from autopart.batch.batch import flatten
from autopart.capture import CaptureCache, Captured
from autopart.capture.capture import capture
from autopart.capture.trace.autocast import autocast_for
from autopart.ir.errors import CaptureError, UsageError
from autopart.ir.graph import Size


def gradients(captured: Captured, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, dict[str, Any]]:
    """Loss and gradients of the captured program, its parameters as leaves of their own."""
    names, inputs, leaves, args = captured.names, iter(tensors), {}, []
    for node in captured.module.graph.nodes:
        if node.op == "placeholder" and node.name in names.params:
            tensor = names.tensors[names.params[node.name]]
            fresh = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            args.append(leaves.setdefault(names.params[node.name], fresh))
        elif node.op == "placeholder":
            args.append(next(inputs))
    loss = captured.module(*args)[len(names.updates)]
    loss.backward()
    return loss.detach(), {name: leaf.grad for name, leaf in leaves.items()}


def require_equal(captured: Captured, model: nn.Module, found: Any, loss: torch.Tensor) -> None:
    loss.backward()
    assert torch.equal(found[0], loss.detach())
    for name, gradient in gradients_of(model).items():
        mine = found[1].get(name)
        assert (mine is None) == (gradient is None), name
        assert gradient is None or torch.equal(mine, gradient), name


NAMES = ["basic", "shared_by_all", "layer_norm", "buffer2", "in_place", "batch_norm", "frozen", "rotary"]


@pytest.mark.parametrize("name", [*NAMES, pytest.param("llama", marks=pytest.mark.slow)])
@pytest.mark.parametrize("precision", sampled(["bf16", "fp16"]))
def test_gradients_are_those_of_plain_autocast(name: str, precision: Any) -> None:
    case, autocast = EVERY[name], autocast_for(precision, "cpu")
    batch = flatten(case.data(4), with_target=case.loss_fn is not None)
    captured = capture(case.model(), batch, loss_fn=case.loss_fn, autocast=autocast)
    assert any(value.dtype.endswith("float16") for value in captured.graph.values)
    plain = case.model()
    with autocast.region():
        loss = plain_loss(case, plain, case.data(4))
    require_equal(captured, plain, gradients(captured, batch.tensors), loss)


class Made(nn.Module):
    """A linear layer, then `call` on what it makes, a weight, and a module."""

    def __init__(self, call: Callable[..., torch.Tensor], inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.call = nn.Linear(8, 8), inner, call
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.first(x), self.weight, self.inner).float().pow(2).mean()


TRAPS = {  # ops that autocast does not know by themselves, some beside a buffer that changes
    "einsum": lambda: Made(lambda x, w, _: torch.einsum("bti,ij->btj", x, w), nn.Identity()),
    "einsum in place": lambda: Made(lambda x, w, m: m(torch.einsum("bti,ij->bjt", x, w)), nn.BatchNorm1d(8)),
    "LSTM": lambda: Made(lambda x, _, m: m(x)[0], nn.LSTM(8, 8, batch_first=True)),
    "GRU": lambda: Made(lambda x, _, m: m(x)[0], nn.GRU(8, 8, batch_first=True)),
    "attention": lambda: Made(lambda x, _, m: m(x, x, x)[0], nn.MultiheadAttention(8, 2, batch_first=True)),
    "weight norm": lambda: Made(lambda x, _, m: m(x), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))),
}


@pytest.mark.parametrize("name", TRAPS)
def test_ops_made_of_others_keep_the_casts_inside(name: str) -> None:
    autocast = autocast_for("bf16", "cpu")
    model, batch = TRAPS[name](), flatten((torch.randn(4, 5, 8),))
    plain = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        captured = capture(model, batch, autocast=autocast)
    with autocast.region():
        loss = plain(*batch.tensors)
    require_equal(captured, plain, gradients(captured, batch.tensors), loss)


def test_what_torch_cannot_trace_under_autocast_is_refused_by_name() -> None:
    model = Made(lambda x, w, _: torch.tensordot(x, w, dims=1), nn.Identity())
    with pytest.raises(CaptureError, match=r"test_autocast\.py"):
        capture(model, flatten((torch.randn(4, 5, 8),)), autocast=autocast_for("bf16", "cpu"))


@pytest.mark.parametrize("name", sampled(["rotary", "batch_norm", "in_place"], 3))
def test_ops_keep_their_place_in_the_users_code(name: str) -> None:
    case = EVERY[name]
    batch = flatten(case.data(4), with_target=case.loss_fn is not None)
    plain, cast = (
        capture(case.model(), batch, loss_fn=case.loss_fn, autocast=autocast)
        for autocast in (None, autocast_for("bf16", "cpu"))
    )
    assert {(op.module, op.where) for op in plain.graph.ops} == {(op.module, op.where) for op in cast.graph.ops}


def test_evaluation_and_predictions_run_in_it_too() -> None:
    case = EVERY["basic"]
    captures = CaptureCache(case.model(), case.loss_fn)
    captures.run_in("bf16", "cpu")
    inputs = case.data(4)[0] if case.loss_fn is not None else case.data(4)
    predicted = captures(flatten(inputs), Size(4), "predict").graph
    assert predicted.value_map()[predicted.outputs[0]].dtype == "bfloat16"
    with pytest.raises(UsageError, match="another precision"):
        captures.run_in("fp32", "cpu")


CUDA = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this torch cannot trace for CUDA")


@pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=CUDA)])
@pytest.mark.parametrize("name", ["batch_norm", "stack"])
def test_a_model_on_the_meta_device_is_captured_as_on_its_cluster(name: str, device_type: str) -> None:
    case, autocast = EVERY[name], autocast_for("bf16", device_type)
    batch = flatten(case.data(4), with_target=case.loss_fn is not None)
    graphs = []
    for device in ("meta", "cpu"):
        model = case.model().to(device)
        captured = capture(model, batch.to(torch.device(device)), loss_fn=case.loss_fn, autocast=autocast)
        assert all(
            tensor is dict(model.named_parameters()).get(name, tensor) for name, tensor in captured.tensors.items()
        )
        graphs.append(captured.graph)
    assert graphs[0].shape_digest() == graphs[1].shape_digest()
    assert [op.module for op in graphs[0].ops] == [op.module for op in graphs[1].ops]


def test_without_cuda_a_plan_for_it_says_whose_casts_it_has() -> None:
    plan = autopart.plan(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "h200x8", sample=(torch.ones(4, 8), torch.ones(4, 8)),
        loss_fn=F.mse_loss, precision="bf16", optimizer="sgd", cache=False,
    )  # fmt: skip
    assert plan.provenance.precision == "bf16"
    assert any("no CUDA" in note for note in plan.notes) != torch.backends.cuda.is_built()

"""An invalid model or batch raises an autopart error with a fix, before any data is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.languages.refusals import Body, X, batch, compiled, net, planned, refused
from torch import nn
from torch.nn import functional as F

from autopart.ir.errors import (
    BatchError,
    CaptureError,
    RefusedError,
    StageError,
    UsageError,
)

# -- the model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [None, "model", nn.Linear, lambda x: x, torch.zeros(3)])
def test_anything_but_a_module_is_refused(model):
    with refused(UsageError, "not a torch.nn.Module", "fix"):
        compiled(model, X)


def hooked(register: Callable[[nn.Module], Any]) -> nn.Module:
    model = Body()
    register(model)
    return model


@pytest.mark.parametrize(
    ("register", "words"),
    [
        (lambda m: m.linear.register_forward_hook(lambda *_: None), "forward hook"),
        (lambda m: m.linear.register_forward_pre_hook(lambda *_: None), "forward pre-hook"),
        (lambda m: m.linear.register_full_backward_hook(lambda *_: None), "backward hook"),
        (lambda m: m.linear.weight.register_hook(lambda g: g), "gradient hook"),
        (lambda m: m.linear.weight.register_post_accumulate_grad_hook(lambda p: None), "gradient hook"),
    ],
)
def test_hooks_are_refused_with_their_module(register, words):
    with refused(RefusedError, words, "linear"):
        compiled(hooked(register), X)


class _Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


def _if(m, x):
    hidden = m.linear(x)
    if hidden.sum() > 0:
        hidden = hidden * 2
    return hidden.mean()


def _hook_inside(m, x):
    hidden = m.linear(x)
    hidden.register_hook(lambda grad: grad * 2)
    return hidden.mean()


def _attribute_state(m, x):
    hidden = m.linear(x + m.state)
    m.state = hidden.mean(0).detach()
    return hidden.mean()


def _attribute_in_place(m, x):
    hidden = m.linear(x + m.state)
    m.state.add_(1)
    return hidden.mean()


def _no_grad_in_place(m, x):
    hidden = m.linear(x)
    with torch.no_grad():
        hidden.mul_(2)
    return hidden.mean()


def _input_in_place(m, x):
    x.add_(1)
    return m.linear(x).mean()


def _clip(m, x):
    embedded = m.linear(x)
    return F.cross_entropy(embedded @ embedded.t(), torch.arange(len(x)))


def _raises(m, x):
    raise KeyError("no such key")


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (_if, CaptureError, ("depends on the data", "torch.where", __file__)),
        (lambda m, x: m.linear(x).mean() * m.linear(x).sum().item(), CaptureError, (".item()", "linear.", __file__)),
        (lambda m, x: m.linear(x)[x[:, 0] > 0].mean(), RefusedError, ("x[mask]", "micro_batches=1", __file__)),
        (lambda m, x: (y := m.linear(x))[y[:, 0] > 0].mean(), CaptureError, ("shape depends on tensor data",)),
        (lambda m, x: m.linear(x).mean() + float(x.numpy().sum()), CaptureError, ("numpy", __file__)),
        (_raises, CaptureError, ("KeyError", "no such key", __file__)),
        (lambda m, x: _Noisy.apply(m.linear(x)).mean(), RefusedError, ("_Noisy", "random", "register_autograd")),
        (_hook_inside, RefusedError, ("gradient hook", __file__)),
        (_attribute_state, RefusedError, ("attribute state", "register_buffer")),
        (_attribute_in_place, CaptureError, ("register_buffer",)),
        (_no_grad_in_place, RefusedError, ("in place", "no_grad")),
        (_input_in_place, RefusedError, ("input arg0", "clone")),
        (lambda m, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (m.linear(x),)).mean(), RefusedError, ("cond",)),
        (_clip, RefusedError, ("micro_batches=1",)),
        (lambda m, x: m.linear(x), CaptureError, ("scalar loss", "loss_fn")),
        (lambda m, x: "text", CaptureError, ("str", "loss_fn")),
        (lambda m, x: {"logits": m.linear(x)}, CaptureError, ("without a loss",)),
        (lambda m, x: m.linear(x).argmax(), CaptureError, ("scalar loss",)),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_exact_is_refused_with_the_reason(body, kind, words, capfd):
    with refused(kind, *words):
        compiled(Body(body), X, micro_batches=2)
    assert capfd.readouterr() == ("", "")  # nothing is printed besides the error


def test_a_loss_that_couples_rows_runs_as_one_micro_batch():
    model = Body(_clip)
    expected = model(X)
    assert compiled(model, X, micro_batches=1).step(X).item() == pytest.approx(expected.item(), rel=1e-6)


def test_an_autocast_around_the_call_is_refused_at_compile_and_at_the_step():
    pipe = compiled(net(), batch(), loss_fn=F.cross_entropy)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with refused(RefusedError, "autocast", "inside forward()"):
            compiled(net(), batch(), loss_fn=F.cross_entropy)
        with refused(RefusedError, "autocast"):
            pipe.step(batch())


def _aliased_parameters() -> nn.Module:
    model = net(4)
    model.append(nn.Linear(4, 4))
    model[3].weight = nn.Parameter(model[0].weight.data)
    return model


def _aliased_buffer() -> nn.Module:
    model = net()
    model.register_buffer("view", model[0].weight.data)
    return model


@pytest.mark.parametrize("make", [_aliased_parameters, _aliased_buffer])
def test_different_tensors_with_shared_memory_are_refused(make):
    with refused(RefusedError, "share memory", "0.weight"):
        compiled(make(), batch(), loss_fn=F.cross_entropy)


def test_buffers_that_share_memory_and_change_are_refused():
    def body(m, x):
        m.a.add_(x.mean(0))
        return (m.linear(x) + m.b.sum()).mean()

    for share in (lambda buffer: buffer, lambda buffer: buffer[:2]):
        model = Body(body)
        model.register_buffer("a", torch.zeros(4))
        model.register_buffer("b", share(model.a))
        with refused(RefusedError, "buffers a and b share memory"):
            compiled(model, X)


def test_a_meta_model_can_be_planned_but_not_compiled():
    with torch.device("meta"):
        model = net()
    assert planned(model=model).stages
    with refused(UsageError, "meta device", "autopart.plan"):
        compiled(model, batch(), loss_fn=F.cross_entropy)


# -- the batch ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"x": X, "extra": object()}, "input extra"),
        ({"x": X, "extra": {1, 2}}, "input extra"),
        ({"x": X, "extra": lambda: 0}, "input extra"),
        ({"x": X, "extra": {"a": [1, {"b": object()}]}}, "input extra_a_1_b"),
        ({1: X}, "keyword 1"),
        ({("x", 2): X}, "keyword ('x', 2)"),
        (torch.randn(0, 4), "empty"),
        (torch.randn(8, 4, requires_grad=True), "requires a gradient"),
        (X.to_sparse(), "dense"),
    ],
)
def test_batches_that_cannot_be_captured_are_refused(sample, words):
    with refused(BatchError, words):
        compiled(Body(lambda m, x, extra=None: m.linear(x).mean()), sample)


@pytest.mark.parametrize("sample", [{}, (), {"x": 3}])
def test_a_batch_without_a_tensor_is_refused(sample):
    with refused(CaptureError, "no tensor"):
        compiled(Body(), sample)


def test_wrong_arguments_of_the_model_are_reported_as_python_does():
    with refused(CaptureError, "unexpected keyword argument 'other'"):
        compiled(net(), {"input": X, "other": 1})
    with refused(CaptureError, "module linear"):
        compiled(Body(), torch.randn(8, 5))


def test_a_batch_with_fewer_rows_than_micro_batches_is_refused_at_compile_but_may_be_the_last_of_an_epoch():
    with refused(BatchError, "2 rows", "4 micro-batches", "micro_batches=2"):
        compiled(net(), batch(2), loss_fn=F.cross_entropy, micro_batches=4)
    pipe = compiled(net(), batch(8), loss_fn=F.cross_entropy, micro_batches=4)
    assert torch.isfinite(pipe.step(batch(2)))
    assert torch.isfinite(pipe.step(batch(8)))  # the pipe still works


def test_a_batch_without_rows_cannot_be_cut():
    model = Body(lambda m, x: m.linear.weight.sum() * x)
    with refused(UsageError, "no rows", "micro_batches=1"):
        compiled(model, torch.tensor(2.0), micro_batches=2)


def test_with_a_loss_function_the_batch_must_be_a_pair():
    for sample in (X, {"input": X}, (X, X, X)):
        with refused(BatchError, "(inputs, target)"):
            compiled(net(), sample, loss_fn=F.cross_entropy)


def test_several_inputs_with_a_target_are_refused_with_the_form_to_use():
    with refused(BatchError, "got 3 values", "((x, y), target)"):
        compiled(net(), (X, X, X), loss_fn=F.cross_entropy)


@pytest.mark.parametrize("loss_fn", [None, F.cross_entropy])
def test_a_loader_instead_of_a_batch_is_refused(loss_fn):
    loader = torch.utils.data.DataLoader([(X[0], X[0])])
    for sample in (loader, iter(loader), (one for one in loader)):
        with refused(BatchError, "not one batch", "sample=next(iter(loader))", "for batch in loader"):
            compiled(net(), sample, loss_fn=loss_fn)


def test_a_wrong_dtype_in_a_step_is_reported_with_its_module():
    pipe = compiled(Body(), X)
    with refused(StageError, "stage 0", "micro-batch 0", "module linear"):
        pipe.step(X.double())

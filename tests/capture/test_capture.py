"""Capture: the program is the model, with its names, flags, gradients and buffers, and the model stays as it was."""

from __future__ import annotations

import itertools
import warnings
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as hf
from support.models.zoo import CASES
from support.oracles.one_process import gradient_error, gradients_of
from support.oracles.stages_in_process import inputs_of, plan_for, replay, slices
from torch import nn
from torch.nn import functional as F

from autopart.batch.batch import flatten
from autopart.capture import CaptureCache, capture
from autopart.capture.python.guards import CaptureWarning
from autopart.capture.trace import lower
from autopart.capture.trace.functional import functional_graph
from autopart.ir.graph import Size
from autopart.rng import keyed


class Two(nn.Module):
    """Two linear layers, BatchNorm and a buffer; `body` is what forward does."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))
        self.body = body

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.body(self, *args, **kwargs)


def rows(count: int = 6, seed: int = 3) -> torch.Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))


def assert_exact(body: Any, batch: Any, places: int = 4) -> None:
    """Loss, gradients and buffers of the plain model, whole and cut at several places."""
    plain = Two(body)
    args, kwargs = (batch if isinstance(batch, tuple) else (batch,), {}) if not isinstance(batch, dict) else ((), batch)
    loss = plain(*args, **kwargs)
    loss.backward()
    expected, buffers = gradients_of(plain), dict(plain.named_buffers())
    captured = capture(Two(body), flatten(batch))
    count = len(captured.graph.ops)
    for place in range(0, count, max(1, count // places)):
        plan = plan_for(captured.graph, slices(captured.graph, [place] if place else []))
        found = replay(captured, plan, [inputs_of(captured, batch)])
        assert found.loss.item() == pytest.approx(loss.item(), rel=1e-6)
        error, worst = gradient_error({n: found.gradients.get(n) for n in expected}, expected)
        assert error <= 1e-5, worst
        for name, value in found.buffers.items():
            torch.testing.assert_close(value, buffers[name], rtol=1e-6, atol=0)


# -- gradients that flow, and that must not ----------------------------------------------------------------------


def no_grad_product(m, x):
    with torch.no_grad():
        factor = m.second(x)
    return (m.first(x) * factor).sum()


def no_grad_alias(m, x):
    hidden = m.first(x)
    with torch.no_grad():
        same = hidden
    return (m.second(hidden) * same).sum()


def no_grad_weight(m, x):
    with torch.no_grad():
        weight = m.second.weight.t()
    return (m.first(x) @ weight).sum()


@torch.no_grad()
def target(m, x):
    return m.second(x)


def decorated(m, x):
    return (m.first(x) * target(m, x)).sum()


def enabled_again(m, x):
    with torch.no_grad():
        base = m.second(x) * 2
        with torch.enable_grad():
            inner = m.first(base)
        outer = inner * 2
    return (m.second(outer) + inner).sum()


def straight_through(m, x):
    hidden = m.first(x)
    return m.second(hidden + (hidden.round() - hidden).detach()).sum()


def gradient_inside(m, x):
    hidden = m.first(x)
    (inner,) = torch.autograd.grad(hidden.pow(2).sum(), m.first.weight, create_graph=True)
    return (m.second(hidden) * inner.sum()).sum()


def autocast_inside(m, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = m.first(x)
    return m.second(hidden.float()).sum()


def integers(m, x):
    values, order = m.first(x).sort(1)
    return (m.second(values) * order).sum()


def complex_numbers(m, x):
    spectrum = torch.view_as_real(torch.fft.rfft(m.first(x)))
    return m.second(spectrum.reshape(x.shape[0], -1)[:, :4]).sum()


def in_place_on_views(m, x):
    hidden = m.first(x).clone()
    hidden[:, :2].mul_(3)
    hidden[:, 1] = 0
    hidden += 1
    return m.second(hidden).sum()


@torch.jit.script
def looped(x):
    for i in range(3):
        x = x * 2 + i
    return x


def scripted(m, x):
    return m.second(looped(m.first(x))).sum()


@pytest.mark.parametrize(
    "body",
    [
        no_grad_product, no_grad_alias, no_grad_weight, decorated, enabled_again, straight_through, gradient_inside,
        autocast_inside, integers, complex_numbers, in_place_on_views, scripted,
    ],
    ids=lambda body: body.__name__,
)  # fmt: skip
def test_gradients_are_the_plain_models(body):
    assert_exact(body, rows())


# -- buffers -----------------------------------------------------------------------------------------------------


def batch_norm(m, x):
    return m.second(m.norm(m.first(x))).pow(2).sum()


def running_mean(m, x):
    hidden = m.first(x - m.mean)
    m.mean.mul_(0.9).add_(hidden.mean(0).detach(), alpha=0.1)
    return m.second(hidden - m.mean).sum()


def assigned(m, x):
    hidden = m.first(x - m.mean)
    m.mean = hidden.mean(0).detach()
    return m.second(hidden).sum()


def copied_input(m, x):
    m.mean.copy_(x[0])
    return m.second(m.first(x)).sum()


@pytest.mark.parametrize("body", [batch_norm, assigned, copied_input], ids=lambda body: body.__name__)
def test_buffers_end_as_the_plain_models(body):
    assert_exact(body, rows(), places=1)


def test_a_buffer_can_take_over_an_input_as_it_is():
    def body(m, x, vector):
        m.mean.copy_(vector)
        return m.second(m.first(x)).sum()

    for vector in (torch.arange(4.0), torch.arange(4), torch.tensor(2.0)):  # as it is, converted, spread
        assert_exact(body, (rows(), vector), places=1)


@pytest.mark.parametrize("body", [batch_norm, running_mean, assigned], ids=lambda body: body.__name__)
def test_each_micro_batch_sees_the_buffers_that_the_one_before_left(body):
    plain, model = Two(body), Two(body)
    pieces = [rows(4, seed) for seed in (1, 2, 3)]
    loss = sum(plain(piece) for piece in pieces)
    loss.backward()
    captured = capture(model, flatten(pieces[0]))
    found = replay(
        captured, plan_for(captured.graph, slices(captured.graph, []), 3), [inputs_of(captured, p) for p in pieces]
    )
    assert found.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    error, worst = gradient_error({n: found.gradients.get(n) for n in gradients_of(plain)}, gradients_of(plain))
    assert error <= 1e-5, worst
    expected = dict(plain.named_buffers())
    for name, value in found.buffers.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)


def test_capture_leaves_parameters_buffers_flags_and_attributes_alone():
    model = Two(batch_norm)
    model.norm.eval()
    model.first.bias.requires_grad_(False)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    flags = {n: m.training for n, m in model.named_modules()}
    attributes = {n: set(vars(m)) for n, m in model.named_modules()}
    state = torch.get_rng_state()
    for mode in ("step", "loss", "predict"):
        capture(model, flatten(rows()), mode=mode)
    assert {n: m.training for n, m in model.named_modules()} == flags
    assert {n: set(vars(m)) for n, m in model.named_modules()} == attributes
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None and type(p) is nn.Parameter for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


# -- inputs ------------------------------------------------------------------------------------------------------


def of_dict(m, x, extra=None, scale=2):
    hidden = m.first(x["left"]) + x["more"][0] + (0 if extra is None else extra)
    return (m.second(hidden) * scale * x["more"][1]["right"]).sum()


@pytest.mark.parametrize("container", [dict, OrderedDict, hf.BatchEncoding, hf.utils.ModelOutput])
def test_nested_containers_numbers_and_none_go_in_as_they_are(container):
    inner = container({"left": rows(), "more": (rows(6, 4), {"right": rows(6, 5)})})
    assert_exact(of_dict, {"x": inner, "extra": None, "scale": 3}, places=1)


def test_a_batch_encoding_is_a_batch():
    case = CASES["bert"]
    encoded = hf.BatchEncoding(case.data(4))
    names = capture(case.model(), flatten(encoded)).graph.inputs
    assert names == ("input.input_ids", "input.attention_mask", "input.labels")


def doubled(m, a, b):
    return (m.first(a) * m.second(b)).sum()


def test_one_tensor_in_two_arguments_stays_two_inputs():
    x = rows()
    assert_exact(doubled, (x, x), places=2)
    captured = capture(Two(doubled), flatten((x, x)))
    assert captured.graph.inputs == ("input.arg0", "input.arg1")
    other = rows(6, 9)  # the program must not take the two for one
    plain = Two(doubled)
    found = replay(
        captured,
        plan_for(captured.graph, slices(captured.graph, [])),
        [dict(zip(captured.graph.inputs, (x, other), strict=True))],
    )
    assert found.loss.item() == pytest.approx(plain(x, other).item(), rel=1e-6)


def test_an_input_that_nothing_reads_is_still_accepted():
    assert_exact(lambda m, x, unused: m.second(m.first(x)).sum(), (rows(), rows()), places=1)


def test_single_row_micro_batches_run_the_program_of_larger_ones():
    model = Two(lambda m, x: m.second(m.first(x)).mean())
    capturer = CaptureCache(model)
    batch = flatten(rows(4))
    one, two = capturer(batch, Size(1)), capturer(batch, Size(2))
    assert one.graph.structure_digest() == two.graph.structure_digest()
    assert one.graph.rows == 1


# -- the short way to a functional program -----------------------------------------------------------------------

QUICK = (("llama", "predict"),)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow)
        for case in itertools.product(CASES, ("step", "predict"))
    ],
)
def test_each_distinct_op_decomposed_once_gives_what_decomposing_the_program_gives(name, mode, monkeypatch):
    model, batch = CASES[name].model(dropout=0.1), flatten(CASES[name].data(2))
    graphs: list[Any] = []
    monkeypatch.setattr(
        lower, "functional_graph", lambda program: graphs.append(functional_graph(program)) or graphs[-1]
    )
    short = capture(model, batch, mode=mode)
    assert (graphs[0] is None) == (name in ("t5", "resnet", "mixtral"))  # these change tensors in place
    monkeypatch.setattr(lower, "functional_graph", lambda program: None)
    long = capture(model, batch, mode=mode)
    bare = [replace(c.graph, ops=(), params=tuple(sorted(c.graph.params, key=str))) for c in (short, long)]
    assert bare[0] == bare[1]
    for mine, other in zip(short.graph.ops, long.graph.ops, strict=True):
        assert replace(mine, where="") == replace(other, where="")
        assert mine.where == other.where or not other.where  # decomposing forgets the line of ops under no_grad
    for node, like in zip(*([n for n in c.module.graph.nodes if "call" in n.op] for c in (short, long)), strict=True):
        assert (node.name, str(node.args), str(node.kwargs)) == (like.name, str(like.args), str(like.kwargs))
        if isinstance(like.meta.get("val"), torch.Tensor):
            assert node.meta["val"].stride() == like.meta["val"].stride()


# -- names, places, randomness -----------------------------------------------------------------------------------


def test_ops_know_the_module_and_the_line_they_come_from():
    graph = capture(Two(batch_norm), flatten(rows())).graph
    linear = next(op for op in graph.ops if op.module == "first")
    assert linear.target == "aten.linear.default"
    file, _, line = linear.where.rpartition(":")
    assert file == __file__ and int(line) > 0


def test_random_ops_draw_by_key_and_deterministic_ones_are_left_alone():
    def body(m, x):
        hidden = F.dropout(m.first(x), 0.5)
        hidden = F.dropout(hidden, 0.0) + F.dropout(hidden, 0.5, training=False)
        return (m.second(hidden) + torch.rand(4)).sum()

    captured = capture(Two(body), flatten(rows()))
    keys = [n.args[1] for n in captured.module.graph.nodes if n.target is keyed]
    assert keys == [0, 1]
    assert [op.target for op in captured.graph.ops if op.random] == ["aten.native_dropout.default", "aten.rand.default"]


def test_reentrant_gradient_checkpointing_is_warned_of_and_exact():
    def body(m, x):
        return torch.utils.checkpoint.checkpoint(m.second, m.first(x), use_reentrant=True).sum()

    with pytest.warns(CaptureWarning, match="gradient checkpointing"):
        capture(Two(body), flatten(rows()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        assert_exact(body, rows())


def test_a_tensor_that_forward_keeps_in_an_attribute_is_warned_of():
    def body(m, x):
        m.seen = m.first(x)
        return m.second(m.seen).sum()

    with pytest.warns(CaptureWarning, match="attribute seen"):
        capture(Two(body), flatten(rows()))


def test_an_assignment_into_a_view_keeps_the_gradient_of_what_is_assigned():
    def body(m, x):
        hidden = m.first(x).clone()
        hidden[:, :2] *= 2
        hidden[:, 2:] = m.second(x)[:, :1]
        hidden[0] = 1
        return m.second(hidden).pow(2).sum()

    assert_exact(body, rows())

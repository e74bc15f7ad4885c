"""`compile(..., weights=)` of a model on the meta device, in one process: values, state, and what is refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import autopart
from autopart.ir.errors import CheckpointError, RefusedError, UsageError

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
OPTIONS = {"sample": X, "micro_batches": 2, "costs": "analytic"}


class Net(nn.Module):
    """Has a layer that no stage uses, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.unused = nn.Linear(6, 6), nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("shift", torch.empty(6), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.shift.copy_(torch.linspace(0, 1, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.norm(self.body(x)) + self.shift).square().mean()


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Net()


@pytest.fixture
def whole(tmp_path) -> nn.Module:
    model = Net()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    return model


def test_training_saving_and_loading_equal_those_of_the_whole_model(tmp_path, whole) -> None:
    model = on_meta()
    with autopart.compile(model, "cpu:1", weights=tmp_path, **OPTIONS) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        loss = pipe.step(X)
        optimizer.step()
        state = dict(pipe.state_dict())
        folder = pipe.save(tmp_path / "run", optimizer)
        pipe.load(folder, optimizer)
    expected = whole.state_dict()
    with autopart.compile(whole, "cpu:1", **OPTIONS) as pipe:
        assert torch.equal(pipe.step(X), loss)
        torch.optim.SGD(pipe.parameters(), lr=0.1).step()
        assert all(torch.equal(state[name], value) for name, value in pipe.state_dict().items())
    assert state.keys() == expected.keys()
    other = Net()
    autopart.load_into(other, tmp_path / "run")
    assert all(torch.equal(state[name], value) for name, value in other.state_dict().items())
    with autopart.compile(on_meta(), "cpu:1", weights=tmp_path / "run", **OPTIONS) as pipe:
        assert all(torch.equal(state[name], value) for name, value in pipe.state_dict().items())


def test_a_state_can_be_loaded_and_the_model_stays_without_values(whole) -> None:
    model = on_meta()
    with autopart.compile(model, "cpu:1", weights="init", **OPTIONS) as pipe:
        pipe.load_state_dict(whole.state_dict())
        assert all(torch.equal(pipe.state_dict()[name], value) for name, value in whole.state_dict().items())
        assert torch.equal(dict(pipe.named_buffers())["shift"], whole.shift)
        for call in (pipe.sync_model, lambda: pipe.full_parameters().__enter__()):
            with pytest.raises(UsageError, match=r"body\.weight is on the meta device in the model"):
                call()
        pipe.step(X)
    assert model.body.weight.is_meta and model.norm.running_mean.is_meta


def test_tensors_with_values_keep_them(tmp_path, whole) -> None:
    model = on_meta()
    model.shift = torch.full((6,), 3.0)
    with autopart.compile(model, "cpu:1", weights=tmp_path, **OPTIONS) as pipe:
        assert torch.equal(dict(pipe.named_buffers())["shift"], torch.full((6,), 3.0))
        assert torch.equal(pipe.state_dict()["body.weight"], whole.body.weight)


def test_the_plan_is_that_of_the_whole_model(whole) -> None:
    plan = autopart.plan(whole, "cpu:2", **OPTIONS)
    with autopart.compile(on_meta(), "cpu:1", weights="init", **OPTIONS) as pipe:
        assert pipe.plan.provenance.graph_digest == autopart.plan(whole, "cpu:1", **OPTIONS).provenance.graph_digest
    assert plan.stages


def test_what_does_not_go_together_is_refused(tmp_path, whole) -> None:
    with pytest.raises(UsageError, match=r"(?s)body\.weight is on the meta device: .*weights="):
        autopart.compile(on_meta(), "cpu:1", **OPTIONS)
    with pytest.raises(UsageError, match="compile was given no sample"):
        autopart.compile(on_meta(), "cpu:1", weights="init")
    with pytest.raises(UsageError, match="the model has values already"):
        autopart.compile(whole, "cpu:1", weights="init", **OPTIONS)
    with pytest.raises(UsageError, match="no model to compare with"):
        autopart.verify(on_meta(), "cpu:1", weights="init", **OPTIONS)
    with pytest.raises(UsageError, match="weights is 3"):
        autopart.compile(on_meta(), "cpu:1", weights=3, **OPTIONS)
    with pytest.raises(CheckpointError, match="holds no weights"):
        autopart.compile(on_meta(), "cpu:1", weights=tmp_path / "nothing", **OPTIONS)


class Unset(Net):
    """Has a buffer that is in no file and that nothing sets."""

    def reset_parameters(self) -> None:
        pass


def test_a_buffer_that_nothing_sets_is_refused_before_anything_is_planned(tmp_path, whole) -> None:
    with torch.device("meta"):
        model = Unset()
    with pytest.raises(RefusedError, match=r"shift has no value, and no initialisation of the model sets it"):
        autopart.compile(model, "cpu:1", weights=tmp_path, **OPTIONS)


class Attribute(Net):
    """Reads a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.table)


def test_a_tensor_that_is_neither_parameter_nor_buffer_is_refused(tmp_path, whole) -> None:
    with torch.device("meta"):
        model = Attribute()
    with pytest.raises(RefusedError, match=r"table"):
        autopart.compile(model, "cpu:1", weights=tmp_path, **OPTIONS)


class Sorting(Net):
    """Sorts its rows, so that numbers have to show whether rows stay apart."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = self.body(x)[:, 0].argsort()
        return self.body(x[order][order.argsort()]).square().mean(1).sum()


def test_what_only_numbers_could_show_is_refused(tmp_path, whole) -> None:
    with torch.device("meta"):
        model = Sorting()
    with pytest.raises(RefusedError, match=r"(?s)rows of a batch are independent.*the model is on the meta device"):
        autopart.compile(model, "cpu:1", weights=tmp_path, **OPTIONS)
    with autopart.compile(model, "cpu:1", weights=tmp_path, **{**OPTIONS, "micro_batches": 1}) as pipe:
        assert pipe.step(X).isfinite()


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="needs a later torch")
def test_a_model_in_fp32_gets_the_masters_of_a_checkpoint_in_bf16(tmp_path) -> None:
    with torch.device("meta"):
        half = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1)).bfloat16()
        wide = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))
    options = {"sample": (X, X[:, :1]), "loss_fn": lambda y, t: (y.float() - t).square().mean(), "micro_batches": 2}
    half_batch = {**options, "sample": (X.bfloat16(), X[:, :1]), "master_weights": True}
    with autopart.compile(half, "cpu:1", weights="init", costs="analytic", **half_batch) as pipe:
        optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-3)
        pipe.step((X.bfloat16(), X[:, :1]))
        optimizer.step()
        masters = {name: master.detach().clone() for name, master in pipe.named_parameters()}
        pipe.save(tmp_path, optimizer)
    with autopart.compile(wide, "cpu:1", weights=tmp_path, costs="analytic", **options) as pipe:
        found = dict(pipe.named_parameters())
        assert all(torch.equal(found[name], master) for name, master in masters.items())
    assert not torch.equal(masters["0.weight"], masters["0.weight"].bfloat16().float())


class Learned(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(1, 1)

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.scale((output - target).square().mean().reshape(1)).sum()


def test_parameters_of_the_loss_function_get_values_too() -> None:
    with torch.device("meta"):
        model, loss_fn = nn.Linear(6, 6), Learned()
    options = {"sample": (X, X), "loss_fn": loss_fn, "micro_batches": 1, "costs": "analytic"}
    with autopart.compile(model, "cpu:1", weights="init", **options) as pipe:
        state = pipe.state_dict()
        loss = pipe.step((X, X))
    plain = nn.Linear(6, 6), Learned()
    plain[0].load_state_dict({name: state[name] for name in ("weight", "bias")})
    plain[1].load_state_dict({f"scale.{name}": state[f"loss_fn.scale.{name}"] for name in ("weight", "bias")})
    assert torch.allclose(plain[1](plain[0](X), X).detach(), loss, rtol=1e-6)

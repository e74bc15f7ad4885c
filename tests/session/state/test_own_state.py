"""Parameters, saved buffers and extra state by their own names, in one process: files, hooks, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import autopart
from autopart.ir.errors import CheckpointError, RefusedError, UsageError

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
OPTIONS: dict[str, Any] = {"sample": X, "micro_batches": 2, "costs": "analytic"}


class Layer(nn.Linear):
    """Has extra state."""

    def __init__(self, width: int = 6) -> None:
        super().__init__(width, width)
        self.amax: Any = torch.ones(2)

    def get_extra_state(self) -> Any:
        return self.amax

    def set_extra_state(self, state: Any) -> None:
        self.amax = state


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


class Earlier(Net):
    """Is saved as earlier releases saved a model like `Net`: extra state among the weights, and what hooks add."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.body.register_buffer("_extra_state", torch.full((2,), 5.0))
        self.register_buffer("added", torch.zeros(1))


def test_checkpoints_of_earlier_releases_load_with_their_extra_state(tmp_path: Path) -> None:
    old = Earlier()
    autopart.save_from(old, tmp_path)
    for load in ("plain", "pipe"):
        model = Net()
        model._register_state_dict_hook(lambda m, state, prefix, _: state.update({f"{prefix}added": torch.zeros(1)}))
        if load == "plain":
            autopart.load_into(model, tmp_path)
        else:
            with autopart.compile(model, "cpu:1", **OPTIONS) as pipe:
                pipe.load(tmp_path)
        assert torch.equal(model.body.weight, old.body.weight) and model.body.amax.tolist() == [5.0, 5.0]
    other = Net()
    with pytest.raises(CheckpointError, match="added is not in the model"):
        autopart.load_into(other, tmp_path)


class Opaque:
    """Neither JSON nor a tensor."""


def test_extra_state_that_no_file_can_hold_is_refused_by_name_and_weights_come_home(tmp_path: Path) -> None:
    model = Net()
    model.body.amax = {"scale": [1.0, Opaque()]}
    before = model.body.weight.detach().clone()
    with autopart.compile(model, "cpu:1", **OPTIONS) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        pipe.step(X)
        optimizer.step()
        assert isinstance(pipe.state_dict()["body._extra_state"]["scale"][1], Opaque)
        with pytest.raises(CheckpointError, match=r"extra state of module body\.scale\[1\] cannot be saved.*Opaque"):
            pipe.save(tmp_path)
        pipe.sync_model()
        model.body.amax = {"scale": [1.0, torch.arange(3)]}  # as the advice says
        pipe.save(tmp_path)
    assert not torch.equal(model.body.weight, before)
    other = Net()
    autopart.load_into(other, tmp_path)
    assert other.body.amax["scale"][1].tolist() == [0, 1, 2] and torch.equal(other.body.weight, model.body.weight)
    with pytest.raises(CheckpointError, match="cannot be saved"):
        model.body.amax = Opaque()
        autopart.save_from(model, tmp_path)


def test_extra_state_of_another_model_is_named_and_nothing_is_loaded(tmp_path: Path) -> None:
    autopart.save_from(nn.Sequential(nn.Linear(6, 6)), tmp_path / "without")
    autopart.save_from(nn.Sequential(Layer()), tmp_path / "with")
    for model, folder, says in ((Layer(), "without", "is missing"), (nn.Linear(6, 6), "with", "is not in the model")):
        whole = nn.Sequential(model)
        before = model.weight.detach().clone()
        with pytest.raises(CheckpointError, match=f"extra state of module 0 {says}"):
            autopart.load_into(whole, tmp_path / folder)
        assert torch.equal(model.weight, before)


class GetOnly(Layer):
    set_extra_state = nn.Module.set_extra_state


def test_extra_state_that_cannot_be_given_back_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="module 0 has get_extra_state and no set_extra_state"):
        autopart.save_from(nn.Sequential(GetOnly()), tmp_path)


def test_what_a_model_does_after_a_load_is_done(tmp_path: Path) -> None:
    model = nn.Linear(6, 6)
    autopart.save_from(model, tmp_path)
    other: Any = nn.Linear(6, 6)
    other.register_load_state_dict_post_hook(lambda module, _: setattr(module, "norm", module.weight.norm().item()))
    autopart.load_into(other, tmp_path)
    assert other.norm == model.weight.norm().item()


def _merged(module: Any, state: Any, prefix: str, *_: Any) -> None:
    state[f"{prefix}weight"] = torch.cat([state.pop(f"{prefix}{part}") for part in "qk"])


class Halves(nn.Module):
    """Saves one weight as two."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6, bias=False)
        self.body._register_state_dict_hook(
            lambda m, s, p, _: s.update(zip([f"{p}q", f"{p}k"], s.pop(f"{p}weight").clone().chunk(2), strict=True))
        )
        self.body.register_load_state_dict_pre_hook(_merged)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


def test_files_that_need_the_models_own_loading_are_refused_and_the_advice_works(tmp_path: Path) -> None:
    whole = Halves()
    save_file({name: value.contiguous() for name, value in whole.state_dict().items()}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Halves()
    with pytest.raises(
        RefusedError, match=r"(?s)would not go through the loading of the model.*module body.*save_from"
    ):
        autopart.compile(model, "cpu:1", weights=tmp_path / "model.safetensors", **OPTIONS)
    autopart.save_from(whole, tmp_path / "own")
    with autopart.compile(model, "cpu:1", weights=tmp_path / "own", **OPTIONS) as pipe:
        assert dict(pipe.state_dict()).keys() == {"body.q", "body.k"}
        assert torch.equal(dict(pipe.named_parameters())["body.weight"], whole.body.weight)
        pipe.load_state_dict({name: torch.zeros_like(value) for name, value in whole.state_dict().items()})
        assert not dict(pipe.named_parameters())["body.weight"].any()


class Renaming(Halves):
    """Takes an older name too, as some models of transformers do."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.body = nn.Linear(6, 6, bias=False)
        self.body.register_load_state_dict_pre_hook(_renamed)


def _renamed(module: Any, state: Any, prefix: str, *_: Any) -> None:
    if f"{prefix}kernel" in state:
        state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")


def test_a_hook_that_changes_no_present_name_refuses_no_files(tmp_path: Path) -> None:
    whole = Renaming()
    save_file(whole.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Renaming()
    with autopart.compile(model, "cpu:1", weights=tmp_path / "model.safetensors", **OPTIONS) as pipe:
        assert torch.equal(pipe.state_dict()["body.weight"], whole.body.weight)
        pipe.load_state_dict({"body.kernel": torch.zeros(6, 6)})  # as plain torch takes it
        assert not pipe.state_dict()["body.weight"].any()
    assert model.body.weight.is_meta


def test_a_state_that_the_models_own_loading_does_not_take_changes_nothing() -> None:
    model = Halves()
    with autopart.compile(model, "cpu:1", **OPTIONS) as pipe:
        before = {name: value.clone() for name, value in pipe.state_dict().items()}
        with pytest.raises(UsageError, match="own load_state_dict does not take this state"):
            pipe.load_state_dict({"body.q": torch.zeros(3, 6), "body.k": torch.zeros(3, 6), "more": torch.zeros(1)})
        assert all(torch.equal(before[name], value) for name, value in pipe.state_dict().items())


def test_what_a_hook_adds_to_a_state_is_not_saved_and_a_warning_names_it(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Flatten(0))
    model._register_state_dict_hook(lambda m, state, prefix, _: state.update({f"{prefix}version": torch.ones(1)}))
    with pytest.warns(UserWarning, match="does not keep version, which the model's state_dict"):
        autopart.save_from(model, tmp_path)
    batch = {**OPTIONS, "sample": (X, X.flatten()), "loss_fn": nn.functional.mse_loss, "micro_batches": 1}
    with autopart.compile(model, "cpu:1", **batch) as pipe:
        assert "version" in pipe.state_dict()
        with pytest.warns(UserWarning, match="does not keep version"):
            pipe.save(tmp_path / "piped")
    autopart.load_into(model, tmp_path / "piped")

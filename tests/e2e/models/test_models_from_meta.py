"""Models on the meta device: each rank makes its own part, and the step is that of the whole model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from support.models.zoo import CASES
from torch import nn

import autopart
from autopart.capture.trained import Trained
from autopart.extras.weights.initial import initial_values

ROWS = 8


def built(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model of the zoo, without dropout, and its batch."""
    from support.models.zoo import CASES

    case = CASES[name]
    return case.model(), case.data(ROWS)


def on_meta(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return the same model without values, and its batch."""
    with torch.device("meta"):
        model = built(name)[0]
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return model, built(name)[1]


def stepped(
    name: str,
    weights: str,
    options: Mapping[str, Any],
    world: int,
    folder: str = "",
    other: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Take training steps of a model from the meta device.

    Returns the loss and the gradients of the first, the state before it and after the optimizer's step, and this rank's
    buffers at first.  folder: where the pipe is saved after it.  other: options of a plan that a second step runs
    under, after which `again` is the loss in eval mode."""
    model, batch = on_meta(name)
    with autopart.compile(model, f"cpu:{world}", sample=batch, weights=weights, cache=False, **options) as pipe:
        state, buffers = pipe.state_dict(), {name: buffer.clone() for name, buffer in pipe.named_buffers()}
        loss, gradients = float(pipe.step(batch)), pipe.gradients()
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        optimizer.step()
        after, again = pipe.state_dict(), 0.0
        if folder:
            pipe.save(folder, optimizer)
        if other is not None:
            pipe.adopt(autopart.plan(built(name)[0], f"cpu:{world}", sample=batch, **other), optimizer)
            optimizer.zero_grad()
            pipe.step(batch)
            optimizer.step()
            again = float(pipe.eval_loss(batch))
    return {
        "loss": loss, "gradients": gradients, "state": state, "buffers": buffers, "after": after, "again": again
    }  # fmt: skip


def plain(name: str, state: Mapping[str, torch.Tensor], micros: int = 1) -> dict[str, Any]:
    """Take the same steps of the whole model with the values of a state, in one process, over so many micro-batches
    where batch statistics couple the rows."""
    model, batch = built(name)
    model.load_state_dict(dict(state))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for micro in range(micros):
            part = {k: v.chunk(micros)[micro] if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
            loss = model(**part).loss / micros
            loss.backward()
            total += loss.item()
        return total

    loss = step()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    after = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    step()
    optimizer.step()
    with torch.no_grad():
        again = model.eval()(**batch).loss.item()
    return {"loss": loss, "gradients": gradients, "after": after, "buffers": buffers, "again": again}


def own_files(folder: str) -> str:
    """Compile on two ranks, each with the weights of its own folder; returns what is raised."""
    model, batch = on_meta("llama_tied")
    options = {"stages": 1, "replicas": 2, "micro_batches": 2, "costs": "analytic"}
    try:
        with autopart.compile(model, "cpu:2", sample=batch, weights=f"{folder}/{os.environ['RANK']}", **options):
            return ""
    except autopart.AutopartError as error:
        return str(error)


# -- tests -----------------------------------------------------------------------------------------------------------


TWO_STAGES = {"stages": 2, "micro_batches": 2}


@pytest.mark.parametrize("source", ["files", pytest.param("init", marks=pytest.mark.slow)])
def test_a_step_from_the_meta_device_equals_that_of_the_whole_model(pair, tmp_path, source):
    whole, _ = built("llama_tied")
    whole.save_pretrained(tmp_path)
    results = pair.run(stepped, "llama_tied", str(tmp_path) if source == "files" else "init", TWO_STAGES, 2)
    expected = plain("llama_tied", results[0]["state"])
    for found in results:
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        for name, gradient in expected["gradients"].items():
            torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(found["after"][name], expected["after"][name], rtol=1e-4, atol=1e-6)
        assert all(torch.equal(buffer, expected["buffers"][name]) for name, buffer in found["buffers"].items())
        if source == "files":
            assert all(torch.equal(found["state"][name], value) for name, value in whole.state_dict().items())
    assert any(found["buffers"] for found in results)


@pytest.mark.parametrize("name", CASES)
def test_the_initialisation_of_a_model_is_its_own(name):
    whole = CASES[name].model()
    with torch.device("meta"):
        model = Trained(CASES[name].model())
    wanted = {name: t for pairs in (model.named_parameters(), model.named_buffers()) for name, t in pairs}
    made = initial_values(model, wanted, 0, torch.device("cpu"))
    half = initial_values(model, {name: wanted[name] for name in list(wanted)[::2]}, 0, torch.device("cpu"))
    assert all(torch.equal(made[name], value) for name, value in half.items())
    for name, buffer in whole.named_buffers():
        assert torch.equal(made[name], buffer), name
    for name, parameter in whole.named_parameters():
        found, expected = made[name].detach(), parameter.detach()
        if expected.numel() == 1 or not expected.std():
            assert torch.equal(found, expected), name
        elif expected.numel() > 100:
            assert 0.8 < float(found.std() / expected.std()) < 1.25, name


REPLICAS = {"stages": 2, "replicas": 2, "zero": 1, "micro_batches": 2, "sync_batchnorm": True}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama_tied", "bert", "t5", "vit", "resnet"])
def test_values_do_not_depend_on_the_plan_and_training_goes_on_under_another(workers, tmp_path, name):
    other = {"stages": 4, "micro_batches": 2, "zero": 0, "sync_batchnorm": True}
    run = partial(stepped, folder=str(tmp_path), other=other)
    found = workers.run(run, name, "init", REPLICAS, 4)
    alone = workers.run(stepped, name, "init", {"stages": 1, "replicas": 1, "micro_batches": 2}, 4)
    state = found[0]["state"]
    assert all(torch.equal(alone[0]["state"][key], value) for key, value in state.items())
    expected = plain(name, state, 2 if CASES[name].coupled else 1)
    assert found[0]["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    for key, gradient in expected["gradients"].items():
        torch.testing.assert_close(found[0]["gradients"][key], gradient, rtol=2e-3, atol=2e-5)
    for key, value in expected["after"].items():
        torch.testing.assert_close(found[0]["after"][key], value, rtol=1e-3, atol=1e-5)
    for each in found:
        assert each["again"] == pytest.approx(expected["again"], rel=2e-3)
        assert all(torch.equal(buffer, expected["buffers"][key]) for key, buffer in each["buffers"].items())
    again = workers.run(stepped, name, str(tmp_path), other, 4)
    assert all(torch.equal(again[0]["state"][key], value) for key, value in found[0]["after"].items())


@pytest.mark.slow
def test_files_that_differ_or_fail_on_one_rank_are_refused_on_all(pair, tmp_path):
    whole, _ = built("llama_tied")
    for rank in "01":
        whole.save_pretrained(tmp_path / rank)
        with torch.no_grad():
            whole.model.norm.weight += 1
    for said in pair.run(own_files, str(tmp_path)):
        assert "ranks 0 and 1 got different values of model.norm.weight" in said
    file = tmp_path / "1" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    for said in pair.run(own_files, str(tmp_path)):
        assert "model.safetensors cannot be read" in said and "rank 1" in said

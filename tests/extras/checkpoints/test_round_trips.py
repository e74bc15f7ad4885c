"""Folders of DCP and of Hugging Face, and what plain PyTorch saved, go through pipes and come back to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import trainer_runs
from support.jobs.state.round_trips import (
    Net,
    learner,
    optimizer_of,
    piped_steps,
    plain_steps,
    require_same,
    sharded,
    state_of,
    through_a_pipe,
)
from support.workers import Workers

import autopart
from autopart.extras.checkpoints.convert import convert


@pytest.fixture(scope="module", params=[1, 3], ids=["one rank", "three ranks"])
def ranks(request: pytest.FixtureRequest, own_cache: None) -> Iterator[Workers]:
    with Workers(request.param, timeout=240) as pool:
        yield pool


kept = pytest.mark.parametrize("with_optimizer", [False, True], ids=["weights", "with optimizer"])


@kept
def test_a_sharded_run_of_dcp_goes_through_a_pipe_and_back(
    ranks: Workers, tmp_path: Path, with_optimizer: bool
) -> None:
    expected = ranks.run(sharded, str(tmp_path / "dcp"), 1, False, with_optimizer)[0]
    convert(tmp_path / "dcp", tmp_path / "run", optimizer="AdamW" if with_optimizer else "", step=2)
    sample = torch.randn(8, 4)
    ranks.run(through_a_pipe, Net(), sample, str(tmp_path / "run"), str(tmp_path / "saved"), with_optimizer)
    convert(tmp_path / "saved", tmp_path / "back")
    found = ranks.run(sharded, str(tmp_path / "back"), 2, True, with_optimizer)[0]
    assert ("optim" in found) == with_optimizer
    require_same(expected, found)


def tiny(seed: int) -> tuple[Any, torch.optim.Optimizer]:
    """Return a model of transformers after two steps, and its optimizer."""
    torch.manual_seed(seed)
    model = trainer_runs.Tiny(trainer_runs.TinyConfig())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed)
    for _ in range(2):
        optimizer.zero_grad()
        model(**rows())["loss"].backward()
        optimizer.step()
    return model, optimizer


def rows() -> dict[str, torch.Tensor]:
    lines = trainer_runs.Lines(6)
    return {"input_ids": lines.ids, "labels": lines.labels}


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a folder that has them in several files."""
    files = [load_file(file) for file in folder.glob("*.safetensors")]
    assert len(files) > 2
    return {name: tensor for file in files for name, tensor in file.items()}


@kept
def test_a_folder_of_hugging_face_goes_through_a_pipe_and_back(
    ranks: Workers, tmp_path: Path, with_optimizer: bool
) -> None:
    """The format has no place for an optimizer: its state lies beside the weights, and its loaders ignore it."""
    model, optimizer = tiny(1)
    model.save_pretrained(tmp_path / "hub", max_shard_size=500)
    if with_optimizer:
        autopart.save_from(model, tmp_path / "run", optimizer, step=2)
    else:
        convert(tmp_path / "hub", tmp_path / "run")
    ranks.run(through_a_pipe, tiny(2)[0], rows(), str(tmp_path / "run"), str(tmp_path / "out"), with_optimizer)
    found = trainer_runs.Tiny.from_pretrained(autopart.latest(tmp_path / "out"))
    found.save_pretrained(tmp_path / "back", max_shard_size=500)
    require_same(weights_of(tmp_path / "hub"), weights_of(tmp_path / "back"))
    if with_optimizer:
        other, its = tiny(3)
        autopart.load_into(other, tmp_path / "out", its)
        require_same(state_of(model, optimizer), state_of(other, its))


def test_what_torch_saved_goes_on_in_a_pipe_and_back_as_if_there_were_none(ranks: Workers, tmp_path: Path) -> None:
    expected = plain_steps(tmp_path / "whole.pt", range(9))
    file, folder = tmp_path / "run.pt", tmp_path / "run"
    found = plain_steps(file, range(3))

    net, _ = learner()
    optimizer = optimizer_of(net.named_parameters())
    state = torch.load(file)
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    autopart.save_from(net, folder, optimizer, step=3)
    found += ranks.run(piped_steps, str(folder), range(3, 6))[0]

    net, _ = learner()
    optimizer = optimizer_of(net.named_parameters())
    autopart.load_into(net, folder, optimizer)
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    found += plain_steps(file, range(6, 9))

    assert len(set(expected)) == 9 and found == pytest.approx(expected, rel=1e-12)
    whole, parts = torch.load(tmp_path / "whole.pt"), torch.load(file)
    assert parts["optimizer"].keys() == whole["optimizer"].keys()
    assert parts["optimizer"]["param_groups"] == whole["optimizer"]["param_groups"]
    torch.testing.assert_close(parts["optimizer"]["state"], whole["optimizer"]["state"], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(parts["model"], whole["model"], rtol=1e-9, atol=1e-12)

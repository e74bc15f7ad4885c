"""Checkpoints go to `torch.distributed.checkpoint` and come back to the bit; a hostile `.metadata` runs nothing."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs.state import checkpoint_jobs as jobs
from support.jobs.state.round_trips import Net, require_same, state_of
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint import state_dict as states

import autopart
from autopart.cli.entry import main
from autopart.extras.checkpoints.convert import convert
from autopart.files.checkpoints.dcp import open_dcp
from autopart.files.checkpoints.document import NAME
from autopart.ir.errors import CheckpointError

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected pickle protocol 4:UserWarning"),
]


def trained(seed: int, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model after some steps, and its optimizer with two groups."""
    torch.manual_seed(seed)
    model = Net()
    matrices = [each for each in model.parameters() if each.dim() > 1]
    vectors = [each for each in model.parameters() if each.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors}], lr=0.01 * seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).backward()
        optimizer.step()
    return model, optimizer


def convert_by_command(source: Path, out: Path, *options: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", "convert", str(source), str(out), *options])
    assert ended.value.code == 0


@pytest.mark.parametrize("optimizer", ["AdamW", "none"])
def test_a_plain_run_goes_in_and_out_to_the_bit(tmp_path: Path, optimizer: str) -> None:
    model, its = trained(1)
    dcp.save(state_of(model, its), checkpoint_id=tmp_path / "dcp", no_dist=True)
    convert_by_command(tmp_path / "dcp", tmp_path / "run", "--optimizer", optimizer, "--step", "2")
    other, second = trained(2)
    if optimizer == "none":
        autopart.load_into(other, tmp_path / "run")
        require_same(dict(model.state_dict()), dict(other.state_dict()))
        return
    autopart.load_into(other, tmp_path / "run", second)
    require_same(state_of(model, its), state_of(other, second))

    convert_by_command(tmp_path / "run", tmp_path / "out")
    third, last = trained(3)
    state = state_of(third, last)
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    states.set_model_state_dict(third, state["model"])
    states.set_optimizer_state_dict(third, last, state["optim"])
    require_same(state_of(model, its), state_of(third, last))


def test_a_checkpoint_comes_back_whole(tmp_path: Path) -> None:
    model = jobs.model(1, torch.bfloat16)
    with autopart.compile(model, "cpu:1", sample=jobs.batch(0), costs="analytic") as pipe:
        optimizer, scheduler = jobs.trainer(pipe)
        averages = autopart.AveragedModel(pipe)
        jobs.train(pipe, optimizer, scheduler, range(3))
        averages.update_parameters()
        first = pipe.save(tmp_path / "run", optimizer, scheduler, {"seen": (1, 2)})
    convert(first, tmp_path / "dcp")
    back, left = convert(tmp_path / "dcp", tmp_path / "again")
    one, other = (json.loads((path / NAME).read_text()) for path in (first, back))
    for each in (one, other):
        del each["files"], each["sha256"]
        each["optimizer"]["tensors"] = {name: sorted(keys) for name, keys in each["optimizer"]["tensors"].items()}
    assert not left and one == other
    for kind in ("weights", "more"):
        found = [getattr(opened_at(path), kind) for path in (first, back)]
        require_same(*({name: each.read(name) for name in each.by_name} for each in found))


def opened_at(path: Path) -> Any:
    from autopart.files.checkpoints.document import read_document
    from autopart.files.checkpoints.tensor_files import opened

    return opened(path, read_document(path))


def test_the_class_of_the_optimizer_has_to_be_said(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    dcp.save(state_of(model, optimizer), checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(autopart.UsageError, match="does not say which optimizer"):
        convert(tmp_path / "dcp", tmp_path / "run")
    with pytest.raises(CheckpointError, match="is a folder of torch") as caught:
        autopart.load_into(model, tmp_path / "dcp")
    assert "autopart checkpoint convert" in caught.value.fix
    dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=tmp_path / "x", no_dist=True)
    with pytest.raises(CheckpointError, match="which is no weight"):
        convert(tmp_path / "x", tmp_path / "run", optimizer="AdamW")


def test_a_sharded_folder_of_hugging_face_goes_in_and_out_to_the_bit(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=16)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "hub", max_shard_size="50KB")
    assert len([*(tmp_path / "hub").glob("model-*.safetensors")]) > 1
    path, left = convert(tmp_path / "hub", tmp_path / "run")
    other, loaded = transformers.GPT2LMHeadModel(config), transformers.GPT2LMHeadModel.from_pretrained(path)
    autopart.load_into(other, tmp_path / "run")
    assert not left
    for found in (other, loaded):
        require_same(dict(model.state_dict()), dict(found.state_dict()))


# ---- what others may have written ------------------------------------------------------------------------------------


class Touch:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_hostile_folder_runs_nothing_and_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    good = tmp_path / "good"
    dcp.save(state_of(model, optimizer), checkpoint_id=good, no_dist=True)
    found = open_dcp(good)
    assert len(found.tensors) > 10 and len(found.objects) > 10

    def changed(name: str, content: bytes) -> Path:
        folder = tmp_path / "bad"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(good, folder)
        (folder / name).write_bytes(content)
        return folder

    about = pickle.loads((good / ".metadata").read_bytes())
    about.planner_data["model.first.bias"] = Touch(tmp_path / "ran")
    for text in (pickle.dumps(about), pickle.dumps(Touch(tmp_path / "ran")), b"", b"\x80\x04."):
        with pytest.raises(CheckpointError, match=r"\.metadata"):
            convert(changed(".metadata", text), tmp_path / "run", optimizer="none")
    (data,) = good.glob("*.distcp")
    hostile = changed(data.name, pickle.dumps(Touch(tmp_path / "ran")) + data.read_bytes()[64:])
    with pytest.raises(CheckpointError, match="cannot be read"):
        convert(hostile, tmp_path / "run", optimizer="AdamW")
    about = pickle.loads((good / ".metadata").read_bytes())
    index = metadata.MetadataIndex("model.first.bias", (0,))
    for path in ("/etc/passwd", "../good/" + data.name):
        about.storage_data[index].relative_path = path
        with pytest.raises(CheckpointError, match="not the name of a file"):
            convert(changed(".metadata", pickle.dumps(about)), tmp_path / "run", optimizer="none")
    about = pickle.loads((good / ".metadata").read_bytes())
    about.state_dict_metadata["model.first.bias"].chunks[0].sizes = torch.Size([3])
    with pytest.raises(CheckpointError, match="do not fill it"):
        convert(changed(".metadata", pickle.dumps(about)), tmp_path / "run", optimizer="none")
    assert not (tmp_path / "ran").exists() and not list((tmp_path / "run").glob("step-*"))

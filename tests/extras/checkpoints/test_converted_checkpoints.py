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
import torch.distributed as dist
from support.jobs.state import checkpoint_jobs as jobs
from support.workers import Workers
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
ROWS = 7


class Net(nn.Module):
    """Layers whose sizes three ranks do not share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, ROWS), nn.BatchNorm1d(ROWS), nn.Linear(ROWS, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).tanh()).square().mean()


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


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state as `torch.distributed.checkpoint` takes it."""
    return {
        "model": states.get_model_state_dict(model),
        "optim": states.get_optimizer_state_dict(model, optimizer),
    }


def flat(state: Any, prefix: str = "") -> dict[str, Any]:
    """Return all leaves of a state by their path."""
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else None
    if items is None:
        return {prefix: state}
    return {name: each for key, value in items for name, each in flat(value, f"{prefix}/{key}").items()}


def require_same(one: Any, other: Any) -> None:
    """Raise AssertionError unless two states are equal to the bit."""
    a, b = flat(one), flat(other)
    assert a.keys() == b.keys()
    for name, value in a.items():
        same = torch.equal(value, b[name]) if isinstance(value, torch.Tensor) else value == b[name]
        assert same, name


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


# ---- several ranks ---------------------------------------------------------------------------------------------------


def sharded(folder: str, seed: int, load: bool) -> dict[str, Any]:
    """Shard a trained model over all ranks with FSDP, save it or load it from a folder; returns its whole state."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    try:
        torch.manual_seed(seed)
        model = Net()
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).backward()
            optimizer.step()
        state = state_of(model, optimizer)
        if load:
            dcp.load(state, checkpoint_id=folder)
            states.set_model_state_dict(model, state["model"])
            states.set_optimizer_state_dict(model, optimizer, state["optim"])
        else:
            dcp.save(state, checkpoint_id=folder)
        whole = states.StateDictOptions(full_state_dict=True)
        return {
            "model": states.get_model_state_dict(model, options=whole),
            "optim": states.get_optimizer_state_dict(model, optimizer, options=whole),
        }
    finally:
        dist.destroy_process_group()


def piped(folder: str, out: str) -> None:
    """Load a checkpoint into a pipe over all ranks, and save it."""
    options: Any = {"sample": torch.randn(8, 4), "costs": "analytic"}
    world = int(os.environ["WORLD_SIZE"])
    with autopart.compile(Net(), f"cpu:{world}", stages=world, micro_batches=2, **options) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.5)
        pipe.load(folder, optimizer)
        pipe.save(out, optimizer)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_sharded_run_goes_through_a_pipe_and_back_to_the_bit(world: int, tmp_path: Path) -> None:
    with Workers(world, timeout=240) as ranks:
        expected = ranks.run(sharded, str(tmp_path / "dcp"), 1, False)[0]
        convert(tmp_path / "dcp", tmp_path / "run", optimizer="AdamW", step=2)
        ranks.run(piped, str(tmp_path / "run"), str(tmp_path / "saved"))
        convert(tmp_path / "saved", tmp_path / "back")
        for found in ranks.run(sharded, str(tmp_path / "back"), 2, True)[:1]:
            require_same(expected, found)

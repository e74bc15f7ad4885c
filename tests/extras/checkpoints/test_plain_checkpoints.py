"""Checkpoints in one process: of plain models, and what is refused of a folder that was changed."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.jobs.state import checkpoint_jobs as jobs
from torch import nn

import autopart
from autopart.files.checkpoints.folders import Root, complete
from autopart.files.checkpoints.tensor_files import open_tensors
from autopart.state.contents import Contents

CUDA_FREE = {"stages": 1, "micro_batches": 2}


def trained(kind: str = "adamw", steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer, object]:
    """Return a plain model after some steps."""
    model = jobs.model(1)
    optimizer, scheduler = jobs.trainer(model, kind)
    for step in range(steps):
        optimizer.zero_grad()
        model(**jobs.batch(step)).backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    """Return all tensors of a model and of its optimizer."""
    found = [*model.state_dict().items()]
    for name, parameter in model.named_parameters():
        found += [(f"{key}/{name}", value) for key, value in sorted(optimizer.state.get(parameter, {}).items())]
    return found


def same(a: list[tuple[str, torch.Tensor]], b: list[tuple[str, torch.Tensor]]) -> bool:
    """Whether the same tensors are equal to the bit."""
    return [n for n, _ in a] == [n for n, _ in b] and all(
        torch.equal(x, y) for (_, x), (_, y) in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("kind", list(jobs.OPTIMIZERS))
def test_a_plain_run_is_saved_and_loaded_whole(tmp_path, kind):
    model, optimizer, scheduler = trained(kind)
    step = autopart.save_from(model, tmp_path, optimizer, scheduler, {"seen": [1, (2, 3)]}, step=3)
    assert step == autopart.latest(tmp_path) == tmp_path / "step-00000003"
    other, its, pace = trained(kind, 0)
    assert autopart.load_into(other, tmp_path, its, pace) == {"seen": [1, (2, 3)]}
    assert same(state_of(model, optimizer), state_of(other, its))
    assert pace.state_dict() == scheduler.state_dict()
    assert [g["lr"] for g in its.param_groups] == [g["lr"] for g in optimizer.param_groups]


def test_a_pipe_goes_on_from_a_plain_run_and_back(tmp_path):
    model, optimizer, scheduler = trained()
    autopart.save_from(model, tmp_path / "plain", optimizer, scheduler, step=3)
    with autopart.compile(jobs.model(5), "cpu:1", sample=jobs.batch(0), **CUDA_FREE) as pipe:
        its, pace = jobs.trainer(pipe)
        pipe.load(tmp_path / "plain", its, pace)
        assert pipe.steps == 3
        pipe.save(tmp_path / "piped", its, pace)
    other, its, pace = trained("adamw", 0)
    autopart.load_into(other, tmp_path / "piped", its, pace)
    assert same(state_of(model, optimizer), state_of(other, its))


def changes(folder: Path, draw: random.Random) -> str:
    """Change a file of a checkpoint at random; returns what was done."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    path = draw.choice(files)
    data = path.read_bytes()
    place, how = draw.randrange(len(data)), draw.choice(("flip", "cut", "zero", "gone", "grow", "swap"))
    if how == "flip":
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :])
    elif how == "cut":
        path.write_bytes(data[:place])
    elif how == "zero":
        path.write_bytes(data[:place] + bytes(min(64, len(data) - place)) + data[place + 64 :])
    elif how == "gone":
        path.unlink()
    elif how == "grow":
        path.write_bytes(data + b"}")
    else:
        other = draw.choice(files)
        theirs = other.read_bytes()
        other.write_bytes(data)
        path.write_bytes(theirs)
    return f"{how} {path.name} at {place}"


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_a_changed_file_is_named_and_nothing_is_loaded(tmp_path, count):
    model, optimizer, scheduler = trained()
    source = autopart.save_from(model, tmp_path / "whole", optimizer, scheduler, step=3)
    other, its, pace = trained("adamw", 1)
    before = [(name, tensor.clone()) for name, tensor in state_of(other, its)]
    refused = 0
    for seed in range(count):
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        what = changes(folder, random.Random(seed))
        try:
            autopart.load_into(other, folder, its, pace)
        except autopart.CheckpointError as error:
            refused += 1
            assert same(before, state_of(other, its)), what
            assert str(error), what
            continue
        # Not every byte has a meaning: a space of JSON, a number in what nobody reads.
        assert same(state_of(model, optimizer), state_of(other, its)), what
        other, its, pace = trained("adamw", 1)
    assert refused > 0.8 * count


def test_a_changed_number_in_the_document_is_found(tmp_path):
    model, optimizer, scheduler = trained()
    page = autopart.save_from(model, tmp_path, optimizer, scheduler, step=3) / "checkpoint.json"
    text = page.read_text()
    page.write_text(text.replace('"lr": 0.00', '"lr": 0.01'))
    assert page.read_text() != text
    with pytest.raises(autopart.CheckpointError, match=r"checkpoint.json was changed since it was written"):
        autopart.load_into(model, tmp_path, optimizer, scheduler)
    page.write_text(json.dumps(json.loads(text), sort_keys=True))  # spaces and order have no meaning
    autopart.load_into(model, tmp_path, optimizer, scheduler)


def test_a_checkpoint_of_another_model_or_optimizer_is_refused(tmp_path):
    model, optimizer, _ = trained()
    autopart.save_from(model, tmp_path, optimizer)
    with pytest.raises(autopart.CheckpointError, match="another model") as refusal:
        autopart.load_into(nn.Linear(2, 2), tmp_path)
    assert "embed.weight is not in the model" in str(refusal.value)
    with pytest.raises(autopart.CheckpointError, match="state of AdamW, and the optimizer is SGD"):
        autopart.load_into(model, tmp_path, torch.optim.SGD(model.parameters(), lr=0.1))
    joined = torch.optim.AdamW(model.parameters(), lr=0.1)
    with pytest.raises(autopart.CheckpointError, match="joins parameters of groups"):
        autopart.load_into(model, tmp_path, joined)
    with pytest.raises(autopart.CheckpointError, match="holds no checkpoint"):
        autopart.load_into(model, tmp_path / "nothing")
    with pytest.raises(autopart.CheckpointError, match="never pickled"):
        autopart.save_from(model, tmp_path, extra={"made": object()})


def test_a_pickle_in_place_of_a_file_is_never_run(tmp_path):
    class Touch:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "run"),)

    model, optimizer, _ = trained()
    folder = autopart.save_from(model, tmp_path / "all", optimizer)
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        torch.save(Touch(), path)
        with pytest.raises(autopart.CheckpointError):
            autopart.load_into(model, folder, optimizer)
        path.write_bytes(whole)
    assert not (tmp_path / "run").exists()


def test_large_state_lies_in_two_files_and_is_loaded_from_both(tmp_path):
    model = nn.Linear(600, 512)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 600)).sum().backward()
    optimizer.step()
    folder = autopart.save_from(model, tmp_path, optimizer)
    sizes = [file.stat().st_size for file in sorted(folder.glob("state-*"))]
    assert len(sizes) == 2 and max(sizes) < 1.1 * min(sizes)
    other = nn.Linear(600, 512)
    second = torch.optim.AdamW(other.parameters(), lr=0.1)
    autopart.load_into(other, tmp_path, second)
    assert same(state_of(model, optimizer), state_of(other, second))


def test_older_checkpoints_go_when_a_newer_one_is_whole(tmp_path):
    model, *_ = trained()
    for step in range(5):
        autopart.save_from(model, tmp_path, step=step, keep=2)
    assert [path.name for path in complete(tmp_path)] == ["step-00000003", "step-00000004"]
    again = autopart.save_from(model, tmp_path, step=4, keep=2)
    assert again.name == "step-00000004.1" and autopart.latest(tmp_path) == again


def test_two_runs_do_not_share_a_folder(tmp_path):
    model, *_ = trained()
    root = Root(tmp_path)
    with pytest.raises(autopart.CheckpointError, match="another run writes"):
        autopart.save_from(model, tmp_path)
    root.close()
    autopart.save_from(model, tmp_path)


def test_a_folder_that_cannot_be_written_is_an_error_and_the_last_checkpoint_stays(tmp_path):
    model, optimizer, _ = trained()
    first = autopart.save_from(model, tmp_path, optimizer, step=1)
    code = (
        "import resource, autopart, sys; from support.jobs.state import checkpoint_jobs as jobs\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "try: autopart.save_from(jobs.model(1), sys.argv[1], step=2)\n"
        "except autopart.CheckpointError as error: print('refused', error)"
    )
    paths = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parents[3])])
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert "refused the checkpoint cannot be written" in done.stdout, done.stderr
    assert autopart.latest(tmp_path) == first and autopart.load_into(model, tmp_path, optimizer) is None


def test_weights_are_read_by_other_tools_by_their_names(tmp_path):
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file

    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=16)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    folder = autopart.save_from(model, tmp_path)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(folder)
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), loaded.state_dict().values(), strict=True)
    )
    (file,) = folder.glob("model-*.safetensors")
    assert load_file(file).keys() == set(open_tensors(folder).by_name)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]


def test_the_first_run_of_a_script_may_find_no_checkpoint(tmp_path):
    options = {"sample": jobs.batch(0), "costs": "analytic", **CUDA_FREE}
    with autopart.compile(jobs.model(0), "cpu:1", **options) as pipe:
        before = pipe.state_dict()
        for folder in (tmp_path / "none", tmp_path):
            with pytest.raises(autopart.CheckpointError, match="holds no checkpoint"):
                pipe.load(folder)
            assert pipe.load(folder, missing_ok=True) is None
        after = pipe.state_dict()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        autopart.save_from(jobs.model(1), tmp_path, extra="second", step=7)
        assert pipe.load(tmp_path, missing_ok=True) == "second" and pipe.steps == 7
        os.truncate(next((tmp_path / "step-00000007").glob("model-*")), 100)
        with pytest.raises(autopart.CheckpointError):
            pipe.load(tmp_path, missing_ok=True)


def test_copies_for_the_background_use_the_memory_of_the_copies_before():
    weights, more = {"a": torch.ones(3), "b": torch.ones(2)}, {"c": torch.ones(4).expand(2, 4)}
    first = Contents(weights, more, None).copied()
    places = [tensor.data_ptr() for tensor in (first.weights["a"], first.more["c"])]
    weights = {"a": torch.full((3,), 2.0), "b": torch.full((2,), 3.0)}
    second = Contents(weights, more, None).copied(first)
    assert [tensor.data_ptr() for tensor in (second.weights["a"], second.more["c"])] == places
    assert all(torch.equal(second.weights[name], tensor) for name, tensor in weights.items())
    weights["a"].zero_()
    assert torch.equal(second.weights["a"], torch.full((3,), 2.0))
    third = Contents(weights | {"b": torch.full((2,), 3.0).double()}, more, None).copied(second)
    assert third.weights["b"].dtype == torch.float64
    assert torch.equal(third.weights["a"], weights["a"]) and torch.equal(third.more["c"], more["c"])


@pytest.mark.slow
def test_a_script_that_ends_without_close_still_gets_its_checkpoint(tmp_path):
    script = (
        "import sys, torch, autopart\nfrom torch import nn\n"
        "model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.ones(4, 64)\n"
        "pipe = autopart.compile(model, 'cpu:1', sample=(x, x), loss_fn=nn.MSELoss(), costs='analytic')\n"
        "optimizer = torch.optim.AdamW(pipe.parameters())\npipe.step((x, x))\noptimizer.step()\n"
        "pipe.save(sys.argv[1], optimizer, wait=False)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert autopart.latest(tmp_path) == tmp_path / "step-00000001"
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    autopart.load_into(model, tmp_path, torch.optim.AdamW(model.parameters()))

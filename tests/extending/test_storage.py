"""A storage from outside: checkpoints in a bucket, for which fsspec's file system in memory stands.

A newcomer touches 2 files: one of their own with the storage (`own_storage.Objects`), which they enter in `STORAGES`,
and this test.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from support.extending.own_storage import Objects, saved_and_loaded, state_at
from support.jobs.state import checkpoint_jobs as jobs
from support.workers import Workers
from torch import nn

import autopart
from autopart.cli.entry import main
from autopart.files.checkpoints.storage import STORAGES

RUN = "bucket://runs/a"


def command(*words: str) -> object:
    """Return the exit code of `autopart checkpoint` with these words."""
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", *words])
    return ended.value.code


@pytest.fixture
def bucket() -> Iterator[MemoryFileSystem]:
    system = fsspec.filesystem("memory")
    system.store.clear()
    STORAGES["bucket:"] = Objects(system)
    yield system
    del STORAGES["bucket:"]
    system.store.clear()


def test_a_run_in_a_bucket_goes_on_to_the_bit(
    bucket: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # nothing may lie here afterwards
    losses = []
    for seed in (1, 2):
        with autopart.compile(jobs.model(seed), "cpu:1", sample=jobs.batch(0), costs="analytic") as pipe:
            optimizer, scheduler = jobs.trainer(pipe)
            if seed == 2:
                assert pipe.load(RUN, optimizer, scheduler) == {"seen": 3} and pipe.steps == 3
            else:
                for step in range(3):
                    jobs.train(pipe, optimizer, scheduler, [step])
                    pipe.save(RUN, optimizer, scheduler, {"seen": step + 1}, keep=2, wait=step % 2 == 0)
            losses.append(jobs.train(pipe, optimizer, scheduler, range(3, 5)))
    assert losses[0] == losses[1]
    assert autopart.latest(RUN) == Path(RUN) / "step-00000003"
    assert {name for name in STORAGES["bucket:"].names(Path(RUN)) if name.startswith("step-")} == {
        "step-00000002", "step-00000003"
    }  # fmt: skip

    assert command("show", RUN) == command("export", RUN, "model.safetensors") == 0
    assert "AdamW" in capsys.readouterr().out
    Path("model.safetensors").unlink()
    assert [*tmp_path.iterdir()] == []

    (name,) = bucket.glob("/runs/a/step-00000003/model-*")
    bucket.store[name] = type(bucket.store[name])(bucket, name, bucket.cat_file(name)[:-1] + b"x")
    with pytest.raises(autopart.CheckpointError, match="was changed since it was written"):
        autopart.load_into(jobs.model(3), RUN)
    assert command("verify", RUN) == 1


class Killed(BaseException):
    """The end of a process."""


class Mortal:
    """A file system whose process is killed before one of its calls, and does nothing any more."""

    def __init__(self, system: Any, calls: int) -> None:
        self.system, self.calls = system, calls

    def __getattr__(self, name: str) -> Any:
        self.calls -= 1
        if self.calls < 0:
            raise Killed
        return getattr(self.system, name)


@pytest.mark.timeout(120)
def test_a_kill_at_any_call_leaves_a_complete_checkpoint(bucket: MemoryFileSystem) -> None:
    older, newer = nn.Linear(3, 2), nn.Linear(3, 2)
    seen, calls = set(), 0
    while True:
        bucket.store.clear()
        STORAGES["bucket:"] = Objects(bucket)
        autopart.save_from(older, RUN, step=1, keep=1)
        STORAGES["bucket:"] = Objects(Mortal(bucket, calls))
        ended = False
        try:
            autopart.save_from(newer, RUN, step=2, keep=1)
            ended = True
        except Killed:
            calls += 1
        STORAGES["bucket:"] = Objects(bucket)  # another process
        found = next(
            n for n, each in enumerate((older, newer)) if all(map(torch.equal, state_at(RUN), each.parameters()))
        )
        seen.add(found)
        assert found == 1 or not ended
        autopart.save_from(older, RUN, step=3, keep=1)
        assert all(map(torch.equal, state_at(RUN), older.parameters()))
        assert not any(name.endswith(".tmp") for name in STORAGES["bucket:"].names(Path(RUN)))
        if ended:
            break
    assert seen == {0, 1} and calls > 30


def test_a_url_without_a_storage_is_refused_and_makes_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (lambda: autopart.save_from(nn.Linear(2, 2), "s3://runs/a"), lambda: autopart.latest("s3://runs/a")):
        with pytest.raises(autopart.CheckpointError, match="no storage is known for s3://"):
            call()
    assert [*tmp_path.iterdir()] == []


@pytest.mark.timeout(120)
def test_two_ranks_save_to_a_storage_and_go_on(pair: Workers, tmp_path: Path) -> None:
    for losses, resumed, names in pair.run(saved_and_loaded, str(tmp_path)):
        assert losses == resumed
        assert names == [".order", "latest", "step-00000003"]

"""Folders of checkpoints on real file systems: full disks, forks, kills, pipes and devices in place of files."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import autopart
from autopart.cli.entry import main as command_line
from autopart.files.checkpoints.document import hash_of
from autopart.files.checkpoints.folders import Root
from autopart.files.storage import lock, unlock

PATHS = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parents[3])])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted: {done.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def fill(disk: Path) -> Path:
    """Leave no space on a disk; returns the file that takes it."""
    with (disk / "fill").open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                pass
    return disk / "fill"


def test_a_first_save_on_a_full_disk_bars_no_later_one(small_disk: Path) -> None:
    full = fill(small_disk)
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    with pytest.raises(autopart.CheckpointError, match="No space left"):
        autopart.save_from(nn.Linear(2, 2), small_disk / "run", step=1)
    full.unlink()
    path = autopart.save_from(nn.Linear(2, 2), small_disk / "run", step=2)
    assert autopart.latest(small_disk / "run") == path
    assert not before or set(os.listdir("/proc/self/fd")) == before


def held_by_a_child() -> tuple[int, int]:
    """Fork a process that lives until the second number, a descriptor, is closed; returns its process id first."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    return child, writing


def test_a_child_that_was_forked_does_not_hold_the_lock(tmp_path: Path) -> None:
    root, taken = Root(tmp_path), lock(tmp_path / "cache.lock")
    child, alive = held_by_a_child()
    with pytest.raises(autopart.CheckpointError, match=f"held by process {os.getpid()} on"):
        Root(tmp_path)
    root.close()
    unlock(taken)
    Root(tmp_path).close()
    unlock(lock(tmp_path / "cache.lock"))
    os.close(alive)
    os.waitpid(child, 0)


KILLED = """
import os, sys, time
from pathlib import Path
from autopart.files.checkpoints.folders import Root
root = Root(Path(sys.argv[1]))
if os.fork() == 0:
    os.write(1, b"held\\n")  # from the child: its parent is not killed before it runs
    os.read(0, 1)  # until the test ends
    os._exit(0)
time.sleep(1000)
"""


def test_a_killed_run_leaves_no_lock_while_a_process_that_it_forked_lives(tmp_path: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", KILLED, tmp_path],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": PATHS},
    )  # fmt: skip
    assert run.stdin is not None and run.stdout is not None
    assert run.stdout.readline() == b"held\n"
    with pytest.raises(autopart.CheckpointError, match="another run writes"):
        Root(tmp_path)
    run.send_signal(signal.SIGKILL)
    run.wait()
    try:
        Root(tmp_path).close()
    finally:
        run.stdin.close()  # ends the child
        run.stdout.close()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named_and_saved_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    other = tmp_path / "step-00000009.tmp"  # of a run that may live
    other.mkdir()
    with pytest.warns(UserWarning, match="its file system has no locks"):
        path = autopart.save_from(nn.Linear(2, 2), tmp_path, step=1)
    assert autopart.latest(tmp_path) == path and other.is_dir()


def test_only_the_owner_can_open_the_lock(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch(0o644)  # as an earlier release made it
    Root(tmp_path).close()
    assert (tmp_path / ".lock").stat().st_mode & 0o777 == 0o600


# ---- what lies there in place of a file ------------------------------------------------------------------------------

PLACES = ("latest", ".lock", ".order", "{0}/checkpoint.json", "{0}/model.safetensors.index.json", "{0}")
FILES = ("{0}/model-00001-of-00001.safetensors", "{0}/state-00001-of-00001.safetensors")
KINDS = ("pipe", "to a pipe", "zero", "null", "folder", "loop", "huge", "empty", "gone", "noise", "socket")


def put(kind: str, path: Path) -> None:
    """Put something else in place of a file."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "to a pipe":
        os.mkfifo(path.parent / "elsewhere")
        path.symlink_to(path.parent / "elsewhere")
    elif kind in ("zero", "null"):
        path.symlink_to(f"/dev/{kind}")
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "huge":
        path.touch()
        os.truncate(path, 1 << 34)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK)
    elif kind != "gone":
        path.write_bytes(b"" if kind == "empty" else bytes(range(256)))


def used(folder: Path, call: str) -> str:
    """Make a call; returns what was loaded, or that it was refused."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    try:
        if call == "load":
            return f"loaded {autopart.load_into(model, folder, optimizer)} {float(model.bias.sum().detach()):g}"
        if call == "save":
            autopart.save_from(model, folder, step=3, keep=1)
            autopart.load_into(model, folder)
            return "saved"
        if call == "latest":
            found = autopart.latest(folder)
            return f"found {found.name if found else None}"
        command_line(
            ["checkpoint", call, str(folder), *([str(folder / "out.safetensors")] if call == "export" else [])]
        )
    except autopart.AutopartError:
        return "refused"
    except SystemExit as error:
        return f"exit {error.code}"
    return "?"


def everything(folder: Path, seed: int, count: int) -> None:
    """Put something in place of each file, and make each call in a process that has 30 seconds and 4 GiB."""
    import resource

    draw = random.Random(seed)
    every = [(place, kind, call) for place in (*PLACES, *FILES) for kind in KINDS
             for call in ("load", "save", "latest", "show", "verify", "export")]  # fmt: skip
    model = nn.Linear(3, 3)
    with torch.no_grad():
        model.bias.fill_(2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for step in (1, 2):
        autopart.save_from(model, folder / "whole", optimizer, extra=step, step=step)
    used_memory = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for place, kind, call in draw.sample(every, count) if count else every:
        run = folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(folder / "whole", run)
        put(kind, run / place.format("step-00000002"))
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_AS, (used_memory + (4 << 30),) * 2)
            signal.alarm(30)  # a call that waits in native code ends too
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
            try:
                os.write(writing, used(run, call).encode())
            except BaseException as error:
                os.write(writing, f"raw {type(error).__name__}: {error}"[:500].encode())
            os._exit(0)
        os.close(writing)
        with open(reading, "rb") as told:
            answer = told.read().decode()
        os.waitpid(child, 0)
        print(json.dumps([place, kind, call, answer]))


def test_what_is_no_regular_file_is_refused_at_once_wherever_it_lies(tmp_path: Path) -> None:
    looked_at(tmp_path, 1, 25)


@pytest.mark.slow
def test_what_is_no_regular_file_is_refused_at_once_in_all_combinations(tmp_path: Path) -> None:
    looked_at(tmp_path, 1, 0)


def looked_at(folder: Path, seed: int, count: int) -> None:
    """Run `everything` in a process of its own, and check what each call answered."""
    done = subprocess.run(
        [sys.executable, __file__, str(folder), str(seed), str(count)],
        capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) >= max(count, 1)
    for place, kind, call, answer in answers:
        what = f"{call} with {kind} in place of {place}: {answer!r}"
        assert answer and not answer.startswith(("raw", "?")), what
        if call in ("load", "latest") and place in ("latest", "{0}", "{0}/checkpoint.json") and answer != "refused":
            assert "step-00000002" in answer or answer == "loaded 2 6" or (kind, place) == ("gone", "latest"), what
        if answer.startswith("loaded"):
            assert answer == "loaded 2 6", what  # never the older one


# ---- which one is loaded, and which stay -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["no document", "no folder", "empty", "noise", "another name"])
def test_where_the_newest_is_not_whole_no_older_one_is_loaded_in_silence(tmp_path: Path, how: str) -> None:
    model = nn.Linear(2, 2)
    older, newest = (autopart.save_from(model, tmp_path, extra=step, step=step) for step in (4, 6))
    if how == "no document":
        (newest / "checkpoint.json").unlink()
    elif how == "no folder":
        shutil.rmtree(newest)
    else:
        texts = {"empty": "", "noise": "\x1b[31m", "another name": "step-00000005"}
        (tmp_path / "latest").write_text(texts[how])
    with pytest.raises(autopart.CheckpointError) as refusal:
        autopart.load_into(model, tmp_path)
    assert "latest" in str(refusal.value) and "\x1b" not in str(refusal.value)
    assert autopart.load_into(model, older) == 4  # as the message advises
    (tmp_path / "latest").unlink()
    assert autopart.load_into(model, tmp_path) == (4 if how.startswith("no ") else 6)
    path = autopart.save_from(model, tmp_path, extra=7, step=7)
    assert autopart.latest(tmp_path) == path and autopart.load_into(model, tmp_path) == 7


@pytest.mark.parametrize("count", [25, pytest.param(400, marks=pytest.mark.slow)])
def test_keep_spares_what_the_run_has_written_however_often_it_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # thousands would wait for the disk
    for seed in range(count):
        draw, folder = random.Random(seed), tmp_path / str(seed)
        keep, step = draw.randint(1, 4), 0
        since: list[str] = []
        root = Root(folder)
        for _ in range(12):
            there = sorted(path.name for path in folder.glob("step-*"))
            if there and draw.random() < 0.25:
                step, since = int(draw.choice(there)[5:13]), []  # loaded by its own path
            step += draw.choice((0, 1, 1, 2, 5))
            draft = root.draft(step)
            (draft / "checkpoint.json").touch()
            made = root.publish(draft, keep)
            since.append(made.name)
            left = {path.name for path in folder.glob("step-*")}
            newest = {name[5:13]: name for name in since[-keep:]}  # one that was saved again may go
            assert len(left) <= keep and {*newest.values()} <= left, (seed, since, left)
            lost = {int(name[5:13]) for name in {*there} - left}
            further = [name for name in left - {made.name} if int(name[5:13]) >= step]
            assert not further or min(lost, default=step) >= step, (seed, lost, left)
            (folder / "latest").unlink()
            assert autopart.latest(folder) == made  # by the order in which they were written
        root.close()


def test_a_reader_beside_a_run_that_keeps_one_checkpoint_loads_each_time(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    autopart.save_from(model, tmp_path, extra=0, step=0, keep=1)
    code = (
        "import sys, autopart; from torch import nn\nmodel = nn.Linear(2, 2)\n"
        "for step in range(1, 10**6): autopart.save_from(model, sys.argv[1], extra=step, step=step, keep=1)"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, tmp_path], env={**os.environ, "PYTHONPATH": PATHS})
    try:
        last, times = 0, 0
        while last < 20 and writer.poll() is None:
            found = autopart.load_into(model, tmp_path)
            assert found >= last
            last, times = found, times + 1
        assert last >= 20 and times > 20
    finally:
        writer.kill()
        writer.wait()


# ---- the command line ------------------------------------------------------------------------------------------------


def test_an_index_that_was_changed_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import save_file

    model = nn.Linear(2, 2)
    path = autopart.save_from(model, tmp_path / "run", step=1)
    save_file({name: torch.zeros_like(value) for name, value in model.state_dict().items()}, path / "other.safetensors")
    index = path / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    index.write_text(json.dumps(found | {"weight_map": dict.fromkeys(found["weight_map"], "other.safetensors")}))
    for command in ("show", "export", "verify"):
        out = [str(tmp_path / "out.safetensors")] if command == "export" else []
        with pytest.raises(SystemExit) as ended:
            command_line(["checkpoint", command, str(tmp_path / "run"), *out])
        assert ended.value.code and "index.json was changed" in capsys.readouterr().err
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("seed", range(3))
def test_no_text_of_a_file_reaches_the_terminal_as_an_escape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    draw = random.Random(seed)
    page = autopart.save_from(nn.Linear(2, 2), tmp_path, step=1) / "checkpoint.json"
    found = json.loads(page.read_text())
    del found["sha256"]
    for key in ("precision", "torch", "autopart"):
        found[key] = draw.choice(("\x1b]52;c;ZXZpbA==\x07", "\x9b2J", "a\rb", "\u202e", "\x1b[2J"))
    found["files"]["a\x1b[31m\n.bin"] = {"size_bytes": 1, "sha256": "0" * 64}
    found["extra"] = {"\x1b[0m": "\x1b[1m"}
    page.write_text(json.dumps(found | {"sha256": hash_of(found)}))
    for command in (["show"], ["show", "--json"], ["verify"]):
        with pytest.raises(SystemExit):
            command_line(["checkpoint", command[0], str(tmp_path), *command[1:]])
        text = "".join(capsys.readouterr())
        assert text and all(sign.isprintable() or sign in "\n\t" for sign in text)


if __name__ == "__main__":
    everything(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

"""A process that is killed while it saves leaves the last complete checkpoint, whatever the instant."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PATHS = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parents[3])])


def saving(folder: Path, first: int, count: int = 10_000) -> None:
    """Save one checkpoint after the other, each with the number of its step in every tensor."""
    import torch
    from torch import nn

    import autopart

    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(first, first + count):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
                optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, step)
        autopart.save_from(model, folder, optimizer, extra=step, step=step, keep=2)


def last_of(folder: Path) -> int:
    """Return the step of the latest checkpoint, -1 for none, after checking that all of it is of that step."""
    import torch
    from torch import nn

    import autopart

    found = autopart.latest(folder)
    if found is None:
        return -1
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = autopart.load_into(model, folder, optimizer)
    for parameter in model.parameters():
        assert bool((parameter == step).all()) and bool((optimizer.state[parameter]["momentum_buffer"] == step).all())
    return step


def soak(folder: Path, kills: int) -> None:
    """Kill a process that saves, `kills` times; each goes on behind the last checkpoint."""
    draw, last = random.Random(kills), -1
    assert last_of(folder) == -1
    warmed = folder.with_name("warmed")
    for imported in (True, False):  # what a child would import, and how long a save takes
        began = time.monotonic()
        saving(warmed, 0, 1 if imported else 3)
    span = time.monotonic() - began
    for _ in range(kills):
        child = os.fork()
        if child == 0:
            try:
                saving(folder, last + 1)
            finally:
                os._exit(1)
        time.sleep(draw.uniform(0, 2 * span))  # the instant of the kill, not a wait for anything
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = last_of(folder)
        assert found >= last, (found, last)
        last = found
    saving(folder, last + 1, 1)
    left = sorted(path.name for path in folder.iterdir())
    assert len(left) == 5 and left[:3] == [".lock", ".order", "latest"], left  # and the two that are kept
    print("last", last)


FILE_OPERATIONS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"}


def end_before(folder: Path, number: int) -> None:
    """End this process before an operation on files in a folder."""
    left = [number]

    def look(event: str, args: tuple[object, ...]) -> None:
        if event in FILE_OPERATIONS and args and str(args[0]).startswith(str(folder)):
            left[0] -= 1
            if left[0] < 0:
                os._exit(1)

    sys.addaudithook(look)


def every_operation(folder: Path) -> None:
    """Save in a process that ends before its operation number 0, 1, 2, ... until one comes to its end."""
    saving(folder, 0, 2)
    last, number, ended = 1, 0, 1
    while ended:
        child = os.fork()
        if child == 0:
            end_before(folder, number)
            saving(folder, last + 1, 1)
            os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found = last_of(folder)
        assert found in ((last, last + 1) if ended else (last + 1,)), (number, found, last)
        last, number = found, number + 1
    print("operations", number)


def run_alone(*args: str) -> int:
    """Run this file in a process of its own, which forks while it has one thread; returns the last number that it
    prints."""
    done = subprocess.run(
        [sys.executable, __file__, *args],
        capture_output=True, text=True, timeout=250, env={**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout.split()[-1])


def test_a_save_that_ends_before_any_of_its_file_operations_leaves_a_whole_checkpoint(tmp_path):
    assert run_alone(str(tmp_path / "run"), "operations") > 15


@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_the_last_complete_checkpoint_is_loaded_after_a_kill_at_any_instant(tmp_path, kills):
    assert run_alone(str(tmp_path / "run"), str(kills)) > kills / 10  # some saves came to their end in between


if __name__ == "__main__":
    if sys.argv[2] == "operations":
        every_operation(Path(sys.argv[1]))
    else:
        soak(Path(sys.argv[1]), int(sys.argv[2]))

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

PATHS = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parents[2])])


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
    assert len(left) == 4 and left[:2] == [".lock", "latest"], left  # and the two that are kept
    print("last", last)


@pytest.mark.parametrize("kills", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_the_last_complete_checkpoint_is_loaded_after_a_kill_at_any_instant(tmp_path, kills):
    # A process of its own: it is forked while it has one thread.
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path / "run"), str(kills)],
        capture_output=True, text=True, timeout=250, env={**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) > kills / 10  # some saves came to their end in between


if __name__ == "__main__":
    soak(Path(sys.argv[1]), int(sys.argv[2]))

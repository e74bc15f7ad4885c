"""Ranks that are killed while their pipe saves leave the last complete checkpoint, whatever the instant."""

from __future__ import annotations

import importlib
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

PATHS = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parents[3])])
VICTIMS = ((0,), (1,), (0, 1))
"""Ranks that are killed; both at once are what the end of their launcher or of the machine is."""


def model() -> Any:
    """Return a model in which each stage has a buffer that belongs to it too."""
    from torch import nn

    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)) for _ in range(4)])


def fill(tensors: Any, value: float) -> None:
    """Write a value into every number of tensors."""
    import torch

    with torch.no_grad():
        for tensor in tensors:
            tensor.fill_(value)


def saving(rank: int, port: int, folder: Path, steps: range, told: int, *, wait: bool) -> None:
    """Save one checkpoint after the other on one of two ranks, each with the number of its step in every tensor.

    told: a pipe, into which the seconds of two saves are written before the third, by when the first is whole; at once
    where nothing has been saved yet."""
    import torch

    import autopart

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    options = {"loss_fn": torch.nn.functional.mse_loss, "costs": "analytic", "cuts": ["2"], "micro_batches": 1}
    sample = torch.ones(4, 64), torch.ones(4, 64)
    with autopart.compile(model(), "cpu:2", sample=sample, **options) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        began = time.monotonic()
        for step in steps:
            fill(pipe.parameters(), step)
            fill(pipe.buffers(), step)
            for parameter in pipe.parameters():
                optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, step)
            pipe.steps = step
            if step == steps.start + (2 if steps.start else 0):
                os.write(told, struct.pack("d", time.monotonic() - began))
            pipe.save(folder, optimizer, extra=step, keep=2, wait=wait)
            fill(pipe.parameters(), -1.0)  # training goes on beside a save that does not wait
            fill(pipe.buffers(), -1)


def last_of(folder: Path) -> int:
    """Return the step of the latest checkpoint, -1 for none, after checking that all of it is of that step."""
    import torch

    import autopart

    if autopart.latest(folder) is None:
        return -1
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    step = autopart.load_into(plain, folder, optimizer)
    assert all(bool((tensor == step).all()) for tensor in plain.state_dict().values())
    assert all(bool((optimizer.state[p]["momentum_buffer"] == step).all()) for p in plain.parameters())
    return int(step)


def forked(*args: Any, **more: Any) -> int:
    """Run `saving` in a forked process; returns its id."""
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the rank that lives on says that the other died
            saving(*args, **more)
        finally:
            os._exit(1)
    return child


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def soak(folder: Path, kills: int, seed: int) -> None:
    """Kill one or both of two ranks that save, `kills` times; each time they go on behind the last checkpoint."""
    draw, last = random.Random(seed), -1
    for kill in range(kills):
        read, told = os.pipe()
        port, steps, wait = free_port(), range(last + 1, 1_000_000), bool((kill + seed) % 2)
        ranks = [forked(rank, port, folder, steps, told, wait=wait) for rank in range(2)]
        os.close(told)
        takes_s = max(struct.unpack("d", os.read(read, 8))[0] for _ in ranks)  # an error if both have ended
        time.sleep(draw.uniform(0, 1.5) * max(takes_s, 0.1))  # the instant of the kill, not a wait for anything
        for rank in VICTIMS[kill % len(VICTIMS)]:
            os.kill(ranks[rank], signal.SIGKILL)
        for child in ranks:
            os.waitpid(child, 0)  # the other one fails by itself
        os.close(read)
        found = last_of(folder)
        assert found > last or last == -1, (found, last)
        last = found
    print("last", last)


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "seed"), [(3, 0), *((50, seed) for seed in range(1, 5))])
@pytest.mark.timeout(900)
def test_the_last_complete_checkpoint_is_loaded_after_a_kill_of_any_rank_at_any_instant(tmp_path, kills, seed):
    # A process of its own: it is forked while it has one thread.
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path / "run"), str(kills), str(seed)],
        capture_output=True, text=True, timeout=880, env={**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) >= kills // 4  # in each turn but the first ones a save came to its end


if __name__ == "__main__":
    for name in ("torch.distributed.tensor", "autopart.api", "autopart.pipe"):  # what children would import
        importlib.import_module(name)
    soak(Path(sys.argv[1]), *map(int, sys.argv[2:]))

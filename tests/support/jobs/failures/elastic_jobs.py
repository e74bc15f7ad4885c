"""A training run over a sampler whose ranks die and come back; every rank notes the steps that it kept.

One that dies may have had no time to note a step from which the others continue.

Run as a script under torchrun, with a `Run` as JSON:

    torchrun ... -m support.jobs.failures.elastic_jobs '{"folder": ...}'
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autopart
from autopart.launcher import restart_count

SIZE, ROWS, WIDTH = 50, 12, 16


@dataclass(frozen=True)
class Run:
    """What the run does.

    kills: for each generation of ranks the rank and the step in which it kills itself, None for none.  later_s: of each
    kill, seconds after the step has begun; at once by default.  steps: after
    which it ends, if `world` ranks run then.  every: steps between two checkpoints.  alike: whether all devices are of
    the same speed.
    """

    folder: str
    kills: tuple[tuple[int, int] | None, ...] = ()
    later_s: tuple[float, ...] = ()
    steps: int = 8
    every: int = 3
    world: int = 4
    pause_s: float = 0.0
    alike: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def text(self) -> str:
        """Return it as the script takes it."""
        return json.dumps(dataclasses.asdict(self))


@dataclass(frozen=True)
class Noted:
    """A step that was kept, and how many ranks ran it.  at: time.time().  working: ranks that have a stage."""

    generation: int
    world: int
    step: int
    loss: float
    samples: list[int]
    at: float
    working: int


def slow_cluster(world: int, *, alike: bool = False) -> autopart.Cluster:
    """Return devices so slow that every rank is worth using for a small model; the first one has twice the speed,
    unless they are alike."""
    rates = [10**7 if alike else 2 * 10**7, *[10**7] * (world - 1)]
    devices = tuple(autopart.Device("cpu", 2**30, rate, rate) for rate in rates)
    return autopart.Cluster(devices, (autopart.Level(world, autopart.Link(1000, 10**9)),))


def net() -> nn.Module:
    """Return a small model in fp64, with dropout-free layers that can be cut anywhere."""
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers).double()


def dataset() -> TensorDataset:
    """Return samples that are told apart by their last column."""
    x = torch.randn(SIZE, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, torch.cat([x[:, 1:].cos(), torch.arange(SIZE, dtype=torch.float64)[:, None] / SIZE], 1))


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean of squares of all but the number of the sample."""
    return (output[:, :-1] - target[:, :-1]).square().mean()


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of the run."""
    return torch.optim.AdamW(parameters, lr=1e-2)


def train(run: Run) -> tuple[int, int]:
    """Train from the last checkpoint on; return the generation and the steps at its end."""
    torch.set_num_threads(1)
    generation, world, rank = restart_count(), int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    Path(run.folder, f"pid-{rank}").write_text(str(os.getpid()))
    kill = run.kills[generation] if generation < len(run.kills) else None
    data = dataset()
    sample = data[:ROWS]
    options: dict[str, Any] = {"loss_fn": loss_of, "costs": "analytic"} | run.options
    if world < run.world:
        options.pop("replicas", None)  # fits one number of ranks
    with autopart.compile(net(), slow_cluster(run.world, alike=run.alike), sample=sample, **options) as pipe:
        optimizer = optimizer_of(pipe.parameters())
        pipe.load(run.folder, optimizer, missing_ok=True)
        sampler = pipe.sampler(data, rows=ROWS, seed=5)
        while not _over(run, pipe, world):
            for x, y in DataLoader(data, batch_sampler=sampler):
                if kill == (rank, pipe.steps):
                    _kill_after(run.later_s[generation] if run.later_s else 0.0)
                optimizer.zero_grad()
                loss = float(pipe.step((x, y)))
                optimizer.step()
                samples = [round(float(number) * SIZE) for number in y[:, -1]]
                working = len({rank for stage in pipe.plan.stages for rank in stage.ranks})
                _note(run, Noted(generation, world, pipe.steps, loss, samples, time.time(), working))
                time.sleep(run.pause_s)
                if pipe.steps % run.every == 0:
                    pipe.save(run.folder, optimizer, keep=2)
                if _over(run, pipe, world):
                    break
        pipe.save(run.folder, optimizer, keep=2)
        return generation, pipe.steps


def _kill_after(seconds: float) -> None:
    if not seconds:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def _over(run: Run, pipe: autopart.Pipe, world: int) -> bool:
    return pipe.stop_requested or (pipe.steps >= run.steps and world == run.world)


def _note(run: Run, noted: Noted) -> None:
    with Path(run.folder, "steps").open("a") as log:
        log.write(json.dumps(dataclasses.asdict(noted)) + "\n")


def every_step(folder: str) -> list[Noted]:
    """Return all steps in the order in which they ran; those that were lost come again."""
    whole = [line for line in Path(folder, "steps").read_text().split("\n")[:-1] if line.endswith("}")]
    steps: dict[tuple[int, int], Noted] = {}
    for line in whole:
        each = Noted(**json.loads(line))
        steps.setdefault((each.generation, each.step), each)
    return list(steps.values())


def noted(folder: str) -> list[Noted]:
    """Return the steps of all generations in the order in which they ran, without those that were lost."""
    kept: list[Noted] = []
    for each in every_step(folder):
        del kept[each.step - 1 :]
        kept.append(each)
    return kept


def plainly(samples: list[list[int]]) -> Iterator[float]:
    """Yield the losses of plain training in one process on these samples."""
    model, data = net(), dataset()
    optimizer = optimizer_of(model.parameters())
    for each in samples:
        x, y = data[torch.tensor(each)]
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        yield loss.item()


def largest_error(steps: list[Noted]) -> float:
    """Return the largest relative difference between a loss and that of plain training on the same samples."""
    plain = plainly([each.samples for each in steps])
    return max(abs(each.loss / loss - 1) for each, loss in zip(steps, plain, strict=True))


def require_each_sample_once(steps: list[Noted]) -> None:
    """Require that no step is missing, and that each sample came once in each epoch that ended."""
    assert [each.step for each in steps] == list(range(1, len(steps) + 1))
    seen = [number for each in steps for number in each.samples]
    for first in range(0, len(seen) - SIZE + 1, SIZE):
        assert sorted(seen[first : first + SIZE]) == list(range(SIZE))


def main() -> None:
    """Run as a rank of torchrun."""
    run = Run(**json.loads(sys.argv[1]))
    autopart.launch(train, slow_cluster(run.world), run, elastic=(1, run.world))


if __name__ == "__main__":
    main()

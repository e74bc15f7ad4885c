"""A short training run with checkpoints that meets one fault in each generation of its ranks, and goes on.

Run as a script, under torchrun or directly (then it calls `autopart.launch`):

    python -m support.jobs.failures.run_script '{"folder": ..., "faults": [...], ...}'
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopart
from autopart.launcher import restart_count
from autopart.runtime.group.world import World
from autopart.runtime.watch.stop_signals import stop_signals
from support.jobs.failures import failing_jobs

STAGES = {"cuts": ["layers.2"], "micro_batches": 4, "schedule": "zb-h1"}
REPLICAS = {"stages": 1, "replicas": 2, "micro_batches": 4}
BOTH = {"cuts": ["layers.2"], "replicas": 2, "micro_batches": 4, "zero": 1}


@dataclass(frozen=True)
class Fault:
    """What happens on a rank in a phase of a step: "forward", "backward", "weights" (a split backward), "sums" over
    replicas, "optimizer", "between" two steps; or at its "start".

    how: "kill", "stop" or "hang" the rank; "term" or "usr1" signal it; "term-launcher", "usr1-launcher" its launcher.
    """

    how: str
    rank: int = 1
    step: int = 3
    phase: str = "forward"


@dataclass(frozen=True)
class Run:
    """What the script does.

    faults: one for each generation of ranks.  every: steps between two checkpoints.  wait: of `pipe.save`.
    """

    folder: str
    faults: list[Fault] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=lambda: dict(STAGES))
    world: int = 2
    steps: int = 6
    every: int = 2
    wait: bool = True
    restarts: int = 0
    grace: float = 30.0
    timeout: float | None = None

    def text(self) -> str:
        """Return it as the script takes it."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of(cls, text: str) -> Run:
        """Read what `text` returned."""
        given = json.loads(text)
        return cls(**given | {"faults": [Fault(**each) for each in given["faults"]]})


class Net(nn.Module):
    """Four layers with dropout, each of which ends in an op that may fail."""

    def __init__(self) -> None:
        super().__init__()
        width = failing_jobs.WIDTH
        self.layers = nn.Sequential(
            *[nn.Sequential(nn.Linear(width, width), nn.Dropout(0.2), failing_jobs.Fragile()) for _ in range(4)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of a step."""
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(8, failing_jobs.WIDTH, generator=generator) for _ in range(2))
    return x, y


def train(run: Run) -> tuple[str, dict[int, bool]]:
    """Train from the last checkpoint to the end, or until a stop is requested.

    Returns a hash of the weights and this rank's optimizer state, and `stop_requested` after each step."""
    torch.set_num_threads(1)
    Path(run.folder).mkdir(exist_ok=True)
    fault = _fault_of(run, int(os.environ["RANK"]))
    _cause_at("start", 0, fault)
    torch.manual_seed(3 + restart_count())  # rank 0's weights, or those of the checkpoint, are the ones that count
    model = Net()
    asked = {}
    options = {"loss_fn": nn.functional.mse_loss, "costs": "analytic", "timeout": run.timeout, **run.plan}
    with autopart.compile(model, f"cpu:{run.world}", sample=batch(0), **options) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        if autopart.latest(run.folder):
            pipe.load(run.folder, optimizer)
        else:
            pipe.load_state_dict(_first_weights())
        while pipe.steps < run.steps and not pipe.stop_requested:
            step = pipe.steps
            if fault is not None and fault.step == step and fault.phase not in ("start", "optimizer", "between"):
                failing_jobs.arm(fault.phase, lambda: _cause(fault), 2)
            optimizer.zero_grad()
            loss = pipe.step(batch(step))
            asked[step] = pipe.stop_requested
            _cause_at("optimizer", step, fault)
            optimizer.step()
            _cause_at("between", step, fault)
            if pipe.is_main:
                with Path(run.folder, "losses").open("a") as log:
                    log.write(json.dumps([step, float(loss)]) + "\n")
            if pipe.steps % run.every == 0 or pipe.stop_requested:
                pipe.save(run.folder, optimizer, wait=run.wait)
        digest = _digest(pipe, optimizer)
    return digest, asked


def _first_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return Net().state_dict()


def _digest(pipe: autopart.Pipe, optimizer: torch.optim.Optimizer) -> str:
    state = dict(pipe.state_dict())
    for name, parameter in pipe.named_parameters():
        state |= {f"{key}/{name}": value for key, value in optimizer.state.get(parameter, {}).items()}
    found = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        found.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def _fault_of(run: Run, rank: int) -> Fault | None:
    generation = restart_count()
    fault = run.faults[generation] if generation < len(run.faults) else None
    return fault if fault is not None and fault.rank == rank else None


def _cause_at(phase: str, step: int, fault: Fault | None) -> None:
    if fault is not None and (fault.phase, fault.step) == (phase, step):
        _cause(fault)


def _cause(fault: Fault) -> None:
    number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM, "usr1": signal.SIGUSR1}
    how, _, whom = fault.how.partition("-")
    if how == "hang":
        ctypes.PyDLL(None).sleep(600)  # holds the GIL
        return
    os.kill(os.getppid() if whom else os.getpid(), number[how])
    end = time.monotonic() + 60
    while whom and not stop_signals.asked and time.monotonic() < end:  # until it is passed on
        time.sleep(0.01)


def _sum(self: World, *args: Any, **kwargs: Any) -> None:
    failing_jobs._fail_if_armed("sums")
    _plain_sum(self, *args, **kwargs)


_plain_sum = World.all_reduce
World.all_reduce = _sum  # type: ignore[method-assign]


def finish(folder: str, plan: dict[str, Any], steps: int, world: int = 2) -> str:
    """Return the digest of this rank after an uninterrupted run."""
    return train(Run(folder, plan=plan, steps=steps, world=world))[0]


def main() -> None:
    """Launch the ranks, or run as a rank of torchrun."""
    run = Run.of(sys.argv[1])
    began = time.monotonic()
    results = autopart.launch(train, f"cpu:{run.world}", run, restarts=run.restarts, grace=run.grace)
    seconds = time.monotonic() - began
    rank = os.environ.get("RANK", "all")
    Path(run.folder, f"result-{rank}").write_text(json.dumps([*results, restart_count(), seconds]))


if __name__ == "__main__":
    main()

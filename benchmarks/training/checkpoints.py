"""Measure what saving costs, how fast checkpoints are written beside `dd`, and how long `verify` takes.

    python -m benchmarks.training.checkpoints [--millions 84] [--rounds 5]

Claims: (1) a block of 60 steps (about half a minute) that begins with `pipe.save(..., wait=False)` takes at most 5 %
longer than one without, and the peak of host memory grows by at most 1.1 times what a rank keeps; (2) `save_from`
writes at least 80 % of the bytes per second of `dd conv=fsync` of as many bytes to the same disk; (3) `autopart
checkpoint verify` of a checkpoint of 1 GB takes at most 3 s, the start of Python included.  A checkpoint has 12 bytes
per parameter (fp32, AdamW).

Blocks alternate on both ranks and end when the save has; `save_from` and dd alternate too.  Ratios are medians over
pairs of neighbours.  The benchmark needs an idle machine: ranks and the writing share its cores.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopart
from autopart.extras.checkpoints.part import Checkpoints
from benchmarks.shared.alternation import alternate
from benchmarks.shared.common import Spread, ratio, spread, write

CLUSTER = "cpu:2"
MOST_LONGER, MOST_COPIES, LEAST_OF_DD, MOST_VERIFY_S = 1.05, 1.1, 0.80, 3.0
MEMORY_STEPS = 8
"""Of a block whose peak of memory is taken."""
WARM_UPS, WRITES = 2, 9
"""Rounds of writing: those that do not count, and those that do."""

BYTES = 12
"""Of a parameter with AdamW in fp32: its value and two moments."""


@dataclass(frozen=True)
class Setting:
    """Sizes. parameters: of the model; width: of its layers; rows: of a batch; block: steps between two saves."""

    parameters: int
    width: int
    rows: int
    block: int
    rounds: int

    def model(self) -> nn.Sequential:
        """Return equal layers with about this number of parameters."""
        torch.manual_seed(0)
        layers = max(2, self.parameters // self.width**2)
        return nn.Sequential(*(nn.Linear(self.width, self.width, bias=False) for _ in range(layers)))

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets, alike on every rank."""
        torch.manual_seed(1)
        return torch.randn(self.rows, self.width), torch.randn(self.rows, self.width)


@dataclass(frozen=True)
class Training:
    """Blocks of steps on one rank. seconds: of blocks by kind; call_s: of each `save`."""

    seconds: dict[str, list[float]]
    call_s: list[float]


@contextmanager
def blocks(setting: Setting, folder: str, steps: int) -> Iterator[tuple[Callable[[bool], None], list[float], int]]:
    """Yield what runs a block of steps on this rank, with or without a save, after a first block; the seconds of each
    call of `save`; and the bytes that this rank keeps."""
    torch.set_num_threads(1)
    batch, calls = setting.batch(), []
    with autopart.compile(
        setting.model(), CLUSTER, sample=batch, loss_fn=nn.MSELoss(), stages=2, micro_batches=4, optimizer="adamw"
    ) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-4)

        def block(saves: bool) -> None:
            for number in range(steps):
                pipe.step(batch)
                optimizer.step()
                optimizer.zero_grad()
                if saves and number == 0:
                    began = time.perf_counter()
                    pipe.save(folder, optimizer, keep=1, wait=False)
                    calls.append(time.perf_counter() - began)
            # what is not written yet belongs to this block; nothing without a save
            pipe._core.part(Checkpoints).settle(pipe.session)

        block(False)
        yield (
            block,
            calls,
            sum(p.nbytes + sum(t.nbytes for t in optimizer.state[p].values()) for p in pipe.parameters()),
        )


def train(setting: Setting, folder: str) -> Training:
    """Alternate blocks of steps with and without a save in the background, on every rank."""
    with blocks(setting, folder, setting.block) as (block, calls, _):
        block(True)
        seconds = alternate({"saving": partial(block, True), "plain": partial(block, False)}, setting.rounds).seconds
        return Training(seconds, calls[-setting.rounds :])


def copies(setting: Setting, folder: str) -> float:
    """Return by how much the peak of this rank's memory grows with the first save, in sizes of what the rank keeps."""
    with blocks(setting, folder, MEMORY_STEPS) as (block, _, kept):
        return (-peak_of(partial(block, False)) + peak_of(partial(block, True))) / kept


def copies_of_ranks(setting: Setting, folder: str) -> list[float]:
    """Return the same of every rank. Freed memory goes back to the system at once there, as it does not else: what the
    allocator has in stock differs from block to block by as much as a tenth of it all."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
    try:
        found: list[float] = autopart.launch(copies, CLUSTER, setting, folder)
    finally:
        del os.environ["MALLOC_MMAP_THRESHOLD_"]
    return found


def peak_of(work: Callable[[], None]) -> int:
    """Return the peak of this process's resident memory in bytes while something runs (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    work()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def writing(setting: Setting, folder: Path) -> dict[str, list[float]]:
    """Return the seconds of `save_from` and of dd for as many bytes, in turn."""
    model = setting.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    nn.MSELoss()(model(setting.batch()[0]), setting.batch()[1]).backward()
    optimizer.step()
    source, copy = folder / "source", folder / "copy"
    found: dict[str, list[float]] = {"autopart": [], "dd": []}
    for number in range(WARM_UPS + WRITES):
        shutil.rmtree(folder / "run", ignore_errors=True)  # each deletes what it wrote before, just before it writes:
        began = time.perf_counter()  # memory that was used a moment ago is faster on a virtual machine
        saved = autopart.save_from(model, folder / "run", optimizer, step=number)
        found["autopart"].append(time.perf_counter() - began)
        if not number:
            source.write_bytes(bytes(size_of(saved)))
        copy.unlink(missing_ok=True)
        began = time.perf_counter()
        command = ["dd", f"if={source}", f"of={copy}", "bs=8M", "conv=fsync"]
        subprocess.run(command, check=True, capture_output=True)
        found["dd"].append(time.perf_counter() - began)
    source.unlink()
    copy.unlink()
    return {name: seconds[WARM_UPS:] for name, seconds in found.items()}


def verifying(setting: Setting, run: Path) -> list[float]:
    """Return the seconds of the command, the start of Python included."""
    found = []
    for _ in range(setting.rounds):
        began = time.perf_counter()
        command = [sys.executable, "-m", "autopart", "checkpoint", "verify", str(run)]
        subprocess.run(command, check=True, capture_output=True)
        found.append(time.perf_counter() - began)
    return found


def size_of(checkpoint: Path) -> int:
    """Return the bytes of all files of a checkpoint."""
    return sum(file.stat().st_size for file in checkpoint.iterdir())


def measured(setting: Setting, folder: Path) -> dict[str, Any]:
    """Run the three measurements; return the content of the result file."""
    trained: list[Training] = autopart.launch(train, CLUSTER, setting, str(folder / "train"))
    longer = ratio(trained[0].seconds["saving"], trained[0].seconds["plain"])
    shutil.rmtree(folder / "train")
    grown = max(copies_of_ranks(setting, str(folder / "memory")))
    shutil.rmtree(folder / "memory")
    wrote = writing(setting, folder)
    of_dd = ratio(wrote["dd"], wrote["autopart"])  # of bytes per second, since both write as many
    size = size_of(autopart.latest(folder / "run") or folder)
    verified = spread(verifying(setting, folder / "run"))
    return {
        "setting": vars(setting),
        "checkpoint_bytes": size,
        "block_s": {name: spread(seconds) for name, seconds in trained[0].seconds.items()},
        "block_saving_to_plain": longer,
        "save_call_s": spread(trained[0].call_s),
        "memory_grown_to_what_a_rank_keeps": grown,
        "write_s": {name: spread(seconds) for name, seconds in wrote.items()},
        "bytes_per_second_to_dd": of_dd,
        "verify_s": verified,
        "claims": claims(longer, grown, of_dd, verified, size),
    }


def claims(longer: Spread, grown: float, of_dd: Spread, verified: Spread, size: int) -> dict[str, bool]:
    """Return whether each claim held; that of `verify` by its seconds for 1 GB or more, never scaled up from less."""
    found = {
        "saving costs a step at most 5 %": longer.median <= MOST_LONGER,
        "saving keeps one copy of what the rank keeps": grown <= MOST_COPIES,
        "at least 80 % of the bytes per second of dd": of_dd.median >= LEAST_OF_DD,
    }
    if size >= 1_000_000_000:
        found["verify of 1 GB or more takes at most 3 s"] = verified.median <= MOST_VERIFY_S
    return found


def main() -> None:
    """Read the command line, measure, print and write the results."""
    parser = argparse.ArgumentParser(description="What saving, writing and verifying checkpoints cost.")
    parser.add_argument("--millions", type=int, default=84, help="million parameters; 84 make a checkpoint of 1 GB")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--block", type=int, default=60, help="steps from one save to the next")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; by default the one for temporary files")
    parser.add_argument("--no-record", action="store_true", help="print only")
    asked = parser.parse_args()
    setting = Setting(asked.millions * 1_000_000, asked.width, asked.rows, asked.block, asked.rounds)
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        found = measured(setting, Path(folder))
    for name, value in found.items():
        for line in value.items() if isinstance(value, dict) else [("", value)]:
            print(f"{name:32s}", *line)
    if not asked.no_record:
        print(f"wrote {write('checkpoints', found)}")


if __name__ == "__main__":
    main()

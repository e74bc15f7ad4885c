"""Train a small GPT-2 on the standard library's source files over two processes, and compare with one process.

    python examples/demo.py [--stages 2] [--steps 200]

Needs the transformers library; downloads nothing.  It prints the plan, checks the gradients of the first step, trains,
repeats the first 40 steps in one process, and ends with OK or FAILED (exit code 1).
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import autopart

VOCAB = 256  # byte values
LOSS_BAR = 3.0  # nats per byte, after enough steps
ENOUGH = 200  # steps after which the loss must be below the limit; after fewer it is only printed
LAST = 20  # number of steps averaged for the final loss
DRIFT = 1e-3  # allowed relative difference of losses from accumulated rounding


@dataclass(frozen=True)
class Setting:
    """Settings of the demo. compared: steps repeated in one process; every: steps between progress lines."""

    stages: int = 2
    steps: int = 200
    compared: int = 40
    every: int = 20
    layers: int = 4
    width: int = 128
    rows: int = 16
    seq: int = 64
    micro_batches: int = 4
    learning_rate: float = 3e-3
    warm_up: int = 10
    seed: int = 0

    @property
    def cluster(self) -> str:
        """A cluster with one process per stage."""
        return f"cpu:{self.stages}"

    def model(self) -> nn.Module:
        """Return a byte-level GPT-2 without dropout, with the same weights at every call."""
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        import transformers

        transformers.logging.set_verbosity_error()
        torch.manual_seed(self.seed)
        config = transformers.GPT2Config(
            vocab_size=VOCAB, n_positions=self.seq, n_embd=self.width, n_layer=self.layers, n_head=4, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config).train()

    def batches(self) -> Batches:
        """Return the data. Batch i is the same in every process."""
        return Batches(library_bytes(), self.rows, self.seq, self.seed)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return AdamW for this rank's parameters."""
        return torch.optim.AdamW(parameters, lr=self.learning_rate, betas=(0.9, 0.95))

    def rate(self, step: int) -> float:
        """Return the learning rate of a step: a short warm-up, then constant."""
        return self.learning_rate * min(1.0, (step + 1) / self.warm_up)


def library_bytes(limit: int = 4_000_000) -> torch.Tensor:
    """Read the first `limit` bytes of the standard library's modules, sorted by name, as int64 values."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = bytearray()
    for path in sorted(folder.glob("*.py")):
        found += path.read_bytes()
        if len(found) >= limit:
            break
    if len(found) < 100_000:
        sys.exit(f"found no source files of the standard library in {folder}")
    return torch.frombuffer(found[:limit], dtype=torch.uint8).long()


class Batches:
    """Random windows of a text. Batch i is the same in every process."""

    def __init__(self, text: torch.Tensor, rows: int, seq: int, seed: int = 0) -> None:
        self._text, self._rows, self._seq, self._seed = text, rows, seq, seed

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
        starts = torch.randint(len(self._text) - self._seq, (self._rows, 1), generator=generator)
        ids = self._text[starts + torch.arange(self._seq)]
        return {"input_ids": ids, "labels": ids.clone()}


# ---- two runs: same model, same data, same optimizer ---------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A finished run. first_step: the comparison of the first step with one process, for a run over ranks."""

    losses: tuple[float, ...]
    seconds: float
    first_step: autopart.Verification | None = None


def over_ranks(setting: Setting) -> Run:
    """Train the pipeline on every rank; rank 0 prints."""
    model, batches = setting.model(), setting.batches()
    stages, micros = setting.stages, setting.micro_batches  # one stage per rank; replicas might be faster
    with autopart.compile(model, setting.cluster, sample=batches[0], stages=stages, micro_batches=micros) as pipe:
        say = print_line if pipe.rank == 0 else print_nothing
        say(pipe.explain())
        say("first step against one process ...")
        first_step = autopart.verify(model, setting.cluster, sample=batches[0], plan=pipe.plan)
        optimizer = setting.optimizer(pipe.parameters())

        def step(number: int) -> float:
            loss = pipe.step(batches[number])
            pipe.clip_grad_norm_(1.0)
            update(optimizer, setting.rate(number))
            return loss.item()

        losses, seconds = loop(setting, setting.steps, step, say)
    return Run(losses, seconds, first_step)


def in_one_process(setting: Setting) -> Run:
    """Train the same model without autopart for the compared steps."""
    model, batches = setting.model(), setting.batches()
    optimizer = setting.optimizer(model.parameters())

    def step(number: int) -> float:
        loss: torch.Tensor = model(**batches[number]).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update(optimizer, setting.rate(number))
        return loss.item()

    losses, seconds = loop(setting, min(setting.compared, setting.steps), step, print_nothing)
    return Run(losses, seconds)


def update(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Take one optimizer step at this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()


def loop(
    setting: Setting, steps: int, step: Callable[[int], float], say: Callable[[str], None]
) -> tuple[tuple[float, ...], float]:
    """Run the steps and return the losses and the seconds they took."""
    losses: list[float] = []
    began = last = time.perf_counter()
    shown = 0
    for number in range(1, steps + 1):
        losses.append(step(number - 1))
        if number == 1 or number % setting.every == 0 or number == steps:
            now = time.perf_counter()
            rate = (number - shown) * setting.rows * setting.seq / (now - last)
            say(f"step {number:4d}   loss {losses[-1]:.3f}   {rate:7.0f} tokens/s")
            last, shown = now, number
    return tuple(losses), time.perf_counter() - began


def print_line(line: str) -> None:
    """Print a line and flush it."""
    print(line, flush=True)


def print_nothing(line: str) -> None:
    """Replace `print_line` on the other ranks."""


# ---- the verdict ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Both runs and the verdict."""

    pipeline: Run
    alone: Run

    @property
    def final_loss(self) -> float:
        """Mean loss of the last steps."""
        last = self.pipeline.losses[-LAST:]
        return sum(last) / len(last)

    @property
    def drift(self) -> float:
        """Largest relative difference between the losses of a step in both runs."""
        pairs = zip(self.pipeline.losses, self.alone.losses, strict=False)
        return max(abs(a - b) / abs(b) for a, b in pairs)

    @property
    def agree(self) -> bool:
        """Whether the gradients of the first step and the losses of all compared steps agree."""
        first = self.pipeline.first_step
        return first is not None and first.ok and self.drift <= DRIFT

    @property
    def judges_loss(self) -> bool:
        """Whether there were enough steps to bring the loss below the limit."""
        return len(self.pipeline.losses) >= ENOUGH

    @property
    def loss_fell(self) -> bool:
        """Whether the final loss is below the limit, or after too few steps whether it is finite."""
        return self.final_loss < LOSS_BAR if self.judges_loss else math.isfinite(self.final_loss)

    @property
    def ok(self) -> bool:
        """Whether the two runs agree and the loss fell."""
        return self.agree and self.loss_fell


def report(outcome: Outcome) -> str:
    """Return a text with both runs side by side and the verdict."""
    pipeline, alone = outcome.pipeline, outcome.alone
    first = pipeline.first_step
    assert first is not None
    lines = ["", "step   pipeline       one process    relative difference"]
    count, averaged = len(alone.losses), min(LAST, len(pipeline.losses))
    bar = f"below {LOSS_BAR}" if outcome.judges_loss else f"only judged after {ENOUGH} steps"
    for step in sorted({0, 1, 2, 4, 9, *range(19, count, 10), count - 1}):
        if step < count:
            a, b = pipeline.losses[step], alone.losses[step]
            lines.append(f"{step + 1:4d}   {a:<12.7f}   {b:<12.7f}   {abs(a - b) / abs(b):.1e}")
    if outcome.ok:
        verdict = "OK"
    else:
        verdict = f"FAILED: {'the loss did not fall' if outcome.agree else 'the pipeline and one process differ'}"
    lines += [
        "",
        f"loss, pipeline against one process: largest relative difference {outcome.drift:.1e} over {count} steps "
        f"(at most {DRIFT:g})",
        f"gradients of the first step: largest relative error {first.largest:.1e} over {len(first.gradients)} "
        f"parameters (at most {first.tolerance:g})",
        f"loss {pipeline.losses[0]:.3f} -> {outcome.final_loss:.3f} nats per byte, the mean of the last {averaged} "
        f"steps ({bar})",
        f"{len(pipeline.losses)} steps in {pipeline.seconds:.1f} s",
        verdict,
    ]
    return "\n".join(lines)


def tour(setting: Setting) -> Outcome | None:
    """Run the demo. Returns None on other ranks of a launcher such as torchrun."""
    leads = os.environ.get("RANK", "0") == "0"
    if leads:
        print_line(
            f"GPT-2 over bytes ({setting.layers} layers, width {setting.width}, random weights) on the standard "
            f"library's source files, {setting.stages} processes ..."
        )
    runs = autopart.launch(over_ranks, setting.cluster, setting)
    if not leads:
        return None
    print_line(f"\n{min(setting.compared, setting.steps)} steps again in one process ...")
    outcome = Outcome(runs[0], in_one_process(setting))
    print_line(report(outcome))
    return outcome


def main() -> None:
    """Read the command line and run the demo."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=2, help="number of stages, each in a local process")
    parser.add_argument("--steps", type=int, default=200, help="number of training steps")
    asked = parser.parse_args()
    outcome = tour(Setting(stages=asked.stages, steps=asked.steps))
    sys.exit(0 if outcome is None or outcome.ok else 1)


if __name__ == "__main__":
    main()

"""The demo: train a GPT-2 over local processes, train it again in one, and say whether they agree."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from autopart.api import launch
from autopart.cli.demo.train import Run, Setting, in_one_process, over_ranks

LOSS_BAR = 3.0  # nats per byte, after enough steps
ENOUGH = 200  # steps that bring the loss below the bar; after fewer it is shown and not judged
LAST = 20  # steps whose mean is the final loss
DRIFT = 1e-3  # of the loss: what rounding may grow to over the compared steps


@dataclass(frozen=True, slots=True)
class Outcome:
    """Both runs, and the verdict on them."""

    pipeline: Run
    alone: Run

    @property
    def final_loss(self) -> float:
        """Mean of the last steps."""
        last = self.pipeline.losses[-LAST:]
        return sum(last) / len(last)

    @property
    def drift(self) -> float:
        """Largest relative difference of the loss of one step."""
        pairs = zip(self.pipeline.losses, self.alone.losses, strict=False)
        return max(abs(a - b) / abs(b) for a, b in pairs)

    @property
    def gradients_agree(self) -> bool:
        """Whether the first step was exact."""
        return self.pipeline.first_step is not None and self.pipeline.first_step.ok

    @property
    def ok(self) -> bool:
        """Whether the two runs agree and, where there were steps enough, the loss fell."""
        return self.agree and self.loss_fell

    @property
    def agree(self) -> bool:
        """Whether the pipeline and one process do the same."""
        return self.gradients_agree and self.drift <= DRIFT

    @property
    def loss_fell(self) -> bool:
        """Whether the last loss is below the bar, or at least a number after too few steps to tell."""
        return self.final_loss < LOSS_BAR if self.judges_loss else math.isfinite(self.final_loss)

    @property
    def judges_loss(self) -> bool:
        """Whether there were as many steps as it takes to bring the loss below the bar."""
        return len(self.pipeline.losses) >= ENOUGH


def tour(setting: Setting) -> Outcome | None:
    """Run the demo; None on every rank but 0 when a launcher started this process."""
    leads = os.environ.get("RANK", "0") == "0"
    if leads:
        print(
            f"GPT-2 over bytes ({setting.layers} layers, width {setting.width}, random weights) on the standard "
            f"library's source files, {setting.stages} processes ...",
            flush=True,
        )
    runs = launch(over_ranks, setting.cluster, setting)
    if not leads:
        return None
    print(f"\n{min(setting.compared, setting.steps)} steps again in one process ...", flush=True)
    outcome = Outcome(runs[0], in_one_process(setting))
    print(report(outcome), flush=True)
    return outcome


def report(outcome: Outcome) -> str:
    """Loss per step side by side, and the verdict, as text."""
    pipeline, alone = outcome.pipeline, outcome.alone
    first = pipeline.first_step
    assert first is not None
    lines = ["", "step   pipeline       one process    relative difference"]
    count, averaged = len(alone.losses), min(LAST, len(pipeline.losses))
    bar = f"below {LOSS_BAR}" if outcome.judges_loss else f"not judged: that takes {ENOUGH} steps"
    for step in sorted({0, 1, 2, 4, 9, *range(19, count, 10), count - 1}):
        if step < count:
            a, b = pipeline.losses[step], alone.losses[step]
            lines.append(f"{step + 1:4d}   {a:<12.7f}   {b:<12.7f}   {abs(a - b) / abs(b):.1e}")
    lines += [
        "",
        f"loss, pipeline against one process: largest relative difference {outcome.drift:.1e} over {count} steps "
        f"(at most {DRIFT:g})",
        f"gradients of the first step: largest relative error {first.largest:.1e} over {len(first.gradients)} "
        f"parameters (at most {first.tolerance:g})",
        f"loss {pipeline.losses[0]:.3f} -> {outcome.final_loss:.3f} nats per byte, the mean of the last {averaged} "
        f"steps ({bar})",
        f"{len(pipeline.losses)} steps in {pipeline.seconds:.1f} s",
        _verdict(outcome),
    ]
    return "\n".join(lines)


def _verdict(outcome: Outcome) -> str:
    if outcome.ok:
        return "OK"
    return f"FAILED: {'the loss did not fall' if outcome.agree else 'the pipeline and one process differ'}"

"""The numbers of one training step, the same on every rank."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Metrics:
    """What the last training step took.

    step: its number, from 1.  loss: of the whole batch.  grad_norm: over all stages, as `clip_grad_norm_` returned it,
    else of the gradients that are there now; None without any.  skipped: whether it added no gradients.  loss_scale: of
    fp16, else None.

    step_s: seconds of `pipe.step` on the slowest rank.  predicted_s: simulated seconds of the same (all but the
    optimizer), None for another kind of batch than the plan is for.  rows_per_s.  tokens_per_s: padding included; None
    for a batch without a tensor of token ids.  flops_per_s: of the model, 3 times the operations of its forward (PaLM,
    appendix B; what is recomputed does not count, frozen weights do).  mfu: flops_per_s as a share of the peak rate of
    all devices of the cluster.

    bubble: share of the ranks' time without computes, None for a step that was not timed (the first call of
    `pipe.metrics` begins to).  predicted_bubble: simulated, optimizer included.  stage_s: of each stage, mean seconds
    of forward and backward of a micro-batch; () for a step that was not timed.  peak_bytes: of each rank: on a GPU the
    most that was allocated since the last call, on a CPU the most that the process ever had resident.
    predicted_peak_bytes: of each rank, what the plan charges; 0 where it runs nothing.
    """

    step: int
    loss: float
    grad_norm: float | None
    skipped: bool
    loss_scale: float | None
    step_s: float
    predicted_s: float | None
    rows_per_s: float
    tokens_per_s: float | None
    flops_per_s: float
    mfu: float
    bubble: float | None
    predicted_bubble: float
    stage_s: tuple[tuple[float, float], ...]
    peak_bytes: tuple[int, ...]
    predicted_peak_bytes: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers by name, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """Return one line."""
        parts = [f"step {self.step}", f"loss {self.loss:.4g}"]
        if self.grad_norm is not None:
            parts.append(f"gradient norm {self.grad_norm:.3g}")
        if self.loss_scale is not None:
            parts.append(f"scale {self.loss_scale:g}" + (" (skipped)" if self.skipped else ""))
        said = f" (predicted {self.predicted_s * 1e3:.1f})" if self.predicted_s else ""
        parts.append(f"{self.step_s * 1e3:.1f} ms{said}")
        rate, what = (self.rows_per_s, "rows") if self.tokens_per_s is None else (self.tokens_per_s, "tokens")
        parts.append(f"{rate:,.0f} {what}/s")
        parts.append(f"{self.flops_per_s / 1e12:.3g} TFLOP/s")
        parts.append(f"MFU {self.mfu:.1%}")
        if self.bubble is not None:
            parts.append(f"bubble {self.bubble:.0%}")
        parts.append(f"peak {max(self.peak_bytes, default=0) / 2**30:.2f} GiB")
        return ", ".join(parts)

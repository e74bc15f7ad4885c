"""Random combinations of everything that a plan may say about when and where: each compared with one process."""

from __future__ import annotations

import random

import torch

from autopart.ir.errors import RefusedError
from autopart.ir.program import BUCKET_BYTES
from autopart.passes.program.named import SEARCHED
from autopart.passes.program.orders import LOOP, V
from support.jobs.schedule_jobs import Placed, compare_placed
from support.models.token_models import SEQ

WORLD = 4
WHOLE = (
    "tied", "skips", "stack", "frozen", "mixed_grads", "late_inputs", "unused_grad", "aliases", "shared_by_all",
    "checkpointed", "two_outputs", "rotary", "batch_norm", "dropped",
)  # fmt: skip
SLICED = ("tril_softmax", "is_causal", "exp_of_scores", "with_padding", "documents")
"""Models, by whether sequences are cut."""
COUPLED, DRAWING, SUMMING = "batch_norm", "dropped", "skips"
DRAWN = ""
"""A schedule from outside, whose order is drawn."""


def drawn_case(seed: int) -> tuple[str, Placed, int, str, str]:
    """Return a model, how it is placed, the rows of a batch, the dtype and the transport."""
    draw = random.Random(seed)
    cut = draw.random() < 0.35
    name = draw.choice(SLICED if cut else WHOLE)
    workers = draw.choice((1, 2, 2, 4))
    replicas = 1 if name == COUPLED else draw.randint(1, WORLD // workers)
    per_rank, placement = draw.choice((1, 2, 2, 3)), draw.choice((LOOP, V))
    schedule = draw.choice(_schedules(per_rank, placement, cut=cut))
    in_turn = replicas > 1 and (per_rank == 1 or schedule == DRAWN) and schedule != SEARCHED
    first = draw.randint(3, SEQ - 3)
    half = not cut and name not in (COUPLED, "mixed_grads") and draw.random() < 0.2
    micros = draw.randint(1, 6)
    placed = Placed(
        per_rank, workers, placement, schedule, draw.choice((0.3, 0.7, 1.0)), seed, micros, replicas,
        draw.choice(("split", "turn")) if in_turn and micros >= replicas else "split", draw.choice((0, 1)),
        draw.choice((0.0, 0.0, 0.5, 1.0)), draw.choice(((first, SEQ - first), (4, 5, SEQ - 9))) if cut else (),
        draw.choice((64, BUCKET_BYTES)), "bf16" if half else "fp32",
    )  # fmt: skip
    rows = 2 * micros + 1 if name == COUPLED else draw.randint(max(3, micros), 10)  # a batch norm needs two rows
    return name, placed, rows, "float32" if half else "float64", draw.choice(("auto", "fake-nccl"))


def _schedules(per_rank: int, placement: str, *, cut: bool) -> tuple[str, ...]:
    """Return the schedules for these stages of each rank."""
    drawn = () if cut else (DRAWN, DRAWN, SEARCHED)
    if per_rank == 1:
        return "1f1b", "1f1b-deep", "gpipe", "zb-h1", "zb-h2", *drawn
    if placement == LOOP:
        return "interleaved", "gpipe", *drawn
    return ("gpipe", "zb-v", *drawn) if per_rank == 2 and not cut else ("gpipe", *drawn)


def random_cases(seeds: list[int]) -> list[tuple[str, bool | None]]:
    """Return for each seed the case and whether loss and gradients were exact, or None where it was refused."""
    return [_random_case(seed) for seed in seeds]


def _random_case(seed: int) -> tuple[str, bool | None]:
    name, placed, rows, dtype, transport = drawn_case(seed)
    text = f"seed {seed}: {name}, {rows} rows, {dtype}, {transport}, {placed}"
    against = "one device" if name == DRAWING or placed.precision != "fp32" else "one process"
    try:
        found, _ = compare_placed(name, placed, rows, dtype, against, transport)
    except RefusedError as refusal:
        assert "divided between replicas" in str(refusal) or "nothing to train" in str(refusal), f"{text}: {refusal}"
        return text, None
    except Exception as error:
        error.add_note(text)
        raise
    if found is None:  # of rank 0 alone
        return text, True
    # In half precision products over the fewer rows of a replica round differently, and so does the gradient of a value
    # with several readers, whose parts are added in the order of the stages.
    rounded = placed.precision != "fp32" and (placed.replicas > 1 or name == SUMMING)
    exact = max(abs(found.loss), found.gradient) <= 2e-2 if rounded else found.within(getattr(torch, dtype))
    return f"{text}: {found}", exact

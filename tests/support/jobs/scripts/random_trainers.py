"""Random runs of a Trainer that are ended at some step and resumed, beside those of a plain one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

MORE: tuple[dict[str, Any], ...] = (
    {"optim": "sgd", "optim_args": "momentum=0.9"}, {"optim": "adafactor"}, {"weight_decay": 0.3}, {"adam_beta2": 0.9},
    {"max_grad_norm": 0.1}, {"max_grad_norm": 0.0}, {"warmup_steps": 2}, {"learning_rate": 0.1}, {"seed": 7},
    {"include_num_input_tokens_seen": "all"}, {"eval_strategy": "steps", "eval_steps": 2}, {"eval_on_start": True},
    {"gradient_checkpointing": True}, {"save_total_limit": 2}, {"logging_steps": 3}, {"per_device_eval_batch_size": 3},
)  # fmt: skip
"""Arguments beside those of `resumable`."""


@dataclass(frozen=True)
class TrainerRun:
    """Arguments of a Trainer, and how far into the run it is ended: 0 at its first checkpoint, 1 at the last step."""

    args: tuple[tuple[str, Any], ...]
    ended: float

    def smaller(self) -> Iterator[TrainerRun]:
        """Yield runs with fewer arguments."""
        for i in range(len(self.args)):
            if not self.args[i][0].startswith("save_st"):
                yield TrainerRun((*self.args[:i], *self.args[i + 1 :]), self.ended)


def drawn_trainer(seed: int) -> TrainerRun:
    """Return the random run of a seed."""
    from support.trainer_runs import resumable

    random = Random(seed)
    args = resumable(random)
    for more in random.sample(MORE, random.randint(0, 4)):
        args |= more
    return TrainerRun(tuple(args.items()), random.random())


def difference(run: TrainerRun, folder: Path) -> str:
    """Return where a run on a pipeline differs from a plain one, or "". Raises what the pipe raises."""
    from support.trainer_runs import Piped, Watched, differs, interrupted, left, made

    args = dict(run.args)
    whole = made(Watched, folder / "whole", args, rows=11)
    whole.train()
    steps = whole.state.global_step
    first = min(args["save_steps"], steps)
    at = first + round(run.ended * (steps - first))
    plain, mine = (left(interrupted(kind, folder / kind.__name__, args, at)) for kind in (Watched, Piped))
    return "; ".join(differs(mine, plain))[:500]

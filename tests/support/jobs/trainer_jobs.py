"""Trainers on a pipeline over two ranks; each returns what the run left, to compare with a plain one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.trainer_runs import Piped, left, made


def trained(folder: str, args: dict[str, Any], pipeline: dict[str, Any], resume: str | None, again: bool) -> Any:
    """Train on this rank, as a script under a launcher does, once or twice; return what is left."""
    trainer = made(Piped, Path(folder), args, pipeline={"cluster": "cpu:2", **pipeline})
    trainer.train(resume_from_checkpoint=resume)
    if again:
        trainer.train()
    return left(trainer)

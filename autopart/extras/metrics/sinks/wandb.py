"""Weights & Biases: the run that the script has begun, or one of `wandb.init(**options)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PACKAGE, CLIENT = "wandb", "wandb"


class Sink:
    """A run."""

    def __init__(self, client: Any, options: Mapping[str, Any]) -> None:
        self._own = bool(options) or client.run is None
        self._run = client.init(**options) if self._own else client.run

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a step."""
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        """End the run if it was begun here."""
        if self._own:
            self._run.finish()

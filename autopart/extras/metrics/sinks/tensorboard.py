"""TensorBoard: files of events in a folder, `log_dir`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PACKAGE, CLIENT = "tensorboard", "torch.utils.tensorboard"


class Sink:
    """A writer of events."""

    def __init__(self, client: Any, options: Mapping[str, Any]) -> None:
        self._writer = client.SummaryWriter(**options)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a step."""
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

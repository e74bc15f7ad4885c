"""Write metrics to a file of JSON lines and, where it is installed, to TensorBoard."""

from __future__ import annotations

import json
import math
import os
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from autopart.extras.metrics.metrics import Metrics
from autopart.ir.errors import UsageError

SCALARS = (
    "loss", "grad_norm", "loss_scale", "step_s", "predicted_s", "rows_per_s", "tokens_per_s", "flops_per_s", "mfu",
    "bubble",
)  # fmt: skip
"""The metrics that TensorBoard is given, and with them the most memory of a rank."""
INSTALL = 'pip install "autopart[tensorboard]"'


class Measured(Protocol):
    """What the log needs of a pipe."""

    @property
    def is_main(self) -> bool: ...

    @property
    def steps(self) -> int: ...

    def metrics(self) -> Metrics: ...


class MetricsLog:
    """Writes the metrics of a pipe, a JSON object a line; rank 0 alone writes.

        with autopart.MetricsLog("run.jsonl", every=10) as log:
            for batch in batches:
                pipe.step(batch)
                log.add(pipe, lr=scheduler.get_last_lr()[0])
                optimizer.step()

    path: of the file, to which lines are added.  every: steps from one line to the next.  tensorboard: the folder of
    its files; None: `path` without its ending where TensorBoard is installed; False: none.  Raises UsageError for a
    file that cannot be written, and for a folder where TensorBoard is not installed.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, every: int = 1, tensorboard: str | os.PathLike[str] | bool | None = None
    ) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise UsageError(
                f"every is {every!r}", where="MetricsLog", fix="pass the number of steps between two lines"
            )
        self._path, self._every = Path(path), every
        self._folder = _folder(self._path, tensorboard)
        self._file: TextIO | None = None
        self._board: Any = None

    def add(self, pipe: Measured, **more: float | str | bool | None) -> Metrics | None:
        """Write the metrics of the last step and what else is given, and return them; None between two lines.

        Collective with every n-th step: call it on all ranks after each step.  more: numbers or texts, such as lr=.
        """
        if pipe.steps % self._every:
            return None
        metrics = pipe.metrics()
        if pipe.is_main:
            self._write(metrics, more)
        return metrics

    def _write(self, metrics: Metrics, more: dict[str, Any]) -> None:
        found = metrics.as_dict()
        if twice := sorted(found.keys() & more.keys()):
            raise UsageError(
                f"{', '.join(twice)} is a metric already", where="MetricsLog.add", fix="give it another name"
            )
        try:
            line = json.dumps(_finite({**found, **more}), allow_nan=False)
            if self._file is None:
                self._file = self._path.open("a", encoding="utf-8")
            self._file.write(line + "\n")
            self._file.flush()
        except (OSError, TypeError) as error:
            raise UsageError(f"cannot write metrics to {self._path}", why=str(error)) from error
        if self._folder is not None:
            self._draw(metrics, more)

    def _draw(self, metrics: Metrics, more: dict[str, Any]) -> None:
        if self._board is None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(self._folder)
        found = metrics.as_dict()
        numbers = {name: found[name] for name in SCALARS} | {"peak_bytes": max(metrics.peak_bytes, default=0)}
        for name, number in {**numbers, **more}.items():
            if isinstance(number, int | float):
                self._board.add_scalar(name, number, metrics.step)

    def close(self) -> None:
        """Close the files."""
        for each in (self._file, self._board):
            if each is not None:
                each.close()
        self._file = self._board = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _folder(path: Path, tensorboard: str | os.PathLike[str] | bool | None) -> Path | None:
    """Return the folder of TensorBoard's files, None for none."""
    installed = find_spec("tensorboard") is not None
    if tensorboard is False or (tensorboard is None and not installed):
        return None
    if not installed:
        raise UsageError("TensorBoard is not installed", where="MetricsLog(tensorboard=)", fix=INSTALL)
    return path.with_suffix("") if tensorboard is None or tensorboard is True else Path(tensorboard)


def _finite(content: Any) -> Any:
    """Return the content with texts for numbers that JSON lacks."""
    if isinstance(content, dict):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return str(content) if isinstance(content, float) and not math.isfinite(content) else content

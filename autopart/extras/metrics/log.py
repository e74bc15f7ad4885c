"""Write metrics to a file of JSON lines, and to trackers of experiments."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TextIO, runtime_checkable

from autopart.extras.metrics.metrics import Metrics
from autopart.extras.metrics.sinks import Sink, installed, opened, require_installed
from autopart.ir.errors import WRITABLE, UsageError
from autopart.state.misuse_guards import short_tracebacks


@runtime_checkable
class Measured(Protocol):
    """What the log needs of a pipe."""

    @property
    def is_main(self) -> bool: ...

    @property
    def steps(self) -> int: ...

    def metrics(self) -> Metrics: ...


@short_tracebacks
class MetricsLog:
    """Writes the metrics of a pipe, a JSON object a line; rank 0 alone writes.

        with autopart.MetricsLog("run.jsonl", every=10) as log:
            for batch in batches:
                pipe.step(batch)
                log.add(pipe, lr=scheduler.get_last_lr()[0])
                optimizer.step()

    path: of the file, to which lines are added.  every: steps from one line to the next.  tensorboard: the folder of
    its files; None: `path` without its ending where TensorBoard is installed; False: none.  to: other trackers
    ("wandb", "mlflow", "trackio"), in the run that the script has begun; or by name the options with which their
    clients begin one.  Raises UsageError for a file that cannot be written, and for a tracker that is not installed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every: int = 1,
        tensorboard: str | os.PathLike[str] | bool | None = None,
        to: str | Iterable[str] | Mapping[str, Mapping[str, Any]] = (),
    ) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise UsageError(
                f"every is {every!r}", where="MetricsLog", fix="pass the number of steps between two lines"
            )
        self._path, self._every = Path(path), every
        self._to: dict[str, Mapping[str, Any]] = {}
        if tensorboard or (tensorboard is None and installed("tensorboard")):
            own = tensorboard is None or tensorboard is True
            self._to["tensorboard"] = {"log_dir": self._path.with_suffix("") if own else tensorboard}
        for name in [to] if isinstance(to, str) else to:
            self._to[name] = to[name] if isinstance(to, Mapping) else {}
        for name in self._to:
            require_installed(name)
        self._file: TextIO | None = None
        self._sinks: dict[str, Sink] = {}

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
            raise UsageError(f"cannot write metrics to {self._path}", why=str(error), fix=WRITABLE) from error
        numbers = {name: number for name, number in {**found, **more}.items() if isinstance(number, int | float)}
        del numbers["step"]
        numbers["peak_bytes"] = max(metrics.peak_bytes, default=0)
        for name, options in self._to.items():
            if name not in self._sinks:
                self._sinks[name] = opened(name, options)
            self._sinks[name].write(metrics.step, numbers)

    def close(self) -> None:
        """Close the files, and end the runs that were begun here."""
        for each in (self._file, *self._sinks.values()):
            if each is not None:
                each.close()
        self._file, self._sinks = None, {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _finite(content: Any) -> Any:
    """Return the content with texts for numbers that JSON lacks."""
    if isinstance(content, dict):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return str(content) if isinstance(content, float) and not math.isfinite(content) else content

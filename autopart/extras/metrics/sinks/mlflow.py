"""MLflow: the run that the script has begun, or one of `mlflow.start_run(**options)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PACKAGE, CLIENT = "mlflow", "mlflow"


class Sink:
    """A run."""

    def __init__(self, client: Any, options: Mapping[str, Any]) -> None:
        self._client, self._own = client, bool(options) or client.active_run() is None
        self._run = client.start_run(**options) if self._own else client.active_run()

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a step."""
        self._client.log_metrics(dict(numbers), step=step, run_id=self._run.info.run_id)

    def close(self) -> None:
        """End the run if it was begun here."""
        if self._own:
            self._client.end_run()

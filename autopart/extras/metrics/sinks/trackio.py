"""trackio: a run of `trackio.init(**options)`, or the one that the script has begun."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PACKAGE, CLIENT = "trackio", "trackio"


class Sink:
    """A run."""

    def __init__(self, client: Any, options: Mapping[str, Any]) -> None:
        current = client.context_vars.current_run.get()
        self._own = bool(options) or current is None
        self._client, self._run = client, client.init(**options) if self._own else current

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a step."""
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        """End the run if it was begun here."""
        if self._own:
            self._client.finish()

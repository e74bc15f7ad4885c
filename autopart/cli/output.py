"""Print results on stdout of rank 0, and progress on stderr."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from typing import Annotated

import typer

from autopart.ir.errors import printable

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")]


def prints_results() -> bool:
    """Return whether this process prints results: under a launcher only rank 0 does."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print a result as text.  What comes from files may hold signs that a terminal obeys: they are escaped."""
    typer.echo(printable(text, keep="\n\t"), err=err, nl=nl)


def print_json(content: Mapping[str, object]) -> None:
    """Print a result as one JSON object; NaN and infinite numbers become null."""
    typer.echo(json.dumps(_finite(content), indent=1))


def _finite(content: object) -> object:
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


class Progress:
    """Report on stderr a search that takes longer than a second."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()

    def __call__(self, what: str, best_ns: int, bound_ns: int) -> None:
        """Print the phase, the best step so far and the lower bound, at most every half second."""
        now = time.monotonic()
        if now - self._began < 1.0 or now - self._last < 0.5:
            return
        self._last = now
        best = f", best step {best_ns / 1e6:.2f} ms" if best_ns else ""
        bound = f", lower bound {bound_ns / 1e6:.2f} ms" if bound_ns else ""
        print(f"{now - self._began:6.1f} s  {what}{best}{bound}", file=sys.stderr)

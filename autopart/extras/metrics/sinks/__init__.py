"""Where metrics go besides the file of a log, one module for each client.

May enter: a module with the name that users write, which has `PACKAGE`, `CLIENT` (what of it is imported) and a
`Sink`.  It is deleted with its file.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, cast

from autopart.ir.errors import UsageError

SINKS = tuple(sorted(found.name for found in pkgutil.iter_modules(__path__)))


class Sink(Protocol):
    """Where numbers of a step are written."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a step."""

    def close(self) -> None:
        """Write what is left, and end what was begun here."""


def installed(name: str) -> bool:
    """Return whether there is a sink of this name, with its client."""
    return name in SINKS and find_spec(_module(name).PACKAGE) is not None


def require_installed(name: str) -> None:
    """Raise UsageError for a sink that there is not, or whose client is not installed."""
    if name not in SINKS:
        raise UsageError(f"{name!r} is no sink of metrics", where="MetricsLog(to=)", fix=f"pass {', '.join(SINKS)}")
    if not installed(name):
        raise UsageError(f"{name} is not installed", where="MetricsLog(to=)", fix=f"pip install {name}")


def opened(name: str, options: Mapping[str, Any]) -> Sink:
    """Return a sink.  options: of the call of its client that begins a run."""
    module = _module(name)
    return cast(Sink, module.Sink(import_module(module.CLIENT), options))


def _module(name: str) -> Any:
    return import_module(f"{__name__}.{name}")

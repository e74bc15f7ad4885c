"""Random numbers of Python and numpy in forward(): a capture would draw them once and for ever."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from autopart.capture.source_location import user_line
from autopart.ir.errors import RefusedError

_READS = frozenset({"getstate", "get_state", "seed", "setstate", "set_state"})


@contextlib.contextmanager
def no_random_numbers() -> Iterator[None]:
    """Raises RefusedError after the body when it drew from the generators of `random` or `numpy.random`, naming the
    line where it can be told.  On this thread alone; one thread at a time."""
    lines: list[str] = []
    numpy = sys.modules.get("numpy")
    before = _states(numpy)
    with contextlib.ExitStack() as patches:
        for home in (random, *([numpy.random] if numpy is not None else [])):
            for name, draw in _draws(home):
                patches.enter_context(mock.patch.object(home, name, _noted(draw, lines)))
        yield
    drawn = [name for name, state in _states(numpy).items() if state != before[name]]
    if drawn:
        raise RefusedError(
            f"forward() draws random numbers from {drawn[0]}",
            where=lines[0] if lines else "",
            why="they would be drawn once, while the model is captured, and stay the same in every step",
            fix="draw them with torch (torch.rand, torch.randint), which is carried over; or outside of forward(), and "
            "pass them with the batch",
        )


def _draws(home: Any) -> list[tuple[str, Callable[..., Any]]]:
    """The functions of a module that draw from its own generator: they are methods of it."""
    return [
        (name, value)
        for name, value in vars(home).items()
        if callable(value) and not isinstance(value, type) and hasattr(value, "__self__") and name not in _READS
    ]


def _noted(draw: Callable[..., Any], lines: list[str]) -> Callable[..., Any]:
    tracer = threading.get_ident()

    def drawing(*args: Any, **kwargs: Any) -> Any:
        if not lines and threading.get_ident() == tracer:
            lines.append(user_line(traceback.extract_stack()))
        return draw(*args, **kwargs)

    return drawing


def _states(numpy: Any) -> dict[str, Any]:
    """The states of the generators that everybody shares, comparable."""
    found: dict[str, Any] = {"Python's random module": random.getstate()}
    if numpy is not None:
        found["numpy.random"] = repr(numpy.random.get_state(legacy=False)["state"])
    return found

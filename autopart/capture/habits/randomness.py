"""Random numbers of Python and numpy in forward(): a capture would draw them once and for ever.

What is drawn after forward() itself has seeded the generator is the same in every forward, and so may be captured.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

from autopart.capture.source_location import user_line
from autopart.ir.errors import RefusedError

_SETS = frozenset({"seed", "setstate", "set_state"})
_READS = frozenset({"getstate", "get_state"})


@contextlib.contextmanager
def no_random_numbers() -> Iterator[None]:
    """Raises RefusedError after the body when it drew from the generators of `random` or `numpy.random` before it
    seeded them, naming the line where it can be told.  On this thread alone; one thread at a time."""
    lines: list[str] = []
    numpy = sys.modules.get("numpy")
    homes = {"Python's random module": random} | ({} if numpy is None else {"numpy.random": numpy.random})
    before = {name: _state(home) for name, home in homes.items()}
    drawn: list[str] = []
    seeded: set[str] = set()

    def note(name: str) -> None:
        if name not in seeded and _state(homes[name]) != before[name]:
            drawn.append(name)

    def called(name: str, function: str, given: bool) -> None:
        if function in _SETS and given:
            note(name)
            seeded.add(name)
        elif function not in _SETS and not lines and name not in seeded:
            lines.append(user_line(traceback.extract_stack()))

    with contextlib.ExitStack() as patches:
        for name, home in homes.items():
            for function, call in _calls(home):
                own = _noted(call, partial(called, name, function))
                patches.enter_context(mock.patch.object(home, function, own))
        yield
    for name in homes:
        note(name)
    if drawn:
        raise RefusedError(
            f"forward() draws random numbers from {drawn[0]}",
            where=lines[0] if lines else "",
            why="they would be drawn once, while the model is captured, and stay the same in every step",
            fix="draw them with torch (torch.rand, torch.randint), which is carried over; or outside of forward(), and "
            "pass them with the batch",
        )


def _calls(home: Any) -> list[tuple[str, Callable[..., Any]]]:
    """The functions of a module that draw from its own generator, or set it: they are methods of it."""
    return [
        (name, value)
        for name, value in vars(home).items()
        if name in _SETS
        or (callable(value) and not isinstance(value, type) and hasattr(value, "__self__") and name not in _READS)
    ]


def _noted(call: Callable[..., Any], called: Callable[[bool], None]) -> Callable[..., Any]:
    """`call`, which tells `called` before it runs, and whether it is given anything."""
    tracer = threading.get_ident()

    def noted(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == tracer:
            called(any(value is not None for value in (*args, *kwargs.values())))
        return call(*args, **kwargs)

    return noted


def _state(home: Any) -> Any:
    """The state of the generator that everybody shares, comparable."""
    return random.getstate() if home is random else repr(home.get_state(legacy=False)["state"])

"""Random numbers of Python and numpy in forward(): a capture would draw them once and keep them in every step.

Numbers drawn after forward() has seeded the generator are the same in every forward(), and may be captured.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy

from autopart.capture.source_location import user_line
from autopart.ir.errors import RefusedError

_SEEDS = frozenset({"seed", "setstate", "set_state"})
_READS = frozenset({"getstate", "get_state"})


def _numpy_state() -> dict[str, Any]:
    """Return what decides the next number of numpy.random."""
    state: Any = numpy.random.get_state(legacy=False)["state"]
    return {name: part.tobytes() if isinstance(part, numpy.ndarray) else part for name, part in state.items()}


_STATES: dict[str, Callable[[], Any]] = {"random": random.getstate, "numpy.random": _numpy_state}
_unseeded: ContextVar[dict[str, Any]] = ContextVar("autopart_unseeded")
"""The modules whose generator forward() has not seeded, with the generator's state when forward() began."""


@contextlib.contextmanager
def no_random_numbers(_: Any) -> Iterator[None]:
    """Raise RefusedError when the body draws from the generators of `random` or `numpy.random` before it seeds them."""
    unseeded = {module: state() for module, state in _STATES.items()}
    token = _unseeded.set(unseeded)
    try:
        yield
    finally:
        _unseeded.reset(token)
    for module in unseeded:
        _check_unchanged(module, unseeded, where="")


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield all functions that draw from the generators of these modules, or seed them: the name of each, and what
    replaces it while a model is traced."""
    for module, home, first in (("random", random, "random"), ("numpy.random", numpy.random, "rand")):
        generator = vars(home)[first].__self__
        for name, value in vars(home).items():
            if name in _SEEDS or (getattr(value, "__self__", None) is generator and name not in _READS):
                yield f"{module}.{name}", _checked(module, name)


def _checked(module: str, name: str) -> Callable[..., Any]:
    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        unseeded = _unseeded.get({})
        if module in unseeded:
            where = user_line()
            if name not in _SEEDS or all(value is None for value in (*args, *kwargs.values())):
                raise _refusal(module, where)
            _check_unchanged(module, unseeded, where)
            del unseeded[module]
        return original(*args, **kwargs)

    return call


def _check_unchanged(module: str, before: dict[str, Any], where: str) -> None:
    if _STATES[module]() != before[module]:
        raise _refusal(module, where)


def _refusal(module: str, where: str) -> RefusedError:
    source = "Python's random module" if module == "random" else module
    return RefusedError(
        f"forward() draws random numbers from {source}",
        where=where,
        why="they would be drawn once, while the model is captured, and stay the same in every step",
        fix="draw them with torch (torch.rand, torch.randint), which is captured; or outside of forward(), and pass "
        "them with the batch",
    )

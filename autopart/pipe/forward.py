"""A verb of a part as a method of the pipe, and what a part tells as a property: same name, types, documentation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Never, ParamSpec, TypeVar

from autopart.ir.errors import short_errors
from autopart.state.core import Part

A = ParamSpec("A")
P = TypeVar("P", bound=Part)
R = TypeVar("R")

if TYPE_CHECKING:

    class Fact(Generic[R]):
        """The type of a property that is read from a part."""

        def __get__(self, pipe: Any, kind: type | None = None) -> R: ...
        def __set__(self, pipe: Any, value: Never) -> None: ...


def verb(part: type[P], method: Callable[Concatenate[P, A], R]) -> Callable[Concatenate[Any, A], R]:
    """Return a method of the pipe that calls one of its part; where that returns the part, it returns the pipe."""

    @functools.wraps(method)
    def call(pipe: Any, *args: Any, **kwargs: Any) -> Any:
        mine = pipe._core.part(part)
        found = method(mine, *args, **kwargs)
        return pipe if found is mine else found

    found: Any = short_errors(call)
    return found  # type: ignore[no-any-return]


def fact(part: type[P], method: Callable[[P], R]) -> Fact[R]:
    """Return a property of the pipe that calls a method of its part."""

    @functools.wraps(method)
    def read(pipe: Any) -> R:
        return method(pipe._core.part(part))

    found: Any = property(short_errors(read), doc=method.__doc__)
    return found  # type: ignore[no-any-return]

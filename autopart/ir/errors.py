"""The errors that users meet, all derived from `AutopartError`.

Every message has the same order: what failed, where (module path, file:line), why, what to do, and where the documents
speak of its type.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import traceback
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType, UnionType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
WRITABLE = "pass the path of a file in a folder that exists and that you may write to"


def printable(text: str, *, keep: str = "") -> str:
    """Escape every character that is not printable as Python does (`\\x1b`, `\\u202e`), except those in `keep`.

    Not printable are control characters, marks that change the direction of writing, and lone surrogates: names and
    notes come from files, and may hold escape sequences of a terminal.
    """
    if text.isprintable():
        return text
    shown = (c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii") for c in text)
    return "".join(shown)


def shortened(text: str, most: int = 60) -> str:
    """Return the text, printable and cut to `most` characters."""
    shown = printable(text[: most + 1])
    return shown if len(shown) <= most else shown[: most - 3] + "..."


class AutopartError(Exception):
    """Base of all errors raised on purpose.

    what: one line without a full stop.  where: module path and file:line of the user's code.  why: the reason.  fix:
    what to do, ready to be typed.  Characters that a terminal would interpret are escaped (`printable`).  The message
    ends with the heading of its type in docs/errors.md (`page_of`).
    everywhere: whether all ranks raise it, so that one of them may print it for all.
    """

    everywhere: bool = False

    def __init__(self, what: str, *, where: str = "", why: str = "", fix: str = "") -> None:
        self.what, self.where, self.why, self.fix = (printable(text, keep="\n\t") for text in (what, where, why, fix))
        more = {"where": self.where, "why": self.why, "fix": self.fix, "see": page_of(type(self))}
        super().__init__("\n".join([self.what, *(f"  {label}: {text}" for label, text in more.items() if text)]))

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(type(self), where=self.where, why=self.why, fix=self.fix), (self.what,)


def page_of(kind: type[AutopartError]) -> str:
    """Return the heading of a type of error in the documents; a type of another module has that of its base here."""
    own = next(each for each in kind.__mro__ if each.__module__ == __name__)
    return f"docs/errors.md#{own.__name__.lower()}"


class UsageError(AutopartError, ValueError):
    """An argument, option, batch or cluster that cannot work."""


class BatchError(UsageError):
    """A batch that does not fit the model, the plan or the micro-batches."""


class ClusterError(UsageError):
    """A cluster description that cannot be read, or does not match what the launcher started."""


class CaptureError(AutopartError):
    """The model cannot be captured: Python control flow depends on tensor data, or no scalar loss is returned."""


class RefusedError(AutopartError):
    """The model was captured, but running it as a pipeline would not be exact.

    value: the name of a value that replicas cannot divide, if that is the reason; set only in the raising process.
    """

    value: str = ""


class OtherProgramError(RefusedError):
    """The model runs other operations on one number of rows than on another, most often on a single row."""


class PlanError(AutopartError):
    """A plan that is malformed, or was made for something else."""


class PlanFileError(PlanError):
    """Text that is not a valid plan; `where` is the JSON path."""


class InfeasibleError(PlanError):
    """No plan exists within the limits."""


class CheckpointError(AutopartError):
    """A checkpoint that cannot be written or read, or does not fit what it is loaded into; `where` is the file."""


class GraphError(AutopartError):
    """An invariant of `Graph` is broken: a bug in autopart."""


class ProgramError(AutopartError):
    """A program that would hang, lose a value or exceed its in-flight limit."""


class RunError(AutopartError, RuntimeError):
    """Something failed while the ranks were running."""


class StageError(RunError):
    """An op of the user's model raised inside a stage."""


class NonFiniteError(RunError):
    """Gradients of a step are infinite or NaN.  The step has changed nothing; the pipe can be used further."""


class WorkerError(RunError):
    """A process died or a peer stopped answering.  told_by: the rank that reported it first, if this one was told."""

    told_by: int | None = None


class UsageWarning(UserWarning):
    """A call that torch or the script makes, and that does not do what it does without a pipe."""


class ArgumentsError(UsageError, TypeError):
    """A call without an argument that it needs, or with one of a name or type that it does not take."""


def short_errors(function: F) -> F:
    """Wrap a public function so that errors raised on purpose do not show internal frames, and a call that fails with
    arguments of another number, name or type than it takes is refused with those.

    The whole traceback goes to the logger "autopart" at level DEBUG.  An error that ends the script is printed once
    (`printed`).
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (GraphError, ProgramError):
            raise
        except AutopartError as error:
            logging.getLogger("autopart").debug("raised to the caller", exc_info=True)
            _print_like_this()
            raise error.with_traceback(None) from error.__cause__
        except (TypeError, AttributeError, ValueError) as error:
            if (misfit := _misfit(function, args, kwargs)) is None:
                raise
            _print_like_this()
            raise misfit from error

    return call  # type: ignore[return-value]


def _misfit(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> ArgumentsError | None:
    """Return how arguments do not fit a function, by number, name or type; None if they do."""
    taken = inspect.signature(function)
    name = function.__qualname__.removesuffix(".__init__").split(".")[-1]
    names = [str(p.replace(annotation=p.empty)) for own, p in taken.parameters.items() if own != "self"]
    fix = f"call {name}({', '.join(names)})"
    try:
        given = taken.bind(*args, **kwargs).arguments
    except TypeError as error:
        return ArgumentsError(f"{name}: {error}", fix=fix)
    hints = typing.get_type_hints(function)
    for own, value in given.items():
        if taken.parameters[own].kind in (_NAMED, _EITHER) and not _fits(value, hints.get(own, Any)):
            wanted = taken.parameters[own].annotation
            return ArgumentsError(f"{name}: {own} is a {type(value).__name__}", why=f"it takes {wanted}", fix=fix)
    return None


_NAMED, _EITHER = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD


def _fits(value: object, hint: Any) -> bool:
    """Return whether a value may be of an annotated type; True where that cannot be told."""
    kind = typing.get_origin(hint) or hint
    if kind in (typing.Union, UnionType):
        return any(_fits(value, each) for each in typing.get_args(hint))
    if kind is float:
        return isinstance(value, int | float)
    try:
        return not isinstance(kind, type) or isinstance(value, kind)
    except TypeError:  # a protocol
        return True


HOME = str(Path(__file__).parents[1]) + os.sep
"""Where our own frames are."""
TORCH = f"{os.sep}site-packages{os.sep}torch{os.sep}"
PYTHON = str(Path(os.__file__).parent) + os.sep
"""Where torch's frames are, and Python's; packages that are installed below it are the user's."""


def printed(error: AutopartError, trace: TracebackType | None) -> str:
    """Return what this process prints of an error that ends the script: the user's lines and the message, and of what
    caused it the lines in the user's own code.

    Of ranks that a launcher started, rank 0 prints what all of them raise.  Another rank prints an error that only it
    may have, in one line, or as a whole if something of its own failed while it ran.
    """
    rank = os.environ.get("RANK", "0")
    if rank != "0" and error.everywhere:
        return ""
    if rank != "0" and (not isinstance(error, RunError) or isinstance(error, WorkerError)):
        return f"rank {rank}: {type(error).__name__}: {error.what}\n"
    who = f"rank {rank}: " if "RANK" in os.environ else ""
    lines = [*_users_frames(trace), who, *traceback.format_exception_only(type(error), error)]
    cause = error.__cause__
    if cause is not None and not isinstance(cause, AutopartError) and (frames := _users_frames(cause.__traceback__)):
        lines = [*frames, *traceback.format_exception_only(type(cause), cause), "\nThat caused:\n\n", *lines]
    return "".join(lines)


def _users_frames(trace: TracebackType | None) -> list[str]:
    """Return the frames of a traceback that are neither ours nor torch's nor Python's, as text."""
    own = []
    for frame in traceback.extract_tb(trace):
        library = frame.filename.startswith(PYTHON) and "site-packages" not in frame.filename
        if not (library or frame.filename.startswith(HOME) or TORCH in frame.filename):
            own.append(frame)
    return ["Traceback (most recent call last):\n", *traceback.format_list(own)] if own else []


def _print_like_this() -> None:
    """Let errors raised on purpose be printed by `printed` if they end the script.  A hook of the user's stays."""
    before = sys.excepthook
    if before is not sys.__excepthook__ and not before.__module__.startswith("torch."):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, AutopartError) and not isinstance(error, GraphError | ProgramError):
            sys.stderr.write(printed(error, trace))
        else:
            before(kind, error, trace)

    sys.excepthook = hook

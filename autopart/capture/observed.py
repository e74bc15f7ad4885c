"""What forward() reads, and changes, of the Python around its tensors while it is traced.

A capture freezes every number, text and container that the model's Python read.  What was read is noted, so that a
change of it can be seen before a step (`watch`); what forward() itself changes from one call to the next cannot be
frozen, and is refused.  Attributes that are never read cost nothing.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopart.capture.fingerprint import described, fingerprint, from_library, is_plain
from autopart.capture.snapshot import ABSENT
from autopart.capture.surroundings import Reading, surroundings
from autopart.ir.errors import RefusedError

_OWN = frozenset(vars(nn.Module()))
"""What every module has: parameters, buffers, hooks, its training flag.  They are looked at in other ways."""


@dataclass(frozen=True)
class Asked:
    """What was read of that which every module has.  In sets that grow: nothing is forgotten."""

    training: set[nn.Module] = field(default_factory=set)
    order: set[nn.Module] = field(default_factory=set)

    def update(self, other: Asked) -> None:
        """And what another capture read."""
        self.training.update(other.training)
        self.order.update(other.order)


@dataclass
class Observed:
    """Attributes of modules that forward() read before it wrote them.

    read: module and name; absent ones too, as `hasattr` reads them.  asked: modules whose training flag it read, and
    those whose parameters, buffers or modules it went through in their order.  changed: the refusals of those that it
    left changed.
    """

    read: set[tuple[nn.Module, str]] = field(default_factory=set)
    asked: Asked = field(default_factory=Asked)
    changed: list[RefusedError] = field(default_factory=list)


_INHERITED = (types.FunctionType, dict, list, set)
"""What modules may have of their class, next to plain values, that an attribute of their own would hide."""


class _Seen:
    """first: what stood at the first read; written: what was written before it was read."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.paths = {id(module): (path, module) for model in models for path, module in model.named_modules()}
        self.asked = Asked()
        self.first: dict[tuple[int, str], tuple[Any, Any]] = {}
        self.written: set[tuple[int, str]] = set()
        self.contents: list[tuple[Any, Any]] = []

    def put_back(self) -> None:
        """Give the containers that were read their entries again: what was added while tracing is no tensor of use."""
        for container, before in self.contents:
            if type(container) is list:
                container[:] = before
            else:
                container.clear()
                container.update(before)

    def note_own(self, module: nn.Module, name: str) -> None:
        """A read of what every module has; whoever takes all attributes of a module at once reads it all."""
        if id(module) in self.paths:
            if name in ("training", "__dict__"):
                self.asked.training.add(module)
            if name != "training":
                self.asked.order.add(module)

    def note(self, module: nn.Module, name: str) -> None:
        """A read of anything else."""
        key = (id(module), name)
        if key in self.first or key in self.written or name in _OWN or key[0] not in self.paths:
            return
        if hasattr(nn.Module, name) or (name[0] == "_" and type(module).__module__.startswith("torch.nn.")):
            return  # torch's own affairs
        held = object.__getattribute__(module, "__dict__")
        if name in held:
            value = held[name]
            self.first[key] = value, fingerprint(value)
            if type(value) in (list, dict, set):
                self.contents.append((value, copy.copy(value)))
        elif is_plain(inherited := getattr(type(module), name, ABSENT)) or isinstance(inherited, _INHERITED):
            self.first[key] = inherited, fingerprint(inherited)
        elif inherited is ABSENT and not any(name in held[kind] for kind in _TENSORS):
            self.first[key] = ABSENT, None


_TENSORS = ("_parameters", "_buffers", "_modules")
_ASKED = frozenset(("training", *_TENSORS))
_BY_NAME = {nn.Module.__getattr__.__code__, nn.Module.__setattr__.__code__, nn.Module.__delattr__.__code__}
"""They look for one tensor or module, whatever the order is."""


@contextlib.contextmanager
def observing(
    models: Sequence[nn.Module], functions: Sequence[Any], observed: Observed
) -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    """Note in `observed` what forward(), and perhaps other functions, read of the modules of a model and of a loss
    function, and what they change of the Python around them.

    Yields what they are run in; whatever else the body reads is not noted.  Attributes are noted on this thread alone;
    one thread at a time.
    """
    seen = _Seen(models)
    around = [(reading, _entries(reading.value)) for reading in surroundings(_things(models, functions))]
    try:
        yield lambda: _intercepted(seen)
        observed.asked.update(seen.asked)
        _compare(seen, observed)
        observed.changed += [
            _changed_around(reading)
            for reading, before in around
            if reading.changed() and not _filled(before, reading.now())
        ]
    finally:
        seen.put_back()


def _compare(seen: _Seen, observed: Observed) -> None:
    """What was read, and what of it is other than it was then."""
    for (place, name), (value, before) in seen.first.items():
        path, module = seen.paths[place]
        now = vars(module).get(name, getattr(type(module), name, ABSENT))
        if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor):
            continue  # `module_state` has a better word for it
        if (now is ABSENT) != (value is ABSENT) or (now is not ABSENT and fingerprint(now) != before):
            observed.changed.append(_changed(path, module, name, value, now))
        observed.read.add((module, name))


def _changed(path: str, module: nn.Module, name: str, value: Any, now: Any) -> RefusedError:
    full = f"{path}.{name}" if path else name
    became = described(now) if now is not ABSENT else "nothing"
    was = described(value) if value is not ABSENT else "absent"
    kept = isinstance(now, torch.Tensor) or value is ABSENT or value is None
    return RefusedError(
        f"forward() reads attribute {full} and then changes it",
        where=f"module {path or '(the model itself)'} ({type(module).__name__})",
        why=f"it was {was} and becomes {became if became != was else 'something else'}; a pipeline runs the program "
        "that was captured once, in which it would stay as it was",
        fix="call the model once on a batch before compile, if it is only filled at the first call; state that changes "
        "with every call belongs into a buffer (register_buffer)"
        if kept
        else "keep it in a buffer (register_buffer) and change that in place, or count in the training loop and pass "
        "the number with the batch",
    )


def _things(models: Sequence[nn.Module], functions: Sequence[Any]) -> list[Any]:
    """Whatever may run in forward(): classes of modules, and functions and objects that stand in their attributes."""
    modules = [module for model in models for module in model.modules()]
    held = [value for module in modules for name, value in vars(module).items() if name not in _OWN]
    code = [value for value in held if callable(value) or not from_library(type(value))]
    return [*dict.fromkeys(map(type, modules)), *functions, *code]


def _entries(value: Any) -> dict[Any, Any] | None:
    return dict(value) if isinstance(value, dict) else None


def _filled(before: dict[Any, Any] | None, now: Any) -> bool:
    """Whether a table of tensors was only added to: it is filled at the first call, and a program computes them."""
    if before is None or not isinstance(now, dict):
        return False
    same = all(now.get(key, ABSENT) is value for key, value in before.items())
    return same and all(isinstance(value, torch.Tensor) for key, value in now.items() if key not in before)


def _changed_around(reading: Reading) -> RefusedError:
    was, became = described(reading.value), described(reading.now())
    return RefusedError(
        f"forward() changes {reading.place}",
        why=f"it was {was} and becomes {became if became != was else 'something else'}; a pipeline runs the program "
        "that was captured once, in which it would stay as it was",
        fix="keep what changes with every call in a buffer (register_buffer), or change it in the training loop and "
        "pass it with the batch; random numbers come from torch",
    )


@contextlib.contextmanager
def _intercepted(seen: _Seen) -> Iterator[None]:
    tracer = threading.get_ident()
    look_up, assign = object.__getattribute__, nn.Module.__setattr__

    def read(self: nn.Module, name: str) -> Any:
        if name in _ASKED:
            seen.note_own(self, name)
        elif name[:2] != "__":
            if threading.get_ident() == tracer:
                seen.note(self, name)
        elif name == "__dict__" and sys._getframe(1).f_code not in _BY_NAME:
            seen.note_own(self, name)
        return look_up(self, name)

    def write(self: nn.Module, name: str, value: Any) -> None:
        key = (id(self), name)
        if threading.get_ident() == tracer and key not in seen.first:
            seen.written.add(key)
        assign(self, name, value)

    nn.Module.__getattribute__ = read  # type: ignore[method-assign,assignment]
    nn.Module.__setattr__ = write  # type: ignore[method-assign]
    try:
        yield
    finally:
        del nn.Module.__getattribute__
        nn.Module.__setattr__ = assign  # type: ignore[method-assign]

"""Everything of torch and Python that is replaced while a model is traced: one list, entered once for each capture.

Replacements act only on the thread that traces; other threads find torch as it is.
"""

from __future__ import annotations

import builtins
import contextlib
import pkgutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from autopart.capture.python.habits.habits import HABITS
from autopart.capture.python.reads import host_reads
from autopart.capture.python.watch.observed import Observer
from autopart.passes.ops.table import has_row, op_name

_PRIVATE = "2.11 to 2.13"
_composite: dict[frozenset[str], set[Any]] = {}
"""torch's list of composite ops, which it takes long to make, by the composite ops that are registered: a library may
register more at any time."""


@dataclass(frozen=True, slots=True)
class Patch:
    """One part of torch or Python that is replaced.

    target: its dotted name; one in parentheses is found while forward() runs, and replaced then by `observed`.
    replacement: a function that is called with the original first, or a plain value.  torch: the releases in which the
    target is known to exist; torch may rename a private one without notice.
    """

    target: str
    replacement: Any
    reason: str
    torch: str = "2.11+"


def _bf16_supported(original: Callable[..., bool], *args: Any) -> bool:
    return not torch.cuda.is_available() or original(*args)


def _known_composite_ops(original: Callable[[], set[Any]]) -> set[Any]:
    """Return those of torch's composite ops that stay whole: those that the table of ops knows.

    Others become what they are made of: an alias (`torch.concat`) the op that it stands for.  Two kinds stay whole
    without a row: ops of linear algebra, whose parts return errors as numbers that nothing in the graph would read, and
    random ops, which are called by key and whose parts fill tensors that their backward reads.
    """
    registered = frozenset(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))
    if registered not in _composite:
        _composite.clear()
        _composite[registered] = set(original())
    return {op for op in _composite[registered] if _stays_whole(op)}


def _stays_whole(op: Any) -> bool:
    name = str(op)
    return has_row(name) or torch.Tag.nondeterministic_seeded in op.tags or op_name(name).startswith("linalg_")


_COMPOSITE = "composite ops that the table does not know are taken apart"
_ASKED = "questions about the numbers of the batch are answered"
_NO_CUDA = "torch would switch off autocast for CUDA without a device; tracing needs only its rules"
PATCHES = (
    *(
        Patch(target, replacement, habit.sees, _PRIVATE if "._" in target.replace(".__", "") else "2.11+")
        for habit in HABITS
        for target, replacement in habit.patches.items()
    ),
    Patch("torch.fx.experimental.proxy_tensor.proxy_call", host_reads.proxy_call, _ASKED, _PRIVATE),
    Patch("torch._subclasses.fake_tensor.FakeTensor.tolist", host_reads.tolist, _ASKED, _PRIVATE),
    Patch("torch.tensor", host_reads.tensor, _ASKED),
    Patch("(classes that forward() reaches).__getattribute__", Observer.read, "what forward() reads is compared later"),
    Patch("(classes that forward() reaches).__setattr__", Observer.write, "what forward() changes is refused"),
    Patch("torch.export._trace.print", lambda *_, **__: None, "export prints a half-made graph", _PRIVATE),
    Patch("torch.export.exported_program._collect_all_valid_cia_ops", _known_composite_ops, _COMPOSITE, _PRIVATE),
    Patch("torch.cuda.amp.common.amp_definitely_not_available", lambda original: False, _NO_CUDA, _PRIVATE),
    Patch("torch.cuda.is_bf16_supported", _bf16_supported, _NO_CUDA),
)


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Put all patches in place inside.  One thread at a time."""
    tracer = threading.get_ident()
    with contextlib.ExitStack() as entered:
        for patch in PATCHES:
            if patch.target.startswith("("):
                continue
            home, _, name = patch.target.rpartition(".")
            owner = pkgutil.resolve_name(home)
            here = patch.replacement
            if callable(here):
                here = _on_thread(tracer, here, getattr(owner, name, getattr(builtins, name, None)))
            entered.enter_context(mock.patch.object(owner, name, here, create=hasattr(builtins, name)))
        yield


def _on_thread(tracer: int, replacement: Callable[..., Any], otherwise: Any) -> Any:
    bound = isinstance(getattr(otherwise, "__self__", None), type)
    plain: Any = otherwise.__func__ if bound else otherwise

    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == tracer:
            return replacement(plain, *args, **kwargs)
        return plain(*args, **kwargs)

    return classmethod(call) if bound else call

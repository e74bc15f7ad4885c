"""Everything of torch and Python that is replaced while a model is traced: one list, entered once for each capture.

Replacements act only on the thread that traces; other threads find torch as it is.
"""

from __future__ import annotations

import builtins
import contextlib
import pkgutil
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from autopart.capture.habits.habits import HABITS, PRIVATE, Patch
from autopart.capture.reads import host_reads
from autopart.capture.watch.observed import Observer

_composite_ops: dict[frozenset[str], set[Any]] = {}
"""torch's list of composite ops, by the composite ops that are registered: a library may register more at any time."""


def _known_composite_ops(original: Callable[[], set[Any]]) -> set[Any]:
    registered = frozenset(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))
    if registered not in _composite_ops:
        _composite_ops.clear()
        _composite_ops[registered] = set(original())
    return set(_composite_ops[registered])


def _bf16_supported(original: Callable[..., bool], *args: Any) -> bool:
    return not torch.cuda.is_available() or original(*args)


PATCHES = (
    *(patch for habit in HABITS for patch in habit.patches),
    Patch(
        "torch.fx.experimental.proxy_tensor.proxy_call",
        host_reads.proxy_call,
        "questions about the numbers of the batch are answered",
        PRIVATE,
    ),
    Patch(
        "torch._subclasses.fake_tensor.FakeTensor.tolist",
        host_reads.tolist,
        "questions about the numbers of the batch are answered",
        PRIVATE,
    ),
    Patch("torch.tensor", host_reads.tensor, "lists that hold traced tensors become lists of numbers"),
    Patch(
        "(each class that forward() reaches).__getattribute__",
        Observer.read,
        "what forward() reads is compared before every step",
    ),
    Patch(
        "(each class that forward() reaches).__setattr__",
        Observer.write,
        "what forward() changes of its attributes is refused",
    ),
    Patch(
        "torch.export._trace.print",
        lambda original, *_, **__: None,
        "export prints the half-made graph of what it cannot trace",
        PRIVATE,
    ),
    Patch(
        "torch.export.exported_program._collect_all_valid_cia_ops",
        _known_composite_ops,
        "torch goes through all of its ops for each decomposition, a quarter of the capture of a small model",
        PRIVATE,
    ),
    Patch(
        "torch.cuda.amp.common.amp_definitely_not_available",
        lambda original: False,
        "torch would switch off autocast for CUDA without a device; tracing needs only its rules",
        PRIVATE,
    ),
    Patch("torch.cuda.is_bf16_supported", _bf16_supported, "as above"),
)
"""Targets in parentheses are found while forward() runs, and replaced then by `observed`."""


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

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
from autopart.capture.trace.composite_ops import kept_whole, known_composite_ops

_PRIVATE = "2.11 to 2.13"


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


_COMPOSITE = "torch prepares all of its composite ops for each decomposition, half of the capture of a small model"
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
    Patch("torch.export.exported_program._collect_all_valid_cia_ops", known_composite_ops, _COMPOSITE, _PRIVATE),
    Patch("torch.export.exported_program._override_composite_implicit_decomp", kept_whole, _COMPOSITE, _PRIVATE),
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

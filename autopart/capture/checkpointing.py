"""Gradient checkpointing inside a model: ignored, for which activations are kept is the plan's to decide.

Both kinds compute what the function computes.  The reentrant one has no gradient at all where none of its inputs needs
one, which is kept: its parameters then learn nothing, in plain torch too.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils import checkpoint

from autopart.capture.guards import CaptureWarning
from autopart.capture.source_location import user_line


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """While a model is traced: run what it checkpoints, and warn once.  On this thread alone; one thread at a time."""
    tracer = threading.get_ident()
    warned: list[bool] = []
    reentrant: Any = checkpoint.CheckpointFunction.apply
    generator = checkpoint._checkpoint_without_reentrant_generator

    def note() -> None:
        if not warned:
            warned.append(True)
            warnings.warn(
                "gradient checkpointing inside the model is not carried over: gradients stay exact, but the memory it "
                f"saved is not saved ({user_line(traceback.extract_stack())})",
                CaptureWarning,
                stacklevel=1,  # the caller is torch, whose own warnings are silenced
            )

    def run(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if threading.get_ident() != tracer:
            return reentrant(function, preserve, *args)
        note()
        needed = torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        with contextlib.nullcontext() if needed else torch.no_grad():
            return function(*args)

    def started(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == tracer:
            note()
        return generator(*args, **kwargs)

    with (
        mock.patch.object(checkpoint.CheckpointFunction, "apply", run),
        mock.patch.object(checkpoint, "_checkpoint_without_reentrant_generator", started),
    ):
        yield

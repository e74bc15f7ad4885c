"""Runs the training scripts of `examples/` in worker processes, or in the process of a test."""

from __future__ import annotations

import importlib
import io
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from typing import Any
from unittest import mock

import torch

import autopart


def run_script(name: str, words: Sequence[str]) -> str:
    """Call `train` of a script as its command line does; return what this process printed."""
    module = importlib.import_module(name)
    out = io.StringIO()
    compiled = autopart.compile
    with ExitStack() as stack:

        def noted(*args: Any, **options: Any) -> autopart.Pipe:
            pipe = compiled(*args, **options)
            stack.callback(pipe.close)  # a script ends with its process, which lives on here
            return pipe

        stack.enter_context(redirect_stdout(out))
        stack.enter_context(torch.random.fork_rng())
        stack.enter_context(mock.patch.object(sys, "argv", [name, *words]))
        stack.enter_context(mock.patch.object(autopart, "compile", noted))
        module.train(module.arguments())
    return out.getvalue()


def losses_of(printed: str) -> dict[int, list[float]]:
    """Return the losses that were printed for each step; several for a step that was taken again after a restart."""
    found: dict[int, list[float]] = {}
    for step, loss in re.findall(r"^step (\d+) loss (\S+)", printed, re.MULTILINE):
        found.setdefault(int(step), []).append(float(loss))
    return found

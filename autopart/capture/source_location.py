"""From a Python stack to the user's line and module path."""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from pathlib import Path
from types import FrameType, TracebackType

import torch
from torch import nn

_PACKAGE = Path(__file__).resolve().parents[1]
_NOT_USER = (
    str(Path(torch.__file__).resolve().parent),
    str(_PACKAGE),
    str(_PACKAGE.parent / "passes"),
    str(_PACKAGE.parent / "runtime"),
    "<",
)
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib"))
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)')


def is_user_file(filename: str) -> bool:
    """True for a file that is neither torch's, nor ours, nor generated, nor the standard library's mock."""
    return not filename.startswith(_NOT_USER) and not filename.endswith("unittest/mock.py")


def is_library_file(filename: str) -> bool:
    """Return whether a file belongs to an installed library, or to Python."""
    return filename.startswith(LIBRARIES)


def user_line(stack: traceback.StackSummary) -> str:
    """file:line of the innermost frame of the user."""
    for frame in reversed(stack):
        if is_user_file(frame.filename):
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return ""


def user_line_of_text(stack: str | None) -> str:
    """file:line of the innermost frame of the user in the text of a stack, as torch.fx records it."""
    for match in reversed(list(_FRAME.finditer(stack or ""))):
        if is_user_file(match["file"]):
            return f"{match['file']}:{match['line']}"
    return ""


def user_place(model: nn.Module, trace: TracebackType | None) -> str:
    """Module path and file:line of the innermost frame of the user in a traceback."""
    paths = {id(module): path for path, module in model.named_modules()}
    path = line = ""
    while trace is not None:
        frame = trace.tb_frame
        path = paths.get(id(frame.f_locals.get("self")), path)
        if is_user_file(frame.f_code.co_filename):
            line = f"{frame.f_code.co_filename}:{trace.tb_lineno} in {frame.f_code.co_name}"
        trace = trace.tb_next
    return ", ".join(part for part in (f"module {path}" if path else "", line) if part)


def place_of_caller(model: nn.Module) -> str:
    """Module path and file:line of the innermost frame of the user in the stack as it stands."""
    paths = {id(module): path for path, module in model.named_modules()}
    path = line = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (path and line):
        if not line and is_user_file(frame.f_code.co_filename):
            line = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        path = path or paths.get(id(frame.f_locals.get("self")), "")
        frame = frame.f_back
    return ", ".join(part for part in (f"module {path}" if path else "", line) if part)

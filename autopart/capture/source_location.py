"""The user's line and module path in a Python stack."""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

import torch
from torch import fx, nn

_PACKAGE = Path(__file__).resolve().parents[1]
_NOT_USER = (
    str(Path(torch.__file__).resolve().parent),
    str(_PACKAGE),
    str(_PACKAGE.parent / "passes"),
    str(_PACKAGE.parent / "runtime"),
    "<",
)
INSTALLED = tuple(
    {
        *(sysconfig.get_path(name) for name in ("purelib", "platlib")),
        *(path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")),
        str(Path(torch.__file__).parent),
    }
)
"""Where installed packages lie: also those of the user, of the system, and what a .pth file or PYTHONPATH adds."""
LIBRARIES = (*INSTALLED, sysconfig.get_path("stdlib"))
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)')


def is_user_file(filename: str) -> bool:
    """Return whether a file is neither torch's, nor ours, nor generated, nor the standard library's mock."""
    return not filename.startswith(_NOT_USER) and not filename.endswith("unittest/mock.py")


def is_library_file(filename: str) -> bool:
    """Return whether a file belongs to an installed library, or to Python."""
    return filename.startswith(LIBRARIES)


def line_of(node: fx.Node) -> str:
    """Return file:line of the innermost frame of the user in the stack that torch.fx recorded for an op."""
    for match in reversed(list(_FRAME.finditer(node.meta.get("stack_trace") or ""))):
        if is_user_file(match["file"]):
            return f"{match['file']}:{match['line']}"
    return ""


def user_line() -> str:
    """Return file:line of the innermost frame of the user in the current stack."""
    return user_place()


def user_place(model: nn.Module | None = None, trace: TracebackType | None = None) -> str:
    """Return the module path and file:line of the innermost frame of the user, in a traceback or the current stack."""
    paths = {id(module): path for path, module in model.named_modules()} if model is not None else {}
    frames = reversed(list(traceback.walk_tb(trace))) if trace is not None else traceback.walk_stack(sys._getframe(1))
    path = line = ""
    for frame, number in frames:
        if not line and is_user_file(frame.f_code.co_filename):
            line = f"{frame.f_code.co_filename}:{number} in {frame.f_code.co_name}"
        if paths and not path:
            path = paths.get(id(frame.f_locals.get("self")), "")
        if line and (path or not paths):
            break
    return ", ".join(part for part in (f"module {path}" if path else "", line) if part)

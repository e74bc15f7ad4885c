"""Which op of a stage raised: read off the line of generated code that the traceback went through."""

from __future__ import annotations

import linecache
import re

_ASSIGNED = re.compile(r"\s*(\w+) = ")


def failing_op(error: BaseException) -> str | None:
    """Name of the fx node whose line of generated code raised, or None (an error inside autograd's backward has no
    such line)."""
    trace, name = error.__traceback__, None
    while trace is not None:
        filename = trace.tb_frame.f_code.co_filename
        if filename.startswith("<eval_with_key>"):
            found = _ASSIGNED.match(linecache.getline(filename, trace.tb_lineno))
            name = found[1] if found else name
        trace = trace.tb_next
    return name

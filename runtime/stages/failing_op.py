"""Find the op of a stage that raised, by the line of generated code in the traceback."""

from __future__ import annotations

import linecache
import re

_ASSIGNED = re.compile(r"\s*(\w+) = ")


def failing_op(error: BaseException) -> str | None:
    """Return the name of the fx node whose line of generated code raised, or None, as for errors inside autograd's
    backward."""
    trace, name = error.__traceback__, None
    while trace is not None:
        filename = trace.tb_frame.f_code.co_filename
        if filename.startswith("<eval_with_key>"):
            found = _ASSIGNED.match(linecache.getline(filename, trace.tb_lineno))
            name = found[1] if found else name
        trace = trace.tb_next
    return name

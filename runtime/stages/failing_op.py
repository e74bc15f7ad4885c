"""Name what failed in a stage: the op of the model, found by the line of generated code in the traceback."""

from __future__ import annotations

import linecache
import re
from collections.abc import Mapping

from autopart.ir.actions import Action
from autopart.ir.errors import AutopartError, StageError
from autopart.ir.graph import Op

_ASSIGNED = re.compile(r"\s*(\w+) = ")
_IN_FP32 = (
    "this device has no such op in half precision: call it on x.float() under torch.autocast(device_type, "
    "enabled=False) in forward()"
)
_NO_MEMORY = re.compile(r"out of memory|can't allocate memory", re.IGNORECASE)
_SMALLER = "the stage needs more memory than there is: take more stages or micro-batches, or recompute='all'"


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


def located(error: Exception, action: Action, rank: int, ops: Mapping[str, Op]) -> AutopartError:
    """Return an error of a compute with rank, stage, micro-batch, module and line.  ops: of the captured graph."""
    if isinstance(error, AutopartError):
        return error
    op = ops.get(failing_op(error) or "")
    where = f"module {op.module}, {op.target} at {op.where}" if op else ""
    why = (str(error).splitlines() or [""])[0]
    fix = _IN_FP32 if "not implemented for 'Half'" in why or "not implemented for 'BFloat16'" in why else ""
    if isinstance(error, MemoryError) or _NO_MEMORY.search(why):
        fix = _SMALLER
    return StageError(
        f"{action.slot}, {action.is_a.label}: {type(error).__name__}",
        where=", ".join(part for part in (f"rank {rank}", where) if part),
        why=why,
        fix=fix or "call the model on this batch without autopart: an error there has its cause in the two",
    )

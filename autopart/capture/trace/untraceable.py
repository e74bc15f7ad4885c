"""Errors of torch.export by what they say: the reason in our words, and what helps in that case."""

from __future__ import annotations

import re

from autopart.ir.errors import CaptureError

_KNOWN = (  # what torch's message says, as a regular expression; what, why, fix of ours
    (
        r"\.numpy\(\) is not supported|Unable to get .* numpy|numpy\.ndarray",
        "forward() leaves torch for numpy",
        "what numpy computes cannot be captured",
        "compute it with torch; or before the step, and pass it with the batch",
    ),
    (
        r"mutated in the forward method",
        "forward() changes in place a tensor that is neither a parameter nor a buffer",
        "",
        "make it a buffer: register_buffer(name, tensor)",
    ),
    (
        r"fake tensor in the exported program constant's list",
        "a tensor made while the model was traced is kept where tracing does not see it",
        "it stands in a container, a global or a closure, or is a gradient with regard to a parameter",
        "pass it on as an argument or a result; a derivative with regard to a parameter write out, or take it forwards "
        "(torch.func.jvp)",
    ),
)


def untraceable(error: Exception, where: str) -> CaptureError:
    """Return an error of torch.export, or of the model while it was traced, as ours.  O(length of its text)."""
    text = str(error).strip() or type(error).__name__
    first = text.splitlines()[0]
    for says, what, why, fix in _KNOWN:
        if re.search(says, text):
            return CaptureError(what, where=where, why=why or first, fix=fix)
    return CaptureError(
        f"the model cannot be captured: {type(error).__name__}",
        where=where,
        why=first,
        fix="call the model once on one micro-batch without autopart; if that fails too, the model or the batch is the "
        "cause; if it works, rewrite the line named above with tensor operations (a model that asks "
        "torch.compiler.is_exporting() takes another branch here)",
    )

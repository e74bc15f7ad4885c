"""Packed sequences, which torch.export stops at with an error of its own."""

from __future__ import annotations

from typing import Any

from autopart.capture.source_location import user_line
from autopart.ir.errors import RefusedError


def refuse(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse to pack sequences of several lengths."""
    raise RefusedError(
        "forward() packs sequences (torch.nn.utils.rnn.pack_padded_sequence)",
        where=user_line(),
        why="the sizes of a packed sequence depend on the lengths, and what a stage sends needs one size, with "
        "micro_batches=1 too",
        fix="run the layer on the padded tensor, and mask what it returns there: out = rnn(x)[0] * "
        "(torch.arange(x.shape[1]) < lengths[:, None])[..., None], with batch_first=True; the state after the last "
        "token of each row is out[torch.arange(len(x)), lengths - 1] (of one direction: the other one reads the "
        "padding first)",
    )

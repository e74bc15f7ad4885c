"""Checkpoints of `torch.distributed.checkpoint` and weights of Hugging Face become ours, and ours become the former.

Tensors are read one at a time where they are written, so that no more than a few of them are in memory.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from autopart.extras.checkpoints.from_dcp import Found, from_dcp
from autopart.extras.checkpoints.saving import Draft, publish, write_part, writing
from autopart.extras.checkpoints.to_dcp import to_dcp
from autopart.files.checkpoints.dcp import is_dcp, open_dcp
from autopart.files.checkpoints.document import document_from
from autopart.files.checkpoints.folders import Root, found_at
from autopart.files.checkpoints.storage import is_file, read
from autopart.files.checkpoints.tensor_files import open_tensors
from autopart.files.reading import named
from autopart.ir.errors import CheckpointError
from autopart.state.around import version


def convert(source: Path, out: Path, *, optimizer: str = "", step: int | None = None) -> tuple[Path, list[str]]:
    """Convert a checkpoint of ours into a folder of DCP, and a folder of DCP or of Hugging Face into one of ours.

    optimizer: the class of the optimizer, which DCP does not keep; "none" leaves its state out.  step: training steps
    taken, where the source does not say.  Returns what was written, and what had no place in it.  Raises
    CheckpointError and UsageError."""
    if is_dcp(source):
        found = from_dcp(open_dcp(source), optimizer)
    elif (ours := found_at(source)) is not None:
        return to_dcp(ours, out), []
    else:
        config = source / "config.json"
        found = Found({**open_tensors(source).by_name}, config=read(config) if is_file(config) else None)
    rest = {"step": 0, **found.rest} | ({} if step is None else {"step": step})
    with named(source, CheckpointError):
        document = document_from({"torch": torch.__version__, "autopart": version(), "files": {}, **rest})
    document = replace(document, world=1, optimizer=found.optimizer)
    with writing(out), closing(Root(out)) as root:
        draft = Draft(root.draft(document.step), document, 0)
        try:
            write_part(draft, found.weights, found.more)
            return publish(draft, root, None, found.config), found.left
        except BaseException:
            draft.erase()
            raise

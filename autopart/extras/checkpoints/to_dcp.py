"""A checkpoint of ours, written as a folder of `torch.distributed.checkpoint` (`from_dcp.py` has its form)."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autopart.extras.checkpoints.from_dcp import MODEL, OPTIM, REST
from autopart.extras.checkpoints.saving import writing
from autopart.files.checkpoints.document import (
    OPTIMIZER,
    Document,
    Group,
    key_parts,
    read_document,
    require_unchanged,
)
from autopart.files.checkpoints.storage import FOLDERS, storage_of
from autopart.files.checkpoints.tensor_files import opened
from autopart.files.checkpoints.values import decoded
from autopart.ir.errors import UsageError


def to_dcp(path: Path, out: Path) -> Path:
    """Write a checkpoint of ours as a folder of DCP; files are mapped into memory and written one tensor at a time."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    document = read_document(path)
    stored = opened(path, document)
    require_unchanged(path, document.files)
    if storage_of(out) is not FOLDERS or out.exists():
        raise UsageError(f"{out} is not a new folder", fix="pass the name of a folder that is not there yet")
    rest: dict[str, Any] = {"document": json.dumps(_rest(document))}
    state: dict[str, dict[str, Any]] = {}
    for key, each in stored.more.by_name.items():
        kind, title, name = key_parts(key)
        if kind == OPTIMIZER:
            state.setdefault(name, {})[title] = each.mapped()
        else:
            rest.setdefault("tensors", {})[key] = each.mapped()
    whole: dict[str, Any] = {MODEL: {n: each.mapped() for n, each in stored.weights.by_name.items()}, REST: rest}
    if document.optimizer is not None:
        for name, values in document.optimizer.values.items():
            state.setdefault(name, {}).update({key: decoded(value) for key, value in values.items()})
        whole[OPTIM] = {"state": state, "param_groups": [_group(each) for each in document.optimizer.groups]}
    draft = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        with writing(out), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it says that it does as it is told
            save(whole, storage_writer=FileSystemWriter(draft), no_dist=True)
            FOLDERS.rename(draft, out)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return out


def _group(group: Group) -> dict[str, Any]:
    """Return a parameter group as optimizers of torch have it; how an update is computed is left to them."""
    options: Mapping[str, Any] = {key: decoded(value) for key, value in group.options.items()}
    return {"foreach": None, "fused": None, "capturable": False, **options, "params": list(group.names)}


def _rest(document: Document) -> dict[str, Any]:
    """Return what DCP has no place for."""
    kinds = [] if document.optimizer is None else [each.kind for each in document.optimizer.groups]
    rest = {key: value for key, value in asdict(document).items() if key not in ("files", "optimizer")}
    return {**rest, "optimizers": kinds}

"""Checkpoints of `torch.distributed.checkpoint` and weights of Hugging Face become ours, and ours become the former.

Tensors are read one at a time where they are written, so that no more than a few of them are in memory.

    {"model": {NAME: tensor}, "optim": {"state": {NAME: {KEY: value}}, "param_groups": [{..., "params": [NAME]}]}}

is what DCP holds, as `torch.distributed.checkpoint.state_dict` gives and takes it; "autopart" in it is the rest of a
checkpoint of ours, so that nothing is lost there and back.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from autopart.extras.checkpoints.saving import Draft, Values, publish, write_part, writing
from autopart.files.checkpoints.dcp import Chunk, DcpFolder, ShardedTensor, is_dcp, open_dcp
from autopart.files.checkpoints.document import (
    OPTIMIZER,
    Document,
    Group,
    OptimizerState,
    document_from,
    key_parts,
    read_document,
    require_unchanged,
)
from autopart.files.checkpoints.folders import Root, found_at
from autopart.files.checkpoints.storage import FOLDERS, is_file, read, storage_of
from autopart.files.checkpoints.tensor_files import open_tensors, opened
from autopart.files.checkpoints.values import decoded, encoded
from autopart.files.documents import parse_json
from autopart.files.reading import named
from autopart.ir.errors import CheckpointError, UsageError
from autopart.state.around import version
from autopart.state.optimizers import HOW

MODEL, OPTIM, REST = "model", "optim", "autopart"
_NAMES = "pass optimizer state by names, as torch.distributed.checkpoint.state_dict.get_optimizer_state_dict gives it"


@dataclass
class Found:
    """What a folder of another format holds.  left: what has no place in a checkpoint of ours."""

    weights: dict[str, Values] = field(default_factory=dict)
    more: dict[str, Values] = field(default_factory=dict)
    optimizer: OptimizerState | None = None
    rest: dict[str, Any] = field(default_factory=dict)
    config: str | None = None
    left: list[str] = field(default_factory=list)


def convert(source: Path, out: Path, *, optimizer: str = "", step: int | None = None) -> tuple[Path, list[str]]:
    """Convert a checkpoint of ours into a folder of DCP, and a folder of DCP or of Hugging Face into one of ours.

    optimizer: the class of the optimizer, which DCP does not keep; "none" leaves its state out.  step: training steps
    taken, where the source does not say.  Returns what was written, and what had no place in it.  Raises
    CheckpointError and UsageError."""
    if is_dcp(source):
        found = _from_dcp(open_dcp(source), optimizer)
    elif (ours := found_at(source)) is not None:
        return _to_dcp(ours, out), []
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


def _from_dcp(folder: DcpFolder, kind: str) -> Found:
    """Sort what a folder of DCP holds.  Reads objects, and no tensor."""
    found = Found()
    parts: dict[str, dict[Any, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    every: dict[tuple[str | int, ...], ShardedTensor | Chunk] = {**folder.tensors, **folder.objects}
    tops = {path[0] for path in every}
    home = OPTIM if OPTIM in tops else "optimizer"
    for path, each in every.items():
        if path[0] == home and len(path) == 4 and path[1] in parts:
            own = parts[str(path[1])].setdefault(path[2], {})
            own[str(path[3])] = each if isinstance(each, ShardedTensor) else each.load()
        elif not _take(found, path, each, models=(MODEL,) if MODEL in tops else tops - {home}):
            found.left.append(".".join(map(str, path)))
    if not found.weights:
        raise CheckpointError("the checkpoint has no weights", fix=f'save them under the key "{MODEL}"')
    kinds = found.rest.pop("optimizers", None)
    state, groups = ({key: values[key] for key in sorted(values)} for values in parts.values())
    if kind == "none":
        found.left += [home] if state or groups else []
    elif state or groups:
        _take_optimizer(found, state, [*groups.values()], [kind] if kind else kinds or [])
    elif any(path.startswith(f"{home}.") for path in found.left):
        raise CheckpointError(f'the state under "{home}" is not by parameter and key', fix=_NAMES)
    return found


def _take(
    found: Found, path: tuple[str | int, ...], each: ShardedTensor | Chunk, models: Collection[str | int]
) -> bool:
    """Take a weight, or what belongs to a checkpoint of ours; returns whether it is one of them.  models: first keys of
    weights."""
    if path == (REST, "document") and isinstance(each, Chunk):
        with named("the document of autopart", CheckpointError):
            found.rest = dict(parse_json(str(each.load())))
    elif path[0] == REST and isinstance(each, ShardedTensor):
        found.more[str(path[-1])] = each
    elif path[0] in models and isinstance(each, ShardedTensor):
        found.weights[".".join(map(str, path[1:] if path[0] == MODEL else path))] = each
    else:
        return False
    return True


def _take_optimizer(
    found: Found, state: dict[Any, dict[str, Any]], groups: list[dict[str, Any]], kinds: list[str]
) -> None:
    """Put the state of an optimizer where ours lies.  kinds: its classes, of each group or of all."""
    if not kinds:
        raise UsageError(
            "the checkpoint does not say which optimizer its state is of",
            fix="pass --optimizer with the name of its class, such as AdamW, or --optimizer none for the weights alone",
        )
    made = []
    for number, group in enumerate(groups):
        names = group.pop("params", ())
        wrong = next((name for name in [*names, *state] if name not in found.weights), None)
        if wrong is not None:
            raise CheckpointError(f"the optimizer has state of {wrong!r}, which is no weight", fix=_NAMES)
        read = {key: value.read() if isinstance(value, ShardedTensor) else value for key, value in group.items()}
        options = {k: encoded(v, f"option {k!r}") for k, v in read.items() if k not in (*HOW, "param_names")}
        made.append(Group(options, tuple(map(str, names)), kinds[number % len(kinds)]))
    tensors: dict[str, tuple[str, ...]] = {}
    values: dict[str, dict[str, Any]] = {}
    for name, own in state.items():
        for key, value in own.items():
            if isinstance(value, ShardedTensor):
                tensors[name] = (*tensors.get(name, ()), key)
                found.more[f"{OPTIMIZER}/{key}/{name}"] = value
            else:
                values.setdefault(name, {})[key] = encoded(value, f"state {key!r} of {name}")
    found.optimizer = OptimizerState(" + ".join(dict.fromkeys(kinds)), tuple(made), values, tensors)


def _to_dcp(path: Path, out: Path) -> Path:
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

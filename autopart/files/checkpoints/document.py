"""`checkpoint.json`: all of a checkpoint that is not a tensor, and the size and hash of every other file.

Needs no torch, so that a check is quick.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from autopart.files.checkpoints.storage import read, storage_of, write
from autopart.files.documents import parse_json
from autopart.files.reading import named, unreadable, validated
from autopart.ir.errors import CheckpointError

AGAIN = "use another checkpoint, or copy this one again from where it is whole"
"""What to do about a file that was changed or is missing."""


@dataclass(frozen=True, slots=True)
class Written:
    """A file as it was written.  size_bytes: of the whole file.  sha256: of its bytes, in hexadecimal."""

    size_bytes: int
    sha256: str


def hashed(path: Path) -> Written:
    """Return the size and the hash of a file.  Raises OSError."""
    with storage_of(path).open(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        return Written(file.seek(0, os.SEEK_END), digest)


def unreadable_file(path: Path, error: Exception) -> CheckpointError:
    """Return what to say of a file that is missing or cannot be read."""
    missing = isinstance(error, FileNotFoundError)
    what = "is missing" if missing else "cannot be read"
    return CheckpointError(f"{path.name} {what}", where=str(path), why="" if missing else str(error), fix=AGAIN)


def plain_name(name: str) -> bool:
    """Whether this is the name of a file in the folder itself, not a path that leads out of it."""
    return bool(name) and name not in (".", "..") and not set(name) & set("/\\\0")


NAME = "checkpoint.json"
MASTER, OPTIMIZER, COMPANION = "master", "optimizer", "companion"
"""What tensors beside the weights are: "master/NAME", "optimizer/KEY/NAME" and "companion/COMPANION/NAME"."""


def key_parts(key: str) -> tuple[str, str, str]:
    """Return what a tensor beside the weights is, its KEY or COMPANION, and its NAME."""
    kind, _, rest = key.partition("/")
    title, _, name = rest.partition("/")
    return (kind, "", rest) if kind == MASTER else (kind, title, name)


AVERAGES = "averages"
"""The companion of the first averages of a pipe (`AveragedModel`); later ones have a number behind it."""
VERSION = 2
OWN_HASH = "sha256"
"""The last key of the file: the hash of all the others, so that a changed number in it is found too."""
_AT_A_TIME = 16
"""Files that are hashed at a time, at most."""


@dataclass(frozen=True, slots=True)
class Group:
    """A parameter group of an optimizer.  options: as `values.encoded` writes them, equal on every rank.  names: of
    its parameters on all ranks, tied ones once.  kind: the name of the optimizer's class, "" for that of the state."""

    options: dict[str, Any]
    names: tuple[str, ...]
    kind: str = ""


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """The state of one or several optimizers that is not a tensor, of one rank or of all.

    kind: the names of their classes.  groups: of one optimizer after the other.  values: state other than tensors, by
    parameter and key (`values.encoded`).  tensors: by parameter the keys of its tensors; tensor k of
    parameter p is stored as "optimizer/k/p"."""

    kind: str
    groups: tuple[Group, ...]
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    tensors: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """The state of one of several schedulers, and the numbers of the parameter groups that it drove, () for all."""

    groups: tuple[int, ...]
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Document:
    """A checkpoint without its tensors.

    step: training steps taken.  seed: of random numbers by key.  world: ranks that wrote it.  files: every file with
    tensors, and `config.json` where the model has one.  plan: the plan it was trained under, as in a plan file.
    scheduler, companions, extra: as `values.encoded` writes them; where there were several optimizers or schedulers, a
    state of each.
    """

    step: int
    torch: str
    autopart: str
    files: dict[str, Written]
    version: int = VERSION
    seed: int = 0
    world: int = 1
    precision: str = "fp32"
    scaler: dict[str, Any] | None = None
    optimizer: OptimizerState | None = None
    scheduler: dict[str, Any] | tuple[SchedulerState, ...] | None = None
    companions: dict[str, Any] = field(default_factory=dict)
    extra: Any = None
    plan: dict[str, Any] | None = None


# pydantic validates the dataclasses themselves; those inside inherit these options.
Document.__pydantic_config__ = {"extra": "forbid", "strict": True, "allow_inf_nan": False}  # type: ignore[attr-defined]
_ADAPTER = TypeAdapter(Document)


def write_document(folder: Path, document: Document) -> None:
    """Write `checkpoint.json` into a folder.  Raises OSError, and CheckpointError if it is too large to be read."""
    values = asdict(document)
    text = json.dumps({**values, OWN_HASH: hash_of(values)}, indent=1, allow_nan=False)
    with named(folder / NAME, CheckpointError, "save less in `extra`"):
        parse_json(text)
    write(folder / NAME, text + "\n")


def read_document(folder: Path) -> Document:
    """Read and validate `checkpoint.json` of a checkpoint's folder.  Raises CheckpointError."""
    with named(folder / NAME, CheckpointError, AGAIN):
        text = read(folder / NAME)
        found = parse_json(text)
        if isinstance(found, dict) and found.get("version") != VERSION:
            raise unreadable(
                f"is of version {found.get('version')!r}",
                why=f"this release of autopart reads version {VERSION}",
                fix="load it with the release that wrote it",
            )
        if isinstance(found, dict) and found.pop(OWN_HASH, None) != hash_of(found):
            raise unreadable("was changed since it was written", why="its values have another SHA-256 than it says")
        document = document_from(found)
        for name, written in document.files.items():
            if not plain_name(name) or name == NAME or len(written.sha256) != 64:
                raise unreadable("is not a checkpoint", where=f"files.{name}", why="not the name and hash of a file")
        if document.step < 0 or document.world < 1:
            raise unreadable("is not a checkpoint", where="step, world", why="a number is negative")
        return document


def document_from(values: Any) -> Document:
    """Return the document with these values.  Raises `unreadable`."""
    return validated("is not a checkpoint", _ADAPTER.validate_json, json.dumps(values))


def hash_of(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of values, whatever the order of keys and the spaces between them."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def problems_with(folder: Path, files: Mapping[str, Written]) -> list[CheckpointError]:
    """Return what is wrong with files, in the order of their names; [] if all are as they were written.

    Reads every file whole, several at a time, the largest first: hashing one needs a core."""
    by_size = sorted(files, key=lambda name: -files[name].size_bytes)
    with ThreadPoolExecutor(min(len(files), os.cpu_count() or 1, _AT_A_TIME) or 1) as pool:
        problems = list(pool.map(lambda name: _problem(folder, name, files[name]), by_size))
    found = {name: problem for name, problem in zip(by_size, problems, strict=True) if problem is not None}
    return [found[name] for name in sorted(found)]


def require_unchanged(folder: Path, files: Mapping[str, Written]) -> None:
    """Raise CheckpointError for the first file that is missing, or not byte by byte as it was written."""
    for problem in problems_with(folder, files):
        raise problem


def _problem(folder: Path, name: str, written: Written) -> CheckpointError | None:
    path = folder / name
    try:
        size = storage_of(path).size(path)
        if size in (None, written.size_bytes) and hashed(path) == written:
            return None
    except OSError as error:
        return unreadable_file(path, error)
    why = (
        f"it has {size} bytes, and had {written.size_bytes}"
        if size != written.size_bytes
        else "its SHA-256 is another than when it was written"
    )
    return CheckpointError(f"{name} was changed since it was written", where=str(path), why=why, fix=AGAIN)

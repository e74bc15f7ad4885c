"""Write a checkpoint from all ranks at once: each writes its files, and rank 0 publishes the folder when all are there.

While the others write in the background, they tell rank 0 by files that they are done, since the connections between
ranks belong to training.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError

from autopart.files.checkpoints.document import Document, Written, hashed, write_document
from autopart.files.checkpoints.folders import Root
from autopart.files.checkpoints.storage import is_file, read, storage_of, write
from autopart.files.checkpoints.tensor_files import INDEX, Unread, bytes_of, write_tensors
from autopart.files.reading import named, unreadable
from autopart.ir.errors import CheckpointError, UsageError

T = TypeVar("T")
Values = torch.Tensor | Unread
_POLL_S = 0.02
_AT_EXIT_S = 30.0
"""Time that a save gets when the script of rank 0 has ended without `close`."""
_NICE = 19
"""Lowest priority: a save in the background uses the time that training leaves."""
_WORTH_A_FILE = 1 << 20
"""Bytes of a tensor that may go into a second file."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank has written.  files: with their sizes and hashes.  weights: the names of those in its files."""

    files: dict[str, Written]
    weights: tuple[str, ...]


_PART = TypeAdapter(Part)


@dataclass(frozen=True, slots=True)
class Draft:
    """A checkpoint that is being written.  folder: the same on every rank.  document: without its files."""

    folder: Path
    document: Document
    rank: int

    def erase(self) -> None:
        """Delete it, as far as that can be done."""
        with suppress(OSError):
            storage_of(self.folder).remove(self.folder)


def write_part(draft: Draft, weights: Mapping[str, Values], more: Mapping[str, Values]) -> None:
    """Write the files of this rank at once, and last the one that says that they are whole.  Raises OSError."""
    number = f"{draft.rank + 1:05d}-of-{draft.document.world:05d}"
    parts = {f"model-{number}": dict(weights)}
    parts[f"state-{number}"], parts[f"state-{number}-2"] = _halves(more)
    files = {f"{name}.safetensors": tensors for name, tensors in parts.items() if tensors}
    written = _at_once({name: partial(write_tensors, draft.folder / name, files[name]) for name in files})
    write(record_at(draft.folder, draft.rank), json.dumps(asdict(Part(written, tuple(weights)))))


def _halves(tensors: Mapping[str, Values]) -> tuple[dict[str, Values], dict[str, Values]]:
    """Return large tensors in two files of about the same size: hashing a file keeps a processor busy, so two files
    are sooner written.  Small tensors stay in the first."""
    halves: tuple[dict[str, Values], dict[str, Values]] = {}, {}
    sizes = [0, 0]
    for name, tensor in sorted(tensors.items(), key=lambda each: -bytes_of(each[1])):
        smaller = int(bytes_of(tensor) >= _WORTH_A_FILE and sizes[1] < sizes[0])
        halves[smaller][name] = tensor
        sizes[smaller] += bytes_of(tensor)
    return halves


def _at_once(works: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """Run functions in threads of their own and return their results; raises what the first of them raised."""
    found: dict[str, T] = {}
    failed: dict[str, BaseException] = {}

    def run(name: str) -> None:
        try:
            found[name] = works[name]()
        except BaseException as error:
            failed[name] = error

    threads = [threading.Thread(target=run, args=(name,), name=f"autopart-{name}") for name in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in failed.values():
        raise error
    return {name: found[name] for name in works}


def record_at(folder: Path, rank: int) -> Path:
    """Return the file that says that the part of a rank is whole."""
    return folder / f"done-{rank:05d}.json"


def read_part(folder: Path, rank: int) -> Part:
    """Return what a rank has written.  Raises CheckpointError for a file that was changed, or cannot be read."""
    with named(path := record_at(folder, rank), CheckpointError):
        try:
            return _PART.validate_json(read(path))
        except ValidationError as error:
            raise unreadable("was changed while it was written", why=str(error).partition("\n")[0]) from error


def publish(draft: Draft, root: Root, keep: int | None, config: str | None) -> Path:
    """Join the parts of all ranks, and make the checkpoint the latest; returns its folder.  On rank 0.

    config: text of the model's `config.json`, if it has one.  Raises OSError and CheckpointError."""
    files: dict[str, Written] = {}
    index: dict[str, str] = {}
    for rank in range(draft.document.world):
        part = read_part(draft.folder, rank)
        files |= part.files
        own = next((name for name in part.files if name.startswith("model-")), "")
        index |= dict.fromkeys(part.weights, own)
    sizes = sum(written.size_bytes for name, written in files.items() if name.startswith("model-"))
    texts = {
        INDEX: json.dumps({"metadata": {"total_size": sizes}, "weight_map": dict(sorted(index.items()))}, indent=1)
    }
    if config is not None:
        texts["config.json"] = config
    for name, text in texts.items():
        write(draft.folder / name, text)
        files[name] = hashed(draft.folder / name)
    write_document(draft.folder, replace(draft.document, files=files))
    for rank in range(draft.document.world):
        storage_of(draft.folder).remove(record_at(draft.folder, rank))
    return root.publish(draft.folder, keep)


class Background(threading.Thread):
    """One save that goes on while training does.

    draft: the checkpoint that is written.  failure: what failed, None so far.  told: whether a failure of the save was
    raised; a later call on all ranks does (`Checkpoints.before_call`).
    """

    def __init__(self, work: Callable[[threading.Event], None], draft: Draft) -> None:
        """Start the work.  It is given an event that tells it to give up."""
        super().__init__(name="autopart-checkpoint")
        self.draft = draft
        self.failure: BaseException | None = None
        self.told = False
        self._work, self._give_up = work, threading.Event()
        self.start()

    def run(self) -> None:
        """Write the checkpoint, in a thread of the lowest priority."""
        if sys.platform == "linux":  # where this is the priority of the thread, and of those that it starts
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            self._work(self._give_up)
        except BaseException as error:
            self.failure = error

    def wait(self, *, give_up: bool = False) -> None:
        """Wait until it has ended.  give_up: because another rank has failed, so that its part never comes."""
        if give_up:
            self._give_up.set()
        self.join()


def wait_for_parts(draft: Draft, give_up: threading.Event) -> bool:
    """Wait until every rank's part is whole; returns False if it was told to give up.  On rank 0."""
    missing = set(range(draft.document.world))
    deadline: float | None = None
    while missing := {rank for rank in missing if not is_file(record_at(draft.folder, rank))}:
        if not threading.main_thread().is_alive():  # the script has ended without close(); so may have another rank
            deadline = deadline or time.monotonic() + _AT_EXIT_S
        if give_up.is_set() or (deadline is not None and time.monotonic() > deadline):
            return False
        time.sleep(_POLL_S)
    return True


def config_text(model: Any) -> str | None:
    """Return the `config.json` of a transformers model, with which `from_pretrained` builds it again; else None."""
    config = getattr(model, "config", None)
    made = getattr(config, "to_json_string", None)
    if not callable(made):
        return None
    text = json.loads(made())
    if not isinstance(text, Mapping):
        return None
    return json.dumps({**text, "architectures": text.get("architectures") or [type(model).__name__]}, indent=2)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raise errors of the system from inside as CheckpointError.  folder: of the checkpoint."""
    try:
        yield
    except OSError as error:
        file = next((path for path in (folder, *folder.parents) if is_file(path)), None)
        why = f"{file} is a file, and a checkpoint is a folder, to which each rank writes its part"
        fix = "free space or pass another folder; the last complete checkpoint is unharmed, and training can go on"
        if file is not None:
            fix = f"pass a folder, such as {file.with_suffix('')}, or move that file"
        raise CheckpointError(
            "the checkpoint cannot be written", where=str(folder), why=str(error) if file is None else why, fix=fix
        ) from error


def require_folder(folder: Any, keep: int | None) -> None:
    """Raise UsageError for arguments of `Pipe.save` that cannot work."""
    if not isinstance(folder, str | os.PathLike):
        raise UsageError(f"the folder is a {type(folder).__name__}", fix='pass a path, such as "runs/a"')
    if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
        raise UsageError(f"keep is {keep!r}", fix="pass how many checkpoints stay, 1 or more, or None for all")

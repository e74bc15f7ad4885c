"""Folders of checkpoints: one folder a step beside a small file `latest`, published so that a crash loses nothing.

    runs/a/step-00000010/checkpoint.json, model-00001-of-00002.safetensors, ...
    runs/a/step-00000020.tmp/   being written, or left by a run that ended meanwhile
    runs/a/latest               "step-00000010"
    runs/a/.order               the names of all, in the order in which they were written: a run may go back

A step's folder is written under a temporary name, with every file and the folder itself on the disk before it is
renamed; then `latest` is replaced; only then older ones are deleted.
"""

from __future__ import annotations

import os
import re
import socket
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from autopart.files.checkpoints.document import NAME
from autopart.files.checkpoints.storage import DRAFT, is_file, read, storage_of, write
from autopart.files.reading import named, unreadable
from autopart.ir.errors import CheckpointError, UsageWarning

T = TypeVar("T")
LATEST, ORDER = "latest", ".order"
_LOCK = ".lock"
_STEP = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
"""The folder of a step; saved again after a resume it gets a number, since nothing complete is ever overwritten."""


class Root:
    """A folder of checkpoints that this process writes to, locked until `close` against other runs.

    Raises CheckpointError if another run holds it, OSError if it cannot be written to.  A process that ends, however,
    releases its lock.
    """

    def __init__(self, folder: Path) -> None:
        self._storage = storage_of(folder)
        self._storage.make(folder)
        self.folder = folder
        self._unlock = self._locked()
        if self._unlock is None:
            return
        try:
            # What a run left that ended while it was saving: the lock is ours.
            for name in self._storage.names(folder):
                if name.endswith(DRAFT) and name.startswith(("step-", f".{LATEST}.", f".{ORDER}.")):
                    self._storage.remove(folder / name)
        except BaseException:
            self.close()
            raise

    def draft(self, step: int) -> Path:
        """Make the folder in which a checkpoint is written before it is published.  Raises OSError."""
        taken = [found for found in map(parsed, self._storage.names(self.folder)) if found and found[0] == step]
        again = f".{1 + max(again for _, again in taken)}" if taken else ""
        draft = self.folder / f"step-{step:08d}{again}{DRAFT}"
        self._storage.remove(draft)
        self._storage.make(draft)
        return draft

    def publish(self, draft: Path, keep: int | None) -> Path:
        """Give a written checkpoint its name, make it the latest, and then delete all but the newest `keep`; returns
        its folder.  Raises OSError; what was complete before is complete afterwards."""
        self._storage.sync(draft)
        final = draft.with_suffix("")
        before = complete(self.folder)
        write(self.folder / ORDER, "".join(f"{path.name}\n" for path in (*before, final)))
        self._storage.rename(draft, final)
        self._storage.sync(self.folder)
        write(self.folder / LATEST, final.name + "\n")
        self._storage.sync(self.folder)
        if keep is not None:
            # The steps of a run only grow: those that are as far belong to a branch that was left, and go first.
            before.sort(key=lambda path: parsed(path.name)[:1] < parsed(final.name)[:1])
            for old in before[: max(0, len(before) + 1 - keep)]:
                self._storage.remove(old)
        return final

    def close(self) -> None:
        """Let other runs write to the folder."""
        if self._unlock is not None:
            self._unlock()
        self._unlock = None

    def _locked(self) -> Callable[[], None] | None:
        """Lock the folder; returns None, with a warning, where there are no locks.  Raises as the class does."""
        try:
            held = self._storage.lock(self.folder / _LOCK, f"process {os.getpid()} on {socket.gethostname()}")
        except BlockingIOError as error:
            raise CheckpointError(
                "another run writes its checkpoints into this folder",
                where=str(self.folder),
                why=f"it is held by {str(error) or 'a process'}",
                fix="give each run a folder of its own, or end the other run first",
            ) from error
        if held is None:
            warnings.warn(
                f"nothing keeps another run from writing into {self.folder}: its file system has no locks; give each "
                "run a folder of its own",
                UsageWarning,
                stacklevel=2,
            )
        return held


def parsed(name: str) -> tuple[int, ...]:
    """Return the step of a checkpoint's folder, and how many times it had been saved before; () for other names."""
    found = _STEP.fullmatch(name)
    return (int(found[1]), int(found[2] or 0)) if found else ()


def complete(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder that were published, in the order in which they were; those of which this is
    not known come first, the oldest step first.  Raises OSError."""
    names = sorted(filter(parsed, storage_of(folder).names(folder)), key=parsed)
    found = [folder / name for name in names if is_file(folder / name / NAME)]
    order: list[str] = []
    with suppress(CheckpointError), named(folder / ORDER, CheckpointError):
        order = read(folder / ORDER).split()
    place = {name: number for number, name in enumerate(order)}
    return sorted(found, key=lambda path: place.get(path.name, -1))


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint of a folder, None if it has none or does not exist.

    It is the one that `latest` names; if that file is missing, the one that was written last.  Raises CheckpointError
    if it names one that is not there or not whole: an older one is only loaded by its own path."""
    root = Path(folder)
    name = _named(root)
    while name and not is_file(root / name / NAME):
        if (again := _named(root)) == name:
            older = next((f", such as {path}" for path in reversed(complete(root))), "")
            raise CheckpointError(
                f"the newest checkpoint, {name}, is not whole",
                where=str(root / name),
                why=f"{root / LATEST} names it, and it has no {NAME}",
                fix=f"copy it again from where it is whole, or pass the path of another one{older}",
            )
        name = again  # another run has published a newer one, and deleted this one
    found = [root / name] if name else complete(root)
    return found[-1] if found else None


def _named(root: Path) -> str:
    """Return what the file `latest` of a folder names, "" without one.  Raises CheckpointError if it names nothing."""
    path = root / LATEST
    if LATEST not in storage_of(root).names(root):
        return ""
    with named(path, CheckpointError, f"pass the path of a checkpoint; without {LATEST} the last one is loaded"):
        name = read(path, most_bytes=100).strip()
        if not _STEP.fullmatch(name) and complete(root):
            raise unreadable("does not name a checkpoint", why=f"it holds {name!r}")
        return name if _STEP.fullmatch(name) else ""


def found_at(folder: str | os.PathLike[str]) -> Path | None:
    """Return the checkpoint at a path: the folder of one, or the latest in a folder of several, or None."""
    place = Path(folder)
    return place if is_file(place / NAME) else latest(place)


def checkpoint_at(folder: str | os.PathLike[str]) -> Path:
    """Return what `found_at` returns.  Raises CheckpointError if there is no checkpoint."""
    place = Path(folder)
    found = found_at(place)
    if found is None:
        names = storage_of(place).names(place)
        why = "it has no checkpoint.json and no step-... folder with one" if names else "it is empty, or not there"
        fix = "pass the folder that was given to pipe.save"
        if any(name == ".metadata" or name.endswith(".safetensors") for name in names):
            why = "it is a folder of torch.distributed.checkpoint or of Hugging Face"
            fix = f"autopart checkpoint convert {place} FOLDER makes a checkpoint of it"
        if is_file(place):
            why = "it is a file, and a checkpoint is a folder, to which each rank writes its part"
            fix += "; a state of torch.save goes to pipe.load_state_dict(torch.load(file)), the same on every rank"
        raise CheckpointError(f"{place} holds no checkpoint", why=why, fix=fix)
    return found


def read_at(folder: str | os.PathLike[str], read: Callable[[Path], T]) -> T:
    """Return what `read` returns for the checkpoint at a path; read again if a run has published a newer one meanwhile,
    after which the first may have been deleted.  Raises what `checkpoint_at` and `read` raise."""
    path = checkpoint_at(folder)
    while True:
        try:
            return read(path)
        except CheckpointError:
            before, path = path, checkpoint_at(folder)
            if path == before:
                raise

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
import shutil
import socket
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from autopart.files.checkpoints.document import NAME
from autopart.files.reading import named, open_regular, read_text, unreadable
from autopart.files.storage import lock, unlock, write_whole
from autopart.ir.errors import CheckpointError

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
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._lock = _locked(folder)
        if self._lock is None:
            return
        try:
            with suppress(OSError):  # a full disk; it is meant for a message alone
                os.ftruncate(self._lock, 0)
                os.pwrite(self._lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            # What a run left that ended while it was saving: the lock is ours.
            for left in folder.glob("step-*.tmp"):
                shutil.rmtree(left, ignore_errors=True)
            for name in (LATEST, ORDER):
                for draft in folder.glob(f".{name}.*.tmp"):
                    draft.unlink(missing_ok=True)
        except BaseException:
            self.close()
            raise

    def draft(self, step: int) -> Path:
        """Make the folder in which a checkpoint is written before it is published.  Raises OSError."""
        taken = [found for found in map(parsed, self.folder.iterdir()) if found and found[0] == step]
        again = f".{1 + max(again for _, again in taken)}" if taken else ""
        draft = self.folder / f"step-{step:08d}{again}.tmp"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        return draft

    def publish(self, draft: Path, keep: int | None) -> Path:
        """Give a written checkpoint its name, make it the latest, and then delete all but the newest `keep`; returns
        its folder.  Raises OSError; what was complete before is complete afterwards."""
        sync_folder(draft)
        final = draft.with_suffix("")
        before = complete(self.folder)
        write_whole(self.folder / ORDER, "".join(f"{path.name}\n" for path in (*before, final)))
        os.rename(draft, final)
        sync_folder(self.folder)
        write_whole(self.folder / LATEST, final.name + "\n")
        sync_folder(self.folder)
        if keep is not None:
            # The steps of a run only grow: those that are as far belong to a branch that was left, and go first.
            before.sort(key=lambda path: parsed(path)[:1] < parsed(final)[:1])
            for old in before[: max(0, len(before) + 1 - keep)]:
                # Renamed first: half of a deleted checkpoint must not look like one.
                gone = old.with_name(f"{old.name}.tmp")
                shutil.rmtree(gone, ignore_errors=True)
                os.rename(old, gone)
                shutil.rmtree(gone, ignore_errors=True)
        return final

    def close(self) -> None:
        """Let other runs write to the folder."""
        unlock(self._lock)
        self._lock = None


def _locked(folder: Path) -> int | None:
    """Lock a folder; returns None, with a warning, where the file system has no locks.  Raises as `Root` does."""
    path = folder / _LOCK
    try:
        held = lock(path)
    except BlockingIOError as error:
        holder = ""
        with suppress(OSError), open_regular(path) as file:
            holder = file.read(200).decode(errors="replace")
        raise CheckpointError(
            "another run writes its checkpoints into this folder",
            where=str(folder),
            why=f"it is held by {holder or 'a process'}",
            fix="give each run a folder of its own, or end the other run first",
        ) from error
    if held is None:
        warnings.warn(
            f"nothing keeps another run from writing into {folder}: its file system has no locks; give each run a "
            "folder of its own",
            stacklevel=2,
        )
    return held


def parsed(path: Path) -> tuple[int, ...]:
    """Return the step of a checkpoint's folder, and how many times it had been saved before; () for other names."""
    found = _STEP.fullmatch(path.name)
    return (int(found[1]), int(found[2] or 0)) if found else ()


def complete(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder that were published, in the order in which they were; those of which this is
    not known come first, the oldest step first.  Raises OSError."""
    found = sorted((path for path in folder.iterdir() if parsed(path) and (path / NAME).is_file()), key=parsed)
    order: list[str] = []
    with suppress(CheckpointError), named(folder / ORDER, CheckpointError):
        order = read_text(folder / ORDER).split()
    place = {name: number for number, name in enumerate(order)}
    return sorted(found, key=lambda path: place.get(path.name, -1))


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint of a folder, None if it has none or does not exist.

    It is the one that `latest` names; if that file is missing, the one that was written last.  Raises CheckpointError
    if it names one that is not there or not whole: an older one is only loaded by its own path."""
    root = Path(folder)
    if not root.is_dir():
        return None
    name = _named(root)
    while name and not (root / name / NAME).is_file():
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
    if not os.path.lexists(path):
        return ""
    with named(path, CheckpointError, f"pass the path of a checkpoint; without {LATEST} the last one is loaded"):
        name = read_text(path, most_bytes=100).strip()
        if not _STEP.fullmatch(name) and complete(root):
            raise unreadable("does not name a checkpoint", why=f"it holds {name!r}")
        return name if _STEP.fullmatch(name) else ""


def found_at(folder: str | os.PathLike[str]) -> Path | None:
    """Return the checkpoint at a path: the folder of one, or the latest in a folder of several, or None."""
    place = Path(folder)
    return place if (place / NAME).is_file() else latest(place)


def checkpoint_at(folder: str | os.PathLike[str]) -> Path:
    """Return what `found_at` returns.  Raises CheckpointError if there is no checkpoint."""
    place = Path(folder)
    found = found_at(place)
    if found is None:
        why = "it has no checkpoint.json and no step-... folder with one" if place.is_dir() else "it does not exist"
        fix = "pass the folder that was given to pipe.save"
        if place.exists() and not place.is_dir():
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


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

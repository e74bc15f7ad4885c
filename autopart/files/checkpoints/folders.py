"""Folders of checkpoints: one folder a step beside a small file `latest`, published so that a crash loses nothing.

    runs/a/step-00000010/checkpoint.json, model-00001-of-00002.safetensors, ...
    runs/a/step-00000020.tmp/   being written, or left by a run that ended meanwhile
    runs/a/latest               "step-00000010"

A step's folder is written under a temporary name, with every file and the folder itself on the disk before it is
renamed; then `latest` is replaced; only then older ones are deleted.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
from pathlib import Path

from autopart.files.checkpoints.document import NAME
from autopart.files.storage import write_whole
from autopart.ir.errors import CheckpointError

LATEST = "latest"
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
        self._lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._lock, 200, 0).decode(errors="replace")
            os.close(self._lock)
            raise CheckpointError(
                "another run writes its checkpoints into this folder",
                where=str(folder),
                why=f"it is held by {holder or 'a process'}",
                fix="give each run a folder of its own, or end the other run first",
            ) from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        # What a run left that ended while it was saving: the lock is ours.
        for left in folder.glob("step-*.tmp"):
            shutil.rmtree(left, ignore_errors=True)
        for draft in folder.glob(f".{LATEST}.*.tmp"):
            draft.unlink(missing_ok=True)

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
        os.rename(draft, final)
        sync_folder(self.folder)
        write_whole(self.folder / LATEST, final.name + "\n")
        sync_folder(self.folder)
        if keep is not None:
            for old in complete(self.folder)[:-keep]:
                if old != final:
                    # Renamed first: half of a deleted checkpoint must not look like one.
                    gone = old.with_name(f"{old.name}.tmp")
                    os.rename(old, gone)
                    shutil.rmtree(gone, ignore_errors=True)
        return final

    def close(self) -> None:
        """Let other runs write to the folder."""
        os.close(self._lock)


def parsed(path: Path) -> tuple[int, int] | None:
    """Return the step of a checkpoint's folder, and how many times it had been saved before; None for other names."""
    found = _STEP.fullmatch(path.name)
    return (int(found[1]), int(found[2] or 0)) if found else None


def complete(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder that were published, the oldest step first.  Raises OSError."""
    found = [path for path in folder.iterdir() if parsed(path) is not None and (path / NAME).is_file()]
    return sorted(found, key=lambda path: parsed(path) or (0, 0))


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint of a folder, None if it has none or does not exist.

    It is the one that `latest` names; if that file is missing or names something else, the newest step's."""
    root = Path(folder)
    if not root.is_dir():
        return None
    try:
        name = (root / LATEST).read_text(errors="replace")[:100].strip()
    except OSError:
        name = ""
    if _STEP.fullmatch(name) and (root / name / NAME).is_file():
        return root / name
    found = complete(root)
    return found[-1] if found else None


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
        raise CheckpointError(
            f"{place} holds no checkpoint", why=why, fix="pass the folder that was given to pipe.save"
        )
    return found


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

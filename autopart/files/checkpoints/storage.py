"""Where checkpoints lie: what they need of a storage, and the one that ships, folders of the file system.

Another storage is an entry of `STORAGES`, the same on every rank.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol

from autopart.files.limits import MAX_BYTES
from autopart.files.reading import open_regular, read_text
from autopart.files.storage import drafted, lock, unlock
from autopart.ir.errors import CheckpointError

DRAFT = ".tmp"
"""The ending of what is being written, or deleted."""
_NOTHING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+:")


class Storage(Protocol):
    """What checkpoints need of a storage.  Each method raises OSError for what fails.

    A folder with a `checkpoint.json` is a complete checkpoint.  So where `rename` and `remove` are not all or nothing,
    they bring that file last, and take it first.
    """

    def open(self, path: Path) -> BinaryIO:
        """Open a file to read it."""

    def create(self, path: Path) -> BinaryIO:
        """Open a new file to write it.  Raises FileExistsError."""

    def rename(self, old: Path, new: Path) -> None:
        """Give a file or a folder another name.  Readers of a file that is replaced see the old or the new one."""

    def names(self, folder: Path) -> list[str]:
        """Return the names of what is in a folder, [] where there is none."""

    def size(self, path: Path) -> int | None:
        """Return the bytes of a file, None where there is none."""

    def make(self, folder: Path) -> None:
        """Make a folder and those above it, if they are not there."""

    def remove(self, path: Path) -> None:
        """Delete a file or a folder, if it is there."""

    def sync(self, what: BinaryIO | Path) -> None:
        """Wait until what was written to a file, or the names in a folder, would outlive a power failure."""

    def lock(self, path: Path, holder: str) -> Callable[[], None] | None:
        """Take a lock that ends with this process; returns what releases it, None where there are no locks.

        Raises BlockingIOError with the text of its holder if it is taken."""


class Folders:
    """Folders of the file system, which all ranks see."""

    def open(self, path: Path) -> BinaryIO:
        """Open a regular file: a pipe or a device is refused and never waited for."""
        return open_regular(path)

    def create(self, path: Path) -> BinaryIO:
        """Open a new file to write it."""
        return open(path, "xb")

    def rename(self, old: Path, new: Path) -> None:
        """Give a file or a folder another name, at once."""
        os.replace(old, new)

    def names(self, folder: Path) -> list[str]:
        """Return the names of what is in a folder."""
        try:
            return os.listdir(folder)
        except OSError as error:
            if error.errno in _NOTHING:
                return []
            raise

    def size(self, path: Path) -> int | None:
        """Return the bytes of a regular file."""
        with suppress(OSError, ValueError):  # ValueError: a name that no file can have
            found = os.stat(path)
            return found.st_size if stat.S_ISREG(found.st_mode) else None
        return None

    def make(self, folder: Path) -> None:
        """Make a folder and those above it."""
        folder.mkdir(parents=True, exist_ok=True)

    def remove(self, path: Path) -> None:
        """Delete a file, or a folder, which is renamed first: half of a checkpoint must not look like one."""
        if not path.is_dir() or path.is_symlink():
            path.unlink(missing_ok=True)
            return
        if path.suffix != DRAFT:
            gone = path.with_name(path.name + DRAFT)
            shutil.rmtree(gone, ignore_errors=True)
            os.rename(path, gone)
            path = gone
        shutil.rmtree(path, ignore_errors=True)

    def sync(self, what: BinaryIO | Path) -> None:
        """Wait until the disk has it."""
        if not isinstance(what, Path):
            what.flush()
            os.fsync(what.fileno())
            return
        descriptor = os.open(what, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def lock(self, path: Path, holder: str) -> Callable[[], None] | None:
        """Lock a file, in which the holder stands."""
        try:
            held = lock(path)
        except BlockingIOError as error:
            text = b""
            with suppress(OSError), open_regular(path) as file:
                text = file.read(200)
            raise BlockingIOError(text.decode(errors="replace")) from error
        if held is None:
            return None
        with suppress(OSError):  # a full disk; it is meant for a message alone
            os.ftruncate(held, 0)
            os.pwrite(held, holder.encode(), 0)
        return partial(unlock, held)


FOLDERS = Folders()
STORAGES: dict[str, Storage] = {}
"""Storages besides folders, by the beginning of their paths: "s3:" for s3://bucket/run.  A path prints with one slash
there, as `Path` does, and is found again either way."""


def storage_of(path: Path) -> Storage:
    """Return the storage of a path.  Raises CheckpointError for a URL that no entry of `STORAGES` is for."""
    first = path.parts[0] if path.parts else ""
    if first in STORAGES:
        return STORAGES[first]
    if _SCHEME.fullmatch(first) and not os.path.isdir(first):
        raise CheckpointError(
            f"no storage is known for {first}//",
            where=str(path),
            fix=f'enter one on every rank, autopart.files.checkpoints.storage.STORAGES["{first}"] = ..., or save to a '
            "folder that all ranks see, and copy it",
        )
    return FOLDERS


def is_file(path: Path) -> bool:
    """Return whether there is a file at a path."""
    return storage_of(path).size(path) is not None


def read(path: Path, *, most_bytes: int = MAX_BYTES) -> str:
    """Read a whole UTF-8 file.  Raises `unreadable`, as `read_text` does."""
    return read_text(path, most_bytes=most_bytes, opened=storage_of(path).open)


def write(path: Path, text: str) -> None:
    """Write a UTF-8 file: readers see the old content or the new one, and a failure leaves the old one.  Raises
    OSError."""
    storage = storage_of(path)
    with drafted(path, storage.remove) as draft:
        with storage.create(draft) as file:
            file.write(text.encode())
            storage.sync(file)
        storage.rename(draft, path)

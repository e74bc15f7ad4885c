"""What is kept between runs, in files that only this user's own processes wrote.

A kept text stands behind a seal: a digest of it and of its file's name under a secret of the folder, which only the
user can read.  So an edit, a file that was copied from elsewhere or one of another name is no kept text, whatever it
says.  The seal does not replace the checks of what the text says; it covers what no check can know, such as how long
an op took.  What is not believed is ignored with a `CacheWarning` and made anew; it never stops anybody.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import warnings
from contextlib import suppress
from pathlib import Path

from autopart.files.limits import MAX_BYTES
from autopart.files.reading import Source, check_own_folder, read_own_text, source_of
from autopart.files.storage import write_whole
from autopart.ir.errors import AutopartError
from autopart.ir.printable import printable

_SECRET = ".secret"
_SECRET_DIGITS = 64
_HEAD = "sealed "
_PRIVATE_FILE, _PRIVATE_FOLDER = 0o600, 0o700


class CacheWarning(UserWarning):
    """Something kept on disk is not believed, and made anew."""


def kept_source(path: Path) -> Source:
    """A kept file, for messages."""
    return source_of(path, AutopartError)


def read_kept(path: Path) -> str | None:
    """The text that was kept in this file; None when there is no file.  Raises AutopartError for one to ignore."""
    source = kept_source(path)
    whole = read_own_text(path, source, most_bytes=MAX_BYTES + 1024)
    if whole is None:
        return None
    head, _, text = whole.partition("\n")
    secret = _secret(path.parent)
    if secret is None or not hmac.compare_digest(head.encode(), _seal(secret, path.name, text).encode()):
        raise source.error("is not believed", why="its seal is missing or of another text, name or folder")
    return text


def write_kept(path: Path, text: str) -> None:
    """Keep a text in this file, whose folder is made where it is missing.

    Raises AutopartError for a folder that others can write, OSError for what cannot be written.
    """
    make_private(path.parent)
    check_own_folder(path.parent, kept_source(path))
    secret = _secret(path.parent) or _new_secret(path.parent)
    write_whole(path, f"{_seal(secret, path.name, text)}\n{text}", mode=_PRIVATE_FILE)


def make_private(folder: Path) -> None:
    """Make a folder and those above it where they are missing, for this user alone.  Raises OSError."""
    missing = [above for above in (folder, *folder.parents) if not above.exists()]
    for above in reversed(missing):
        above.mkdir(_PRIVATE_FOLDER, exist_ok=True)


def warn_ignored(path: Path, error: AutopartError) -> None:
    """Say that a kept file is not believed, and why."""
    warnings.warn(printable(f"{path} is ignored and made anew: {error}", keep="\n"), CacheWarning, stacklevel=2)


def _seal(secret: str, name: str, text: str) -> str:
    message = f"{name}\n{text}".encode("utf-8", "surrogatepass")
    return _HEAD + hmac.new(bytes.fromhex(secret), message, hashlib.sha256).hexdigest()


def _secret(folder: Path) -> str | None:
    """The secret of a folder, if it has one that nobody else can have written."""
    path = folder / _SECRET
    try:
        found = read_own_text(path, kept_source(path), most_bytes=_SECRET_DIGITS)
    except AutopartError:
        return None
    good = found is not None and len(found) == _SECRET_DIGITS and not set(found) - set("0123456789abcdef")
    return found if good else None


def _new_secret(folder: Path) -> str:
    """A new secret; when another process makes one at the same time, there is one for both.  Raises OSError."""
    path = folder / _SECRET
    if os.path.lexists(path):  # a broken one: `_secret` did not take it
        with suppress(OSError):
            os.unlink(path)
    with suppress(FileExistsError):
        write_whole(path, secrets.token_hex(_SECRET_DIGITS // 2), mode=_PRIVATE_FILE, anew=True)
    found = _secret(folder)
    if found is None:
        raise OSError(f"{path} cannot be read")
    return found

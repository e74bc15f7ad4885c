"""What is kept between runs is private to this user, and whatever stands in its place stops nobody."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from autopart.files import storage
from autopart.files.caches import CacheWarning, cost_path, keep_times, read_kept, read_times, write_kept
from autopart.files.storage import locked


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Name a kept file in a sub-folder of the cache folder; neither exists yet."""
    monkeypatch.setenv("AUTOPART_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "plans" / "a.json"


def test_what_is_kept_is_read_and_replaced(path: Path) -> None:
    assert read_kept(path, str) is None
    for text in ("one", "other\nlines \u2026\n", ""):
        write_kept(path, text)
        assert read_kept(path, str) == text


def test_nobody_else_may_write_whatever_the_umask(path: Path) -> None:
    before = os.umask(0)
    try:
        write_kept(path, "text")
        with locked(path):
            pass
    finally:
        os.umask(before)
    for made in (path.parents[1], path.parent, *path.parent.iterdir()):
        assert made.stat().st_mode & 0o077 == 0, made
    assert read_kept(path, str) == "text"


def _instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        path.unlink()
        make(path)

    return spoil


SPOILED: dict[str, Callable[[Path], object]] = {
    "a link to itself": _instead(lambda path: path.symlink_to(path.name)),
    "a pipe": _instead(os.mkfifo),
    "a device": _instead(lambda path: path.symlink_to("/dev/zero")),
    "a folder": _instead(Path.mkdir),
    "no text": lambda path: path.write_bytes(b"\xff"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_what_is_no_text_file_is_ignored_and_replaced_where_it_can_be(path: Path, name: str) -> None:
    write_kept(path, "text")
    keep_times("here", {"a": (1, 2)})
    for spoiled in (path, cost_path()):
        SPOILED[name](spoiled)
    with pytest.warns(CacheWarning, match=f"{path} is ignored"):
        assert read_kept(path, str) is None
    with pytest.warns(CacheWarning, match="costs.json is ignored and replaced"):
        assert read_times("here") == {}
        keep_times("here", {"a": (3, 4)})
    if name == "a folder":
        with pytest.raises(OSError):
            write_kept(path, "new")
    else:
        write_kept(path, "new")
        assert read_kept(path, str) == "new" and read_times("here") == {"a": (3, 4)}


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("elsewhere")])
def test_a_lock_that_is_no_file_is_no_lock(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "a.lock")
    with pytest.raises(OSError), locked(tmp_path / "a"):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_lock_that_a_stopped_process_holds_is_not_waited_for_for_ever(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "LOCK_SECONDS", 0.05)
    path = cost_path()
    path.parent.mkdir(parents=True)
    with open(path.with_name(f"{path.name}.lock"), "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        keep_times("here", {"a": (1, 2)})
    assert not path.exists()
    keep_times("here", {"a": (1, 2)})
    assert read_times("here") == {"a": (1, 2)}

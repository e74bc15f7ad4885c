"""What is kept between runs is read from files that nobody but this user can have written, and it stops nobody."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from autopart.files import storage
from autopart.files.caches.cost_cache import cost_path, keep_times, read_times
from autopart.files.caches.kept import CacheWarning, read_kept, write_kept
from autopart.files.storage import locked
from autopart.ir.errors import AutopartError


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


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _link_folder(path: Path) -> None:
    path.parent.rename(path.parents[1] / "elsewhere")
    path.parent.symlink_to("elsewhere")


def _instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        path.unlink()
        make(path)

    return spoil


SPOILED: dict[str, Callable[[Path], object]] = {
    "writable by the group": lambda path: path.chmod(0o620),
    "writable by others": lambda path: path.chmod(0o602),
    "in a folder of the group": lambda path: path.parent.chmod(0o770),
    "in a folder of all": lambda path: path.parent.chmod(0o1777),
    "a link": _link,
    "in a folder that is a link": _link_folder,
    "a link to itself": _instead(lambda path: path.symlink_to(path.name)),
    "a pipe": _instead(os.mkfifo),
    "a device": _instead(lambda path: path.symlink_to("/dev/zero")),
    "a folder": _instead(Path.mkdir),
    "in a cache folder of the group": lambda path: path.parents[1].chmod(0o770),
    "no text": lambda path: path.write_bytes(b"\xff"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_what_others_can_have_written_is_not_believed_and_is_replaced_where_it_can_be(path: Path, name: str) -> None:
    write_kept(path, "text")
    SPOILED[name](path)
    with pytest.warns(CacheWarning, match=f"{path} is ignored"):
        assert read_kept(path, str) is None
    if "folder" in name:
        with pytest.raises((AutopartError, OSError)):
            write_kept(path, "new")
    else:
        write_kept(path, "new")
        assert read_kept(path, str) == "new"


def test_what_belongs_to_another_user_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_kept(path, "text")
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.warns(CacheWarning, match="belongs to another user"):
        assert read_kept(path, str) is None
    with pytest.raises(AutopartError, match="belongs to another user"):
        write_kept(path, "new")


def test_a_file_outside_of_the_cache_folder_is_judged_with_its_own_folder_alone(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir(mode=0o777)
    (tmp_path / "shared").chmod(0o777)
    write_kept(tmp_path / "shared" / "own" / "a.json", "text")
    assert read_kept(tmp_path / "shared" / "own" / "a.json", str) == "text"


@pytest.mark.parametrize("name", [name for name in SPOILED if "cache folder" not in name])
def test_times_of_ops_are_measured_again_whatever_stands_in_their_place(path: Path, name: str) -> None:
    keep_times("here", {"a": (1, 2)})
    SPOILED[name](cost_path())
    with pytest.warns(CacheWarning, match="is ignored and replaced"):
        assert read_times("here") == {}
        keep_times("here", {"a": (3, 4)})
    if "folder" not in name:
        assert read_times("here")["a"] == (3, 4)


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

"""Files are written whole or not at all, and one process at a time changes one."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from autopart.files.storage import locked, write_whole


def test_the_old_content_is_replaced_and_nothing_else_left(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text in ("one", "other: \u2026"):
        write_whole(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_file_has_the_permissions_of_any_other_file(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "text")
    (tmp_path / "b").write_text("text")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


@pytest.mark.parametrize("failing", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_whatever_fails_the_old_file_stays_and_the_draft_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, error: type[BaseException]
) -> None:
    path = tmp_path / "a.json"
    write_whole(path, "old")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(error):
        write_whole(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.json"]


def test_what_is_no_text_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "a", "\ud800")
    assert os.listdir(tmp_path) == []


def test_one_is_inside_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "count"
    path.write_text("0")

    def add() -> None:
        for _ in range(100):
            with locked(path):
                write_whole(path, str(int(path.read_text()) + 1))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() == "400"


def test_the_lock_of_one_path_does_not_hold_up_another(tmp_path: Path) -> None:
    with locked(tmp_path / "a"), locked(tmp_path / "b"):
        pass
    with locked(tmp_path / "a"):
        pass

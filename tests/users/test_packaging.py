"""A copy of the repository without links (a zip file, Windows) installs whole, and says what is wrong uninstalled."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("autopart", "passes", "runtime")


@pytest.fixture
def without_links(tmp_path: Path) -> Path:
    copy = tmp_path / "copy"
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in SOURCES:
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=ignored)
    for link in ("passes", "runtime"):
        (copy / "autopart" / link).unlink()
        (copy / "autopart" / link).write_text(f"../{link}")  # what git writes where links are switched off
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


def test_a_wheel_made_without_links_holds_every_module(without_links: Path) -> None:
    made = _run(without_links, "-c", "from setuptools import build_meta; print(build_meta.build_wheel('.'))")
    assert made.returncode == 0, made.stderr
    names = zipfile.ZipFile(without_links / made.stdout.split()[-1]).namelist()
    found = {name for name in names if name.endswith(".py")}
    places = {"autopart": "", "passes": "autopart/", "runtime": "autopart/"}
    sources = {f: sorted((without_links / f).rglob("*.py")) for f in SOURCES}
    wanted = {places[f] + str(path.relative_to(without_links)) for f, paths in sources.items() for path in paths}
    assert found == wanted


def test_an_uninstalled_copy_without_links_names_the_link_and_the_remedy(without_links: Path) -> None:
    shown = _run(without_links, "-S", "-c", "import autopart")  # -S: no installed packages
    assert shown.returncode == 1
    assert "autopart/passes should be a link to ../passes" in shown.stderr
    assert "pip install -e ." in shown.stderr


def _run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)

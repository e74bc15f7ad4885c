"""What is published installs whole, also from a copy without links (a zip file), and runs with what it declares alone.

An uninstalled copy says what is wrong."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

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


def declared(name: str, seen: set[str]) -> Iterator[str]:
    """Yield the distributions that one needs without extras, with what those need, each once."""
    for text in distribution(name).requires or ():
        needed = Requirement(text)
        if (needed.marker is None or needed.marker.evaluate({"extra": ""})) and needed.name.lower() not in seen:
            seen.add(needed.name.lower())
            yield needed.name
            yield from declared(needed.name, seen)


def environment(home: Path) -> Path:
    """Make an environment with what autopart declares, and what builds it, and nothing else; return its Python."""
    venv.create(home, with_pip=False, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    for name in [*declared("autopart", {"autopart"}), "setuptools"]:
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))).resolve())
    return home / "bin" / "python"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_what_is_published_runs_with_what_it_declares_alone(kind: str, without_links: Path, tmp_path: Path) -> None:
    made = _run(without_links, "-c", f"from setuptools import build_meta; print(build_meta.build_{kind}('.'))")
    assert made.returncode == 0, made.stderr
    python = environment(tmp_path / "home")
    install = ("--python", str(python), "install", "--no-index", "--no-build-isolation", "--no-cache-dir")
    done = _run(tmp_path, "-m", "pip", *install, str(without_links / made.stdout.split()[-1]))
    assert done.returncode == 0, done.stdout + done.stderr
    home = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    for command, shown in {
        "-c 'import autopart, sys; print(autopart.__file__); print(sorted(sys.modules))'": str(tmp_path / "home"),
        "-m autopart plan mlp --cluster cpu:2 --costs analytic --out plan.json": "plan written to plan.json",
        "-m autopart report plan.json": "report written to plan.html",
        "-m autopart verify mlp --cluster cpu:2 --costs analytic": "within tolerance",
        "-c 'import pytest'": "No module named",
    }.items():
        ran = subprocess.run(f"{python} {command}", shell=True, cwd=tmp_path, env=home, capture_output=True, text=True)
        assert shown in ran.stdout + ran.stderr, ran.stdout + ran.stderr
    assert "<script>" in (tmp_path / "plan.html").read_text()


def test_the_readme_says_which_releases_of_torch_are_accepted_and_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = [Requirement(text) for text in project["dependencies"] if text.startswith("torch")]
    readme = (ROOT / "README.md").read_text()
    tested, oldest = re.findall(r"Tested with torch ([\d.]+); ([\d.]+) or newer is accepted", readme)[0]
    assert torch.specifier == Requirement(f"torch>={oldest}").specifier
    assert set(re.findall(r"torch==([\d.]+)", readme)) == {tested}
    extras = project["optional-dependencies"]
    (everything,) = [Requirement(text) for text in extras["all"]]
    assert everything.extras == set(extras) - {"all", "dev"}


def _run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)

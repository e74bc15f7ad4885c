"""Every command of docs/features.md runs as written, in a copy of the repository's files, and prints what it says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from autopart.cli.main import app

ROOT = Path(__file__).parents[3]
ROWS: list[tuple[str, str, str, str]] = re.findall(
    r"^\| (\d+) \|[^|]+\|([^|]*)\|([^|]*)\|([^|]*)\|$", (ROOT / "docs/features.md").read_text(), re.MULTILINE
)
"""The number of each feature, its commands, what these print, and its state."""


def commands(cell: str) -> list[str]:
    """Return the commands of a cell, in order."""
    return re.findall(r"`((?:autopart|python|torchrun) [^`]+)`", cell)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files of the repository, as a clone has them."""
    folder = tmp_path_factory.mktemp("clone")
    listed = subprocess.run(("git", "ls-files", "-z"), cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def test_every_feature_has_commands_with_what_they_print_or_a_page_or_is_said_to_be_missing() -> None:
    assert [int(number) for number, *_ in ROWS] == list(range(1, 26))
    known = get_command(app).commands  # type: ignore[attr-defined]
    for number, shown, printed, state in ROWS:
        assert commands(shown) or "](" in shown + state or "missing" in state, number
        assert bool(commands(shown)) == bool(re.findall("`[^`]+`", printed)), number
        for words in commands(shown):
            assert words.split()[0] != "autopart" or words.split()[1] in known, words
            for script in re.findall(r"(?:benchmarks|examples)/\w+\.py", words):
                assert (ROOT / script).is_file(), script


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("number", "shown", "printed"), [row[:3] for row in ROWS if commands(row[1])])
def test_a_command_runs_as_written_and_prints_what_the_page_says(
    clone: Path, number: str, shown: str, printed: str
) -> None:
    """In the order of the page, since later commands read what earlier ones wrote."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    env |= {"PATH": path, "PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    said = ""
    for command in commands(shown):
        ran = subprocess.run(command, shell=True, cwd=clone, env=env, capture_output=True, text=True, timeout=800)
        said += ran.stdout + ran.stderr
        code = re.search(r"exit code (\d)", printed)
        assert ran.returncode == int(code[1] if code else 0), f"{command}: {ran.returncode}\n{said}"
    for text in re.findall("`([^`]+)`", printed):
        assert text in " ".join(said.split()), f"{number}: {text!r} is not in\n{said}"

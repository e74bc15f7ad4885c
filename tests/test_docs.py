"""What README and docs show is what the commands print, and what they quote is what stands."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from support.languages.docs import PAPERS, ROOT, Block, blocks, printed, shape, write_files

from autopart.files.clusters import parse_cluster

BLOCKS = [block for paper in PAPERS for block in blocks(paper)]
CONSOLES = [block for block in BLOCKS if block.language == "console"]


QUOTES = [
    (paper.name, path, text)
    for paper in PAPERS
    for path, text in re.findall(
        r"`([\w/]+/\w+\.py)`:\n+```python\n(.*?)^```$", paper.read_text(), re.MULTILINE | re.DOTALL
    )
]
"""(paper, path, code) of code that a paper says a file has."""
QUOTED = {text for _, _, text in QUOTES}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What every command of the papers prints, each run once, in the order of the papers, in one folder."""
    folder = tmp_path_factory.mktemp("papers")
    write_files(folder)
    found: dict[str, list[str]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in ("RANK", "WORLD_SIZE"):
            patch.delenv(name, raising=False)
        for block in CONSOLES:
            for command, _ in block.answers():
                if command not in found:
                    found[command] = printed(command)
    return found


@pytest.mark.parametrize("block", CONSOLES, ids=lambda block: f"{block.paper}: {block.text.splitlines()[0]}")
def test_a_command_prints_what_is_shown(block: Block, answers: dict[str, list[str]]) -> None:
    for command, shown in block.answers():
        found = answers[command]
        if block.varies:
            assert [shape(line) for line in found] == [shape(line) for line in shown], command
        else:
            assert found == shown, (
                f"{command}: run `python tests/support/languages/docs.py` if the papers are what is old"
            )


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_every_block_says_what_it_is(paper: Path) -> None:
    fences = re.findall(r"^```(.*)$", paper.read_text(), re.MULTILINE)
    assert set(fences[::2]) <= {"python", "yaml", "bash", "console", "console varies", "text"} and set(
        fences[1::2]
    ) <= {""}
    for block in blocks(paper):
        if block.language == "python" and block.text not in QUOTED:
            ast.parse(block.text)


def test_the_cluster_that_is_shown_can_be_read(tmp_path: Path) -> None:
    for number, block in enumerate(block for block in BLOCKS if block.language == "yaml"):
        path = tmp_path / f"{number}.yaml"
        path.write_text(block.text)
        assert parse_cluster(path).world > 0


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_links_lead_somewhere(paper: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]*)(?:#[^)]*)?\)", paper.read_text()):
        if target and "://" not in target:
            assert (paper.parent / target).exists(), target
    headings = {
        path: {
            re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-")
            for line in path.read_text().splitlines()
            if line.startswith("#")
        }
        for path in PAPERS
    }
    for target, place in re.findall(r"\]\(([^)#\s]*)#([^)]*)\)", paper.read_text()):
        page = (paper.parent / target).resolve() if target else paper
        assert place in headings[page], f"{target}#{place}"


def test_readme_is_three_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize(("paper", "path", "text"), QUOTES, ids=lambda value: value.split("\n")[0])
def test_quoted_code_is_that_of_the_file(paper: str, path: str, text: str) -> None:
    assert text in (ROOT / path).read_text(), f"{paper} quotes {path}"


def test_what_is_added_from_outside_is_short_and_quoted() -> None:
    quoted = {path: text for paper, path, text in QUOTES if paper == "extending.md"}
    for kind in ("schedule", "cost_source", "op", "report"):
        assert len(quoted[f"tests/support/languages/own_{kind}.py"].splitlines()) < 25, kind


def test_every_kind_of_addition_touches_at_most_four_rooms() -> None:
    page = (ROOT / "docs/extending.md").read_text()
    rows = re.findall(r"^\| \[([\w ]+)\]\(#[\w-]+\) \| ([^|]*) \|", page, re.MULTILINE)
    assert len(rows) == 6
    for kind, rooms in rows:
        named = re.findall(r"`([\w/.]+)`", rooms)
        assert 1 <= len(named) <= 4, kind
        for room in named:
            assert (ROOT / room).exists() or (ROOT / "autopart" / room).exists(), room

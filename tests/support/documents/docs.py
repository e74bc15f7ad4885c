"""Extracts the code blocks of README.md and docs/, runs their commands and compares the output.

    python tests/support/documents/docs.py      rewrites README.md and docs/ with the current output of the commands

A row of a table that begins with a file of benchmarks/results/ and a name in it ends with its median and quartiles.
A block marked `console` holds commands after "$ " and their exact output. In one marked `console varies` the numbers
depend on the machine. A file named right before a `python`, `yaml` or `json` block exists when commands run.
docs/pipe.md is made from docstrings (`pipe_page.py`).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from autopart.cli.main import main

ROOT = Path(__file__).parents[3]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```(\w+)?( varies)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"`(\w+\.(?:py|yaml|json))`[^`]*\n+```(?:python|yaml|json)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MEASURED = re.compile(r"^\| `(\w+)\.json` \| ([^|]+) \|[^|]*\|[^|]*\|$", re.MULTILINE)
_PROGRESS = re.compile(r" *\d+\.\d s  ")
_PATH = re.compile(r"\b\w+(?:\.\w+)*\.[a-zA-Z_]\w*")
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    document: str
    language: str
    varies: bool
    text: str

    def answers(self) -> list[tuple[str, list[str]]]:
        """Return each command of a console block with the lines that follow it."""
        found: list[tuple[str, list[str]]] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
        return found


def blocks(document: Path) -> list[Block]:
    """Return the fenced blocks of a document in order."""
    found = _BLOCK.findall(document.read_text())
    return [Block(document.name, language, bool(varies), text) for language, varies, text in found]


def write_files(folder: Path) -> None:
    """Write the files whose content the documents show."""
    for document in DOCUMENTS:
        for name, text in _FILE.findall(document.read_text()):
            (folder / name).write_text(text)


def printed(command: str) -> list[str]:
    """Return the lines a command prints in the current folder, without progress lines and trailing blank lines.

    A command may end with `> FILE 2> /dev/null`, which leaves none.
    """
    words = shlex.split(command)
    if words[0] == "cat":
        return Path(words[1]).read_text().splitlines()
    assert words[0] == "autopart", command
    text, errors, file = io.StringIO(), None, None
    if words[-2:] == ["2>", "/dev/null"]:
        words, file, errors = words[:-4], words[-3], io.StringIO()
    with (
        contextlib.redirect_stdout(text),
        contextlib.redirect_stderr(errors or text),
        contextlib.suppress(SystemExit),
    ):
        main(words[1:])
    if file is not None:
        Path(file).write_text(text.getvalue())
        return []
    lines = [line for line in text.getvalue().splitlines() if not _PROGRESS.match(line)]
    while lines and not lines[-1].strip():
        lines.pop()
    return lines


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


def measured(row: re.Match[str]) -> str:
    """Return a row of a table with the median and the quartiles that its file has under its name."""
    found = json.loads((ROOT / f"benchmarks/results/{row[1]}.json").read_text())
    found = found.get("ratios", found)
    for key in [row[2]] if row[2] in found else row[2].split(": "):
        found = found[key]
    return f"| `{row[1]}.json` | {row[2]} | {found['median']:.2f} | {found['low']:.2f} to {found['high']:.2f} |"


def shape(line: str) -> str:
    """Return a line without machine-dependent parts, with * for module paths and # for numbers."""
    return " ".join(_NUMBER.sub("#", _PATH.sub("*", line.replace("─", ""))).split())


def _rewrite() -> None:
    from support.documents.pipe_page import PAGE, page

    PAGE.write_text(page())
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder))
        os.chdir(folder)
        os.environ.setdefault("AUTOPART_CACHE", folder)
        for document in DOCUMENTS:
            text = MEASURED.sub(measured, document.read_text())
            for block in blocks(document):
                if block.language == "console":
                    lines = []
                    for command, _ in block.answers():
                        lines += [f"$ {command}", *printed(command)]
                    text = text.replace(block.text, "\n".join(lines) + "\n")
            document.write_text(text)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    _rewrite()

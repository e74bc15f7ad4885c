"""What docs/extending.md quotes is what the tests run and the package holds."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/extending.md").read_text()
QUOTES = re.findall(r"`([\w/]+\.py)`\n *```python\n(.*?)\n *```", PAGE, re.DOTALL)
MOST_LINES = 25


def test_every_block_names_its_file() -> None:
    assert len(QUOTES) == PAGE.count("```python") == 6


@pytest.mark.parametrize(("path", "code"), QUOTES, ids=[path for path, _ in QUOTES])
def test_what_is_quoted_is_there(path: str, code: str) -> None:
    assert dedent(code) in dedent_lines((ROOT / path).read_text())


def dedent_lines(text: str) -> str:
    """The text as it is, and behind it without the indentation of class bodies and tables."""
    return text + "\n" + re.sub(r"^ {4}", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize(("path", "code"), [(p, c) for p, c in QUOTES if p.startswith("tests/")])
def test_what_a_user_adds_is_short(path: str, code: str) -> None:
    assert len(code.splitlines()) < MOST_LINES


def test_every_file_that_is_named_exists() -> None:
    for path in set(re.findall(r"`((?:autopart|passes|runtime|tests)/[\w/.]+)`", PAGE)):
        assert (ROOT / path).exists(), path
    rooms = re.findall(r"\| \[[^|]*\| ([^|]*) \|", PAGE)
    assert len(rooms) == 6 and all(room.count(",") <= 3 for room in rooms)

"""Text that a terminal shows as it stands: names and notes come from files, and may hold escape sequences."""

from __future__ import annotations


def printable(text: str, *, keep: str = "") -> str:
    """The text with every character that is not printable (control characters, marks that turn the direction of
    writing, lone surrogates) as Python's `\\x1b` or `\\u202e`; those in `keep` stay."""
    if text.isprintable():
        return text
    shown = (c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii") for c in text)
    return "".join(shown)


def shortened(text: str, most: int = 60) -> str:
    """The text, printable, in at most so many characters: a name in a message may come from a file."""
    shown = printable(text[: most + 1])
    return shown if len(shown) <= most else shown[: most - 3] + "..."

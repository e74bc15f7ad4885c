"""Text made safe for a terminal: names and notes come from files, and may hold escape sequences."""

from __future__ import annotations


def printable(text: str, *, keep: str = "") -> str:
    """Escape every character that is not printable as Python does (`\\x1b`, `\\u202e`), except those in `keep`.

    Not printable are control characters, marks that change the direction of writing, and lone surrogates.
    """
    if text.isprintable():
        return text
    shown = (c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii") for c in text)
    return "".join(shown)


def shortened(text: str, most: int = 60) -> str:
    """Return the text, printable and cut to `most` characters."""
    shown = printable(text[: most + 1])
    return shown if len(shown) <= most else shown[: most - 3] + "..."

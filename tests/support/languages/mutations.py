"""Damaged files: documents with parts deleted, duplicated, exchanged or replaced, and damaged text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import yaml

JUNK: tuple[Callable[[random.Random], Any], ...] = (
    lambda draw: draw.choice([None, True, False, "", [], {}, [[]], {"": {}}]),
    lambda draw: draw.choice([0, -1, 1, 2**31, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, -(2**63), 10**30, 10**400]),
    lambda draw: draw.choice([0.0, -0.0, 0.5, 1e308, -1e308, 5e-324, float("nan"), float("inf"), -float("inf")]),
    lambda draw: draw.choice(
        ["\x1b[2J", "\x00", "\ud800", "\u202e", "é" * 50, "\n", "a\nb", "x" * 5000, "🙂", "1e5", "~"]
    ),
    lambda draw: draw.choice(
        ["cpu", "cuda", "80GiB", "1e999", "9" * 400, "1" * 30, "0x" + "f" * 99, "1P", "-5", "nan"]
    ),
    lambda draw: nested(draw.choice([3, 31, 33, 500]), draw.random() < 0.5),
    lambda draw: [draw.randint(-3, 70_000) for _ in range(draw.choice([1, 5, 2000]))],
    lambda draw: {f"k{i}": i for i in range(draw.choice([1, 5, 2000]))},
    lambda draw: draw.randint(-(2 ** draw.randint(1, 80)), 2 ** draw.randint(1, 80)),
)
TOKENS = [
    *'{}[],:"\\-+.0123456789eE \n\t#&*!|>%@`\'?', "null", "true", "NaN", "-Infinity", "1e999", "1" * 500,
    "[" * 100, "{" * 100, '{"a":' * 100, "\x00", "\x1b[2J", "\u2028", "\ufeff", "&a ", "*a", "<<: *a\n", "!!int ",
    "--- ", "...\n", "? ", "- " * 50, "1:" * 60 + "1", "\\ud800", '"\\u001b"', "%YAML 9.9\n", "a.b." * 40, "= 1\n",
    "[[a]]\n", "0x" + "f" * 500,
]  # fmt: skip


def nested(depth: int, lists: bool) -> Any:
    """Return an object or list nested to this depth."""
    made: Any = 1
    for _ in range(depth):
        made = [made] if lists else {"a": made}
    return made


def mutated(document: Any, draw: random.Random, language: str) -> bytes:
    """Return the document with up to three mutations as "json" or "yaml" text, which may be damaged too."""
    document = json.loads(json.dumps(document))
    for _ in range(draw.choice([0, 1, 1, 1, 2, 3])):
        document = _damaged(document, draw)
    text = _as_json(document, draw) if language == "json" or draw.random() < 0.2 else _as_yaml(document, draw)
    raw = text.encode("utf-8", "surrogatepass")
    for _ in range(draw.choice([0, 0, 0, 1, 1, 4])):
        raw = _torn(raw, draw)
    return raw


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key) of a document."""
    for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield node, key
        yield from _places(node[key])


def _damaged(document: Any, draw: random.Random) -> Any:
    places = list(_places(document))
    if not places or draw.random() < 0.01:
        return draw.choice(JUNK)(draw)
    holder, key = draw.choice(places)
    kind = draw.randrange(8)
    if kind == 0:
        del holder[key]
    elif kind == 1:  # duplicate
        if isinstance(holder, list):
            holder[key:key] = [holder[key]] * draw.choice([1, 1, 2, 3000])
        else:
            holder[draw.choice(["kind", "levels", "stages", "\x1b]0;x\x07", "k" * 9999, str(key) + "_"])] = holder[key]
    elif kind == 2:  # renamed or reordered
        if isinstance(holder, dict):
            holder[draw.choice([str(key).upper(), "", "__proto__", "\ud800", "version"])] = holder.pop(key)
        else:
            draw.shuffle(holder)
    elif kind == 3:  # replaced by another part
        other, there = draw.choice(places)
        if not any(other[there] is inner[k] for inner, k in _places(holder[key])) and other[there] is not holder:
            holder[key] = json.loads(json.dumps(other[there]))
    elif kind == 4 and isinstance(holder[key], int | float):
        holder[key] = holder[key] * draw.choice([-1, 0, 2, 10**6, 2**40]) + draw.choice([-1, 0, 1])
    elif kind == 5:
        holder[key] = draw.choice([[holder[key]], {"a": holder[key]}, str(holder[key])])
    else:
        holder[key] = draw.choice(JUNK)(draw)
    return document


def _as_json(document: Any, draw: random.Random) -> str:
    text = json.dumps(document, indent=draw.choice([None, 1]), ensure_ascii=draw.random() < 0.7)
    if draw.random() < 0.1 and '": ' in text:  # a duplicate key
        at = draw.choice([i for i in range(len(text)) if text.startswith('": ', i)][:200])
        start = text.rfind('"', 0, at)
        text = f'{text[:start]}{text[start:at]}": 1, {text[start:]}'
    return text


def _as_yaml(document: Any, draw: random.Random) -> str:
    try:
        return yaml.safe_dump(document, sort_keys=False, default_flow_style=draw.choice([True, False, None]))
    except (yaml.YAMLError, RecursionError):
        return json.dumps(document)


def _torn(raw: bytes, draw: random.Random) -> bytes:
    at = draw.randint(0, len(raw))
    kind = draw.randrange(5)
    if kind == 0:
        return raw[:at]
    if kind == 1 and raw:
        flipped = bytearray(raw)
        for _ in range(draw.choice([1, 3, 20])):
            flipped[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
        return bytes(flipped)
    if kind == 2:
        return raw[:at] + draw.choice(TOKENS).encode() + raw[at:]
    if kind == 3:
        return raw[:at] + raw[draw.randint(0, len(raw)) :]
    return raw[:at] + draw.randbytes(draw.choice([1, 4, 200])) + raw[at:]

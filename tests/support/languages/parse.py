"""A parser of graphs and decisions written in the language of `support.languages.text`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopart.ir.errors import GraphError, PlanError, shortened
from autopart.ir.graph import Cost, Graph, Op, Param, Size, Value, check
from autopart.ir.plan import Decision, Stage
from autopart.ir.program import BUCKET_BYTES
from autopart.ir.shares import Policy
from support.languages.text import DEFAULT_BYTES, DEFAULT_DTYPE, DEFAULT_TARGET, PARAM_SIGNS

_SIZE = re.compile(r"(\d+)(?::([^\[\]]+)\[((?:\d+\*?(?:,\d+\*?)*)?)\])?$")
_PARAM = re.compile(r"([^:=&]+)(?::([^=&]+))?(?:&(\d+))?(?:=(.+))?$")
_HEAD = re.compile(r"([^:]+?)(-?)(?::(\d+)(?:/(\d+))?)?$")
_DECISION = re.compile(
    r"schedule (\S*), micro-batches of ([\d ]*) rows(?:, slices of ([\d ]*) tokens)?, world (-?\d+)(?:, zero (\d+))?"
    r"(?:, buckets of (\d+) bytes)?$"
)
_STAGE = re.compile(r"stage on ([-\d ]*?)(?: in shares ([\d ]+?))?( in turn)?( forward only)?( whole backward)?:(.*)$")
_SEPARATOR = re.compile(r"[;\n]")
_LANGUAGE = "see support.languages.text"
_SHOWN = 200  # characters of a statement that a message quotes


@dataclass
class _Draft:
    """The graph parsed so far."""

    input_bytes: int
    rows: int = 1
    tokens: int | None = None
    inputs: dict[str, Value] = field(default_factory=dict)
    written: dict[str, Value] = field(default_factory=dict)
    params: dict[str, Param] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    updates: list[tuple[str, str]] = field(default_factory=list)
    outputs: tuple[str, ...] | None = None


def parse_graph(text: str, *, input_bytes: int = DEFAULT_BYTES) -> Graph:
    """Parse and check a graph; the inverse of `graph_text` for what the language covers (`languages.text`).

    input_bytes: size of inputs without a stated size. Raises GraphError with the statement.
    """
    draft = _Draft(input_bytes)
    for statement in _SEPARATOR.split(text):
        if statement.strip():
            try:
                _statement(draft, statement.split())
            except ValueError as error:
                raise _no_statement(statement.strip(), error) from error
    for buffer, value in draft.updates:
        if buffer not in draft.params:
            try:
                _declared(draft, f"~{buffer}")
            except ValueError as error:
                raise _no_statement(f"={buffer} {value}", error) from error
    last = draft.ops[-1].writes[:1] if draft.ops else ()
    return check(
        Graph(
            size=Size(draft.rows, draft.tokens),
            values=(*draft.inputs.values(), *draft.written.values()),
            params=tuple(draft.params.values()),
            ops=tuple(draft.ops),
            inputs=tuple(draft.inputs),
            outputs=last if draft.outputs is None else draft.outputs,
            updates=tuple(draft.updates),
        )
    )


def _no_statement(text: str, error: ValueError) -> GraphError:
    return GraphError(f"{shortened(text, _SHOWN)!r} is not a statement of a graph", why=shortened(str(error), _SHOWN))


def _statement(draft: _Draft, words: list[str]) -> None:
    first = words[0]
    if first == "rows" and len(words) == 2 and words[1].isdigit():
        draft.rows = int(words[1])
    elif first == "tokens" and len(words) == 2 and words[1].isdigit():
        draft.tokens = int(words[1])
    elif first == "<-":
        draft.inputs |= {v.name: v for v in _values(words[1:], draft.input_bytes, grad=False)}
    elif first == "->":
        draft.outputs = tuple(words[1:])
    elif first[0] in PARAM_SIGNS:
        for word in words:
            _declared(draft, word)
    elif first[0] == "=":
        buffer, value = first[1:], *words[1:]
        draft.updates.append((buffer, value))
    else:
        _op(draft, words)


def _op(draft: _Draft, words: list[str]) -> None:
    head, reads, writes = _parted(words)
    found = _HEAD.match(head[0])
    if not found:
        raise ValueError(f"{head[0]!r} is not a name with times")
    names, no_grad, forward, backward = found.groups()
    label = names.split(",")
    marks = _Marks(draft, label[0])
    for word in head[1:]:
        marks.take(word)
    size = [f"#{marks.size}"]
    values = (
        [_values([name + no_grad, *size], 0, grad=True)[0] for name in label]
        if writes is None
        else _values(writes, DEFAULT_BYTES, grad=True)
    )
    for read in reads:
        if read not in draft.written:
            draft.inputs.setdefault(read, _value(read, str(draft.input_bytes), grad=False))
    for value in values:
        if value.name in draft.written:
            raise ValueError(f"value {value.name} is written a second time")
        draft.written[value.name] = value
    draft.updates += [(buffer, values[0].name) for buffer in marks.updates]
    fwd_ns = int(forward or 0)
    numbers = marks.numbers
    draft.ops.append(
        Op(
            name=label[0],
            target=marks.target,
            reads=tuple(reads),
            writes=tuple(value.name for value in values),
            params=tuple(marks.params),
            module=marks.module,
            random=marks.random,
            parts=marks.parts,
            cost=Cost(fwd_ns, int(backward or 2 * fwd_ns), numbers["^"], numbers["$"], numbers["|"]),
        )
    )


def _parted(words: list[str]) -> tuple[list[str], list[str], list[str] | None]:
    """Return the words before the arrows, those read, and those written, or None where no output is stated."""
    writes = None
    if "->" in words:
        at = words.index("->")
        words, writes = words[:at], words[at + 1 :]
    if "<-" in words:
        at = words.index("<-")
        return words[:at], words[at + 1 :], writes
    return words, [], writes


class _Marks:
    """The marks of an op. Parameters mentioned first by a mark are declared in the draft."""

    def __init__(self, draft: _Draft, name: str) -> None:
        self._draft = draft
        self.numbers = {"^": 0, "$": 0, "|": 0}
        self.size = str(DEFAULT_BYTES)
        self.params: list[str] = []
        self.updates: list[str] = []
        self.module, self.target, self.random = "", DEFAULT_TARGET, False
        self.parts: tuple[str, ...] = (name,)

    def take(self, word: str) -> None:
        """Read one mark. Raises ValueError for an unknown one."""
        sign, rest = word[0], word[1:]
        if sign in self.numbers:
            self.numbers[sign] = int(rest)
        elif sign == "#":
            self.size = rest
        elif sign in PARAM_SIGNS:
            self.params.append(_declared(self._draft, word))
        elif sign == "=":
            self.updates.append(rest)
        elif sign == "@":
            self.module = rest
        elif sign == "(" and rest.endswith(")"):
            self.target = rest[:-1]
        elif sign == "{" and rest.endswith("}"):
            self.parts = tuple(rest[:-1].split(",")) if rest != "}" else ()
        elif word == "!":
            self.random = True
        else:
            raise ValueError(f"unknown mark {word!r}")


def _declared(draft: _Draft, word: str) -> str:
    """Return the name of a parameter, declaring it in the draft if it is new."""
    found = _PARAM.match(word[1:])
    if word[0] not in PARAM_SIGNS or not found:
        raise ValueError(f"{word!r} is not a parameter")
    name, size, copies, owner = found.groups()
    kind, trainable = PARAM_SIGNS[word[0]]
    size_bytes, dtype, shape, _ = _size(size or str(DEFAULT_BYTES), one=True)
    param = Param(name, shape, dtype, size_bytes, trainable, kind, owner, int(copies or 0))
    known = draft.params.setdefault(name, param)
    same_kind = (known.kind, known.trainable) == (kind, trainable)
    if not same_kind or (size is not None and known != param):
        raise ValueError(f"{word!r} was declared otherwise before")
    return name


def _values(words: Sequence[str], size_bytes: int, *, grad: bool) -> list[Value]:
    """Return values with the sizes that follow them, or `size_bytes`. A name ending in "-" has no gradient."""
    found: list[Value] = []
    for word in words:
        if word.startswith("#") and found:
            last = found.pop()
            found.append(_value(last.name, word[1:], grad=last.grad))
        else:
            name = word.removesuffix("-")
            if not name:
                raise ValueError(f"{word!r} is not the name of a value")
            found.append(_value(name, str(size_bytes), grad=grad and name == word))
    return found


def _value(name: str, size: str, *, grad: bool) -> Value:
    size_bytes, dtype, shape, rows_axis = _size(size)
    return Value(name, shape, dtype, size_bytes, grad, rows_axis)


def _size(text: str, *, one: bool = False) -> tuple[int, str, tuple[int, ...], int | None]:
    """Return (bytes, dtype, shape, axis of the rows). Without a dtype the shape is the bytes, or `one` number."""
    found = _SIZE.match(text)
    if not found:
        raise ValueError(f"{text!r} is not a size")
    size_bytes = int(found[1])
    if found[2] is None:
        return size_bytes, DEFAULT_DTYPE, (1,) if one else (size_bytes,), None
    axes = found[3].split(",") if found[3] else []
    rows_axis = next((axis for axis, size in enumerate(axes) if size.endswith("*")), None)
    return size_bytes, found[2], tuple(int(size.removesuffix("*")) for size in axes), rows_axis


def parse_decision(text: str) -> Decision:
    """Parse a decision without checking it; the inverse of `decision_text` where names have no blanks.

    Raises PlanError with the line.
    """
    lines = [line.strip() for line in _SEPARATOR.split(text) if line.strip()]
    head = _DECISION.match(lines[0]) if lines else None
    if head is None:
        raise PlanError(f"{shortened((lines or [''])[0], _SHOWN)!r} does not begin a decision", fix=_LANGUAGE)
    stages: list[Stage] = []
    order: list[str] = []
    for line in lines[1:]:
        found = _STAGE.match(line)
        word, *group = line.split()
        if found:
            shares = _numbers(found[2] or "", line)
            ops, ranks = tuple(found[6].split()), _numbers(found[1], line)
            how: Policy = "turn" if found[3] else "split"
            stages.append(Stage(ops, ranks, (), shares, how, bool(found[4]), bool(found[5])))
        elif word == "order":
            order.append(" ".join(group))
        elif word == "recompute" and stages:
            last = stages.pop()
            stages.append(replace(last, recompute=(*last.recompute, tuple(group))))
        else:
            raise PlanError(f"{shortened(line, _SHOWN)!r} is not a line of a decision", fix=_LANGUAGE)
    world, rows = _numbers(head[4], lines[0])[0], _numbers(head[2], lines[0])
    slices, bucket_bytes = _numbers(head[3] or "", lines[0]), int(head[6] or BUCKET_BYTES)
    return Decision(world, tuple(stages), rows, head[1], int(head[5] or 0), slices, bucket_bytes, tuple(order))


def _numbers(text: str, line: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split()))
    except ValueError as error:
        why = "ranks, rows and world are whole numbers"
        raise PlanError(f"{shortened(line, _SHOWN)!r} is not a line of a decision", why=why, fix=_LANGUAGE) from error

"""The flags of `plan` and `verify`, generated from the list of options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, get_type_hints

import typer

from autopart.cli.model_loader import BUILTIN
from autopart.ir.errors import UsageError
from autopart.options import OPTIONS, Options

ModelName = Annotated[
    str,
    typer.Argument(
        help=f"{', '.join(BUILTIN)}; module:function or file.py:function -> (model, batch); or the config.json of a "
        "transformers model, or a folder that has one"
    ),
]
Rows = Annotated[int | None, typer.Option("--rows", min=1, help="Rows of a whole batch, for a configuration file")]
Tokens = Annotated[int | None, typer.Option("--tokens", min=1, help="Tokens of a sequence, for a configuration file")]
ClusterName = Annotated[
    str, typer.Option("--cluster", help='"cpu:2", "cuda:8", "h200x8", or a .yaml, .toml or .json file')
]
Seed = Annotated[int, typer.Option(help="Seed of the weights and of dropout")]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        help="Write the simulated step here: .json for a trace viewer, .svg or .txt as a picture; - prints it",
    ),
]

_PYTHON_ONLY = ("loss_fn", "plan", "watch", "non_finite", "timeout", "transport", "backend", "weights")
"""Options that a shell cannot write, that only a training run needs, or that commands declare themselves."""


class _Flag(NamedTuple):
    """How the flag of an option differs from the option.

    metavar: what stands behind it, where it is not the words.  repeat: how it takes several values.  text: its help,
    where that of the option shows Python.
    """

    metavar: str = ""
    repeat: str = ""
    text: str = ""


_FLAGS = {
    "stages": _Flag("auto|N"),
    "micro_batches": _Flag("auto|N"),
    "replicas": _Flag(
        "auto|N|N,N,...", text="devices that run each stage on different rows: one number, or one for each stage"
    ),
    "tensor_parallel": _Flag("auto|T"),
    "schedule": _Flag("|".join((*OPTIONS["schedule"].values.choices(), "FILE.csv"))),
    "stages_per_rank": _Flag("auto|K"),
    "cuts": _Flag("MODULE", "repeat, or separate by commas"),
    "together": _Flag("MODULE+MODULE", "join the modules of a group with +; repeat"),
    "pins": _Flag("MODULE=STAGE", "repeat", "stage that runs a module"),
    "token_slices": _Flag("auto|K|LENGTHS"),
    "recompute": _Flag("auto|off|all|PATTERN", "repeat"),
    "zero": _Flag("auto|0|1"),
    "bucket_bytes": _Flag("BYTES"),
    "cache": _Flag(text="search again instead of reusing the plan of an earlier, identical question"),
    "prove": _Flag("SECONDS"),
    "rows_axis": _Flag("INPUT=AXIS|none", "repeat", "axis on which an input has rows, or none"),
    "seed": _Flag(text="seed of the weights and of dropout"),
}


def flag_of(name: str) -> str:
    """Return the flag of an option, "" if it has none."""
    if name in _PYTHON_ONLY:
        return ""
    return {"pins": "--pin", "cache": "--no-cache"}.get(name, "--" + name.replace("_", "-"))


def _parameters() -> Iterator[inspect.Parameter]:
    """Yield the parameters from which typer makes the flags of the options."""
    kinds, group = get_type_hints(Options), ""
    for name, row in OPTIONS.items():
        group = row.group or group
        if not flag_of(name):
            continue
        kind, flag = kinds[name], _FLAGS.get(name, _Flag())
        text = flag.text or row.text
        if flag.repeat:
            kind, text = list[str] | None, f"{text} ({flag.repeat})"
        elif kind is not bool:
            whole = kind in (int, int | None) and name != "bucket_bytes" and not row.values.auto
            kind = (int if whole else float if kind is float else str) | None
        metavar = flag.metavar or "|".join(row.values.choices()) or None
        made = typer.Option(flag_of(name), metavar=metavar, help=text[:1].upper() + text[1:], rich_help_panel=group)
        default = False if kind is bool else None
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, made])


Result = TypeVar("Result")


def takes_option_flags(command: Callable[..., Result]) -> Callable[..., Result]:
    """Give a command the flags of all options; those that are used are passed to it in `flags`, by option.

    Raises UsageError for a text that is not a value of its option.
    """
    flags = list(_parameters())
    own = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def with_flags(**given: Any) -> Result:
        used = {flag.name: given.pop(flag.name) for flag in flags}
        used = {name: _value(name, given) for name, given in used.items() if given is not None and given is not False}
        if "cache" in used:
            used["cache"] = False
        return command(flags=used, **given)

    parameters = [p for p in own.parameters.values() if p.name != "flags"] + flags
    with_flags.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_flags.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_flags


def _value(name: str, given: Any) -> Any:
    """Return the value of an option from the texts of its flag."""
    if name in ("cuts", "recompute"):
        return [word.strip() for text in given for word in text.split(",")]
    if name == "together":
        return [tuple(text.split("+")) for text in given]
    if name == "pins":
        return _pairs(given, "--pin", "lm_head=3")
    if name == "rows_axis":
        return _pairs(given, "--rows-axis", "positions=1", none="none")
    if name in ("stages", "micro_batches", "stages_per_rank", "replicas", "tensor_parallel", "token_slices", "zero"):
        words = given.split(",")
        if all(word.strip().isdecimal() for word in words):
            return int(given) if len(words) == 1 else tuple(map(int, words))
    return given


def _pairs(texts: list[str], flag: str, example: str, none: str = "") -> dict[str, int | None]:
    """Return what texts such as "lm_head=3" map to what.  Raises UsageError for a name that is given twice."""
    found: dict[str, int | None] = {}
    for text in texts:
        name, number = _pair(text, flag, example, none)
        if name in found:
            raise UsageError(f"{flag} {name}= is given twice", fix=f"write {flag} once for each name")
        found[name] = number
    return found


def _pair(text: str, flag: str, example: str, none: str = "") -> tuple[str, int | None]:
    """Return what a text such as "lm_head=3" maps to what.  none: the word for None, "" where that is not possible."""
    key, _, number = text.rpartition("=")
    if key and number.isdecimal():
        return key, int(number)
    if key and number and number == none:
        return key, None
    raise UsageError(f"{flag} {text!r} is not understood", fix=f"write {flag} {example}")


def wished(words: list[str]) -> dict[str, Any]:
    """Return options from words such as "stages=4" and "replicas=2,2"; their values may still be impossible.

    Raises UsageError for a word without a value, an option that has no flag, and one of one value that is given twice.
    """
    kinds, found = get_type_hints(Options), dict[str, list[str]]()
    for word in words:
        name, sign, text = word.partition("=")
        name = {"pin": "pins"}.get(name.lstrip("-"), name.lstrip("-").replace("-", "_"))
        if not sign or not text:
            raise UsageError(f"{word!r} is not an option with a value", fix="write --what-if stages=4 replicas=2")
        if name in OPTIONS and not flag_of(name):
            raise UsageError(f"{name}= cannot be asked on a command line", fix="use autopart.plan in Python")
        if name in found and not _FLAGS.get(name, _Flag()).repeat:
            raise UsageError(f"{name}= is given twice", fix="write --what-if once for each plan")
        found.setdefault(name, []).append(text)
    return {name: _wish(name, texts, kinds.get(name)) for name, texts in found.items()}


def _wish(name: str, texts: list[str], kind: object) -> Any:
    """Return the value that texts mean for an option of this type, several for one that may be repeated."""
    if name in _FLAGS and _FLAGS[name].repeat:
        return _value(name, texts)
    (text,) = texts
    if kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.isdecimal():
        return int(text)
    if kind is float:
        with suppress(ValueError):
            return float(text)
    return _value(name, text)

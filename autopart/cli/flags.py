"""The flags of `plan` and `verify`, generated from the list of options."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from autopart.cli.models import BUILTIN
from autopart.ir.errors import UsageError
from autopart.options import Options, choices

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

_TRAINING = ("non_finite", "timeout", "transport", "backend", "weights")
_PYTHON_ONLY = ("loss_fn", "plan", "watch", *_TRAINING)
"""Options that a shell cannot write, that only a training run needs, or that commands declare themselves."""
_METAVARS = {
    "replicas": "N|N,N,...",
    "cuts": "MODULE",
    "together": "MODULE+MODULE",
    "pins": "MODULE=STAGE",
    "rows_axis": "INPUT=AXIS|none",
    "token_slices": "auto|K|LENGTHS",
    "recompute": "auto|off|all|PATTERN",
    "schedule": "|".join((*choices("schedule"), "FILE.csv")),
    "bucket_bytes": "BYTES",
    "prove": "SECONDS",
}
_REPEATED = {
    "cuts": "repeat, or separate by commas",
    "together": "join the modules of a group with +; repeat",
    "pins": "repeat",
    "rows_axis": "repeat",
    "recompute": "repeat",
}
_TEXTS = {
    "replicas": "devices that run each stage on different rows: one number, or one for each stage",
    "pins": "stage that runs a module",
    "rows_axis": "axis on which an input has rows, or none",
    "cache": "search again instead of reusing the plan of an earlier, identical question",
    "seed": "seed of the weights and of dropout",
}
"""Help texts of flags for which the docstring of the option shows Python."""


def documented() -> dict[str, tuple[str, str]]:
    """Return the group and the meaning of each option from the docstring of `Options`."""
    found: dict[str, tuple[str, str]] = {}
    group = ""
    page = inspect.cleandoc(str(Options.__doc__))
    for heading, name, text in re.findall(r"^(\w.*):$|^ {4}(\w+) +(.*(?:\n {20,}.*)*)", page, re.MULTILINE):
        group = heading or group
        if name:
            found[name] = (group, " ".join(text.split()))
    return found


def flag_of(name: str) -> str:
    """Return the flag of an option, "" if it has none."""
    if name in _PYTHON_ONLY:
        return ""
    return {"pins": "--pin", "cache": "--no-cache"}.get(name, "--" + name.replace("_", "-"))


def _parameter(name: str, group: str, text: str) -> inspect.Parameter:
    """Return the parameter from which typer makes the flag of an option."""
    kind, text = get_type_hints(Options)[name], _TEXTS.get(name, text)
    if name in _REPEATED:
        kind, text = list[str] | None, f"{text} ({_REPEATED[name]})"
    elif kind is not bool:
        kind = (int if kind in (int, int | None) and name != "bucket_bytes" else float if kind is float else str) | None
    metavar = _METAVARS.get(name) or "|".join(choices(name)) or None
    option = typer.Option(flag_of(name), metavar=metavar, help=text[:1].upper() + text[1:], rich_help_panel=group)
    default = False if kind is bool else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


Result = TypeVar("Result")


def takes_option_flags(command: Callable[..., Result]) -> Callable[..., Result]:
    """Give a command the flags of all options; those that are used are passed to it in `flags`, by option.

    Raises UsageError for a text that is not a value of its option.
    """
    flags = [_parameter(name, *text) for name, text in documented().items() if flag_of(name)]
    own = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def with_flags(**given: Any) -> Result:
        used = {flag.name: given.pop(flag.name) for flag in flags}
        used = {name: _value(name, given) for name, given in used.items() if given is not None and given is not False}
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
        pairs = [text.rpartition("=") for text in given]
        for path, sign, stage in pairs:
            if not path or not stage.isdecimal():
                raise UsageError(f"--pin {path + sign + stage!r} is not understood", fix="write --pin lm_head=3")
        return {path: int(stage) for path, _, stage in pairs}
    if name == "rows_axis":
        pairs = [text.rpartition("=") for text in given]
        for path, sign, axis in pairs:
            if not path or not (axis == "none" or axis.isdecimal()):
                raise UsageError(
                    f"--rows-axis {path + sign + axis!r} is not understood", fix="write --rows-axis positions=1"
                )
        return {path: None if axis == "none" else int(axis) for path, _, axis in pairs}
    if name in ("replicas", "token_slices", "zero"):
        words = given.split(",")
        if all(word.strip().isdecimal() for word in words):
            return int(given) if len(words) == 1 else tuple(map(int, words))
    return given if name != "cache" else False


def wished(words: list[str]) -> dict[str, Any]:
    """Return options from words such as "stages=4" and "replicas=2,2"; their values may still be impossible.

    Raises UsageError for an unknown option.
    """
    hints, found = get_type_hints(Options), {}
    for word in words:
        name, sign, text = word.partition("=")
        name = {"pin": "pins"}.get(name.lstrip("-"), name.lstrip("-").replace("-", "_"))
        if not sign or not text:
            raise UsageError(f"{word!r} is not an option with a value", fix="write --what-if stages=4 replicas=2")
        if name in hints and not flag_of(name):
            raise UsageError(f"{name}= cannot be asked on a command line", fix="use autopart.plan in Python")
        found[name] = _wish(name, text, hints.get(name))
    return found


def _wish(name: str, text: str, kind: object) -> Any:
    """Return the value that a text means for an option of this type."""
    if name in _REPEATED:
        return _value(name, [text])
    if kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.isdecimal():
        return int(text)
    if kind is float:
        try:
            return float(text)
        except ValueError:
            return text
    return _value(name, text) if name != "cache" else text

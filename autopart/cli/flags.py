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
    str, typer.Argument(help=f"{', '.join(BUILTIN)}, or module:function or file.py:function -> (model, batch)")
]
ClusterName = Annotated[
    str, typer.Option("--cluster", help='"cpu:2", "cuda:8", "h200x8", or a .yaml, .toml or .json file')
]
Seed = Annotated[int, typer.Option(help="Seed of the weights and of dropout")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")]
TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", help="Write the simulated step here: .json for a trace viewer, .txt as a picture in text"),
]

_PYTHON_ONLY = ("loss_fn", "plan", "watch", "non_finite", "timeout", "transport")
"""Options that a shell cannot write, that only a training run needs, or that commands declare themselves."""
_METAVARS = {
    "replicas": "N|N,N,...",
    "cuts": "MODULE",
    "together": "MODULE+MODULE",
    "pins": "MODULE=STAGE",
    "token_slices": "auto|K|LENGTHS",
    "bucket_bytes": "BYTES",
    "prove": "SECONDS",
}
_NAMES = {"pins": "--pin"}
_REPEATED = {
    "cuts": "repeat, or separate by commas",
    "together": "join the modules of a group with +; repeat",
    "pins": "repeat",
    "recompute": "repeat",
}
_TEXTS = {
    "replicas": "devices that run each stage on different rows: one number, or one for each stage",
    "pins": "stage that runs a module",
    "cache": "search again instead of reusing the plan of an earlier, identical question",
    "seed": "seed of the weights and of dropout",
}
"""What a flag says where the docstring speaks Python."""


def documented() -> dict[str, tuple[str, str]]:
    """The group and the meaning of each option, as the docstring of `Options` says."""
    found: dict[str, tuple[str, str]] = {}
    group = ""
    page = inspect.cleandoc(str(Options.__doc__))
    for heading, name, text in re.findall(r"^(\w.*):$|^ {4}(\w+) +(.*(?:\n {20,}.*)*)", page, re.MULTILINE):
        group = heading or group
        if name:
            found[name] = (group, " ".join(text.split()))
    return found


def flag_of(name: str) -> str:
    """The flag of an option: `--no-cache` for one that is on by default; "" for one without a flag."""
    if name in _PYTHON_ONLY:
        return ""
    return _NAMES.get(name) or ("--no-" if name == "cache" else "--") + name.replace("_", "-")


def _parameter(name: str, group: str, text: str) -> inspect.Parameter:
    """The parameter from which typer makes the flag of an option."""
    kind = get_type_hints(Options)[name]
    words, text = "|".join(choices(name)), _TEXTS.get(name, text)
    if name in _REPEATED:
        kind, text = list[str] | None, f"{text} ({_REPEATED[name]})"
    elif kind is not bool:
        kind = (int if kind in (int, int | None) and name != "bucket_bytes" else float if kind is float else str) | None
    metavar = _METAVARS.get(name, f"{words}|PATTERN" if name == "recompute" else words) or None
    option = typer.Option(flag_of(name), metavar=metavar, help=text[:1].upper() + text[1:], rich_help_panel=group)
    default = False if kind is bool else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


Result = TypeVar("Result")


def takes_option_flags(command: Callable[..., Result]) -> Callable[..., Result]:
    """Give a command the flag of every option; it gets those that were used as keywords in `flags`.

    Raises UsageError for a text that is not a value of its option.
    """
    flags = [_parameter(name, *text) for name, text in documented().items() if flag_of(name)]
    own = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def with_flags(**given: Any) -> Result:
        texts = {flag.name: given.pop(flag.name) for flag in flags}
        used = {name: text for name, text in texts.items() if text is not None and text is not False}
        used = {name: _READERS[name](text) if name in _READERS else text for name, text in used.items()}
        return command(flags=used, **given)

    parameters = [p for p in own.parameters.values() if p.name != "flags"] + flags
    with_flags.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_flags.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_flags


# ---- from the text of a flag to the value of the option ------------------------------------------------------------


def _numbers(text: str) -> str | int | tuple[int, ...]:
    """ "8" or "8,8,4" as numbers; another text as it is."""
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        return text
    return int(text) if len(words) == 1 else tuple(int(word) for word in words)


def _list(texts: list[str]) -> list[str]:
    return [word.strip() for text in texts for word in text.split(",")]


def _pins(texts: list[str]) -> dict[str, int]:
    pins = {}
    for text in texts:
        path, _, stage = text.rpartition("=")
        if not path or not stage.isdecimal():
            raise UsageError(f"--pin {text!r} is not understood", fix="write --pin lm_head=3")
        pins[path] = int(stage)
    return pins


_READERS: dict[str, Callable[[Any], Any]] = {
    "cuts": _list,
    "recompute": _list,
    "together": lambda texts: [tuple(text.split("+")) for text in texts],
    "pins": _pins,
    "replicas": _numbers,
    "token_slices": _numbers,
    "zero": _numbers,
    "cache": lambda off: not off,
}

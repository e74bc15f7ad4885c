"""Load a model by its name on a command line.

    "gpt2-tiny"              built in, see models.py
    "package.module:make"    a function of an importable module; the current folder is importable
    "folder/train.py:make"   a function of a file
    "folder/config.json"     a configuration file of transformers, or a folder that has one: see shelf/

The function has no arguments and returns (model, batch) or (model, batch, loss_fn).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autopart.cli.models import BUILTIN
from autopart.extras.shelf.build import from_shelf
from autopart.extras.shelf.config_file import config_path, read_config
from autopart.ir.errors import UsageError

FORMS = (
    f'name a built-in model ({", ".join(BUILTIN)}), "package.module:function", "file.py:function", or the config.json '
    "of a transformers model"
)


@dataclass(frozen=True)
class Subject:
    """A model with its batch, and maybe a loss function.  notes: for the user."""

    model: nn.Module
    batch: Any
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None
    notes: tuple[str, ...] = ()


def load_model(name: str, seed: int = 0, rows: int | None = None, tokens: int | None = None) -> Subject:
    """Build the named model after seeding torch, so that every process gets the same weights.

    rows, tokens: of the batch for a configuration file, whose model is on the meta device.  Raises UsageError for an
    unknown name, a configuration file that describes no model, and a function that returns something else, and the
    function's own errors.
    """
    path = config_path(name) if name not in BUILTIN else None
    if path is not None:
        model, batch, notes = from_shelf(read_config(path), rows, tokens)
        return Subject(model, batch, notes=notes)
    if rows is not None or tokens is not None:
        given = "--rows" if rows is not None else "--tokens"
        raise UsageError(f"{given} is given, and {name} makes its own batch", fix=f"drop {given}")
    make = _function(name)
    torch.manual_seed(seed)
    made = make()
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise UsageError(
            f"{name} returned {_described(made)}",
            fix="return (model, batch) or (model, batch, loss_fn)",
        )
    return Subject(*made)


def _described(made: object) -> str:
    if isinstance(made, tuple):
        return "(" + ", ".join(type(part).__name__ for part in made) + ")"
    return f"a {type(made).__name__}"


def _function(name: str) -> Callable[[], Any]:
    if name in BUILTIN:
        return BUILTIN[name]
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise UsageError(f"model {name!r} is not known", fix=FORMS)
    module = _from_file(Path(place)) if place.endswith(".py") else _from_import(place)
    found = getattr(module, attribute, None)
    if not callable(found):
        raise UsageError(f"{place} has no function {attribute!r}", fix=FORMS)
    make: Callable[[], Any] = found
    return make


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"there is no file {str(path)!r}", fix=FORMS)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    _importable(path.resolve().parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _from_import(place: str) -> ModuleType:
    _importable(Path.cwd())
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise
        raise UsageError(f"there is no module {place!r}", why=str(error), fix=FORMS) from error


def _importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

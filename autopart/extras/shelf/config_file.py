"""Read a transformers configuration file, which anyone may have written.

Only the JSON file is read.  Keys that name code or a kernel are left out, at any depth, as are those that say how
weights are stored; sizes are limited, so that a small file cannot ask for a model that takes hours to build.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from autopart.files.documents import parse_json
from autopart.files.reading import malformed, named, path_of, read_text, unreadable, validated
from autopart.ir.decision import Problem
from autopart.ir.errors import UsageError

CONFIG = "config.json"
MOST_BYTES = 4 * 2**20
"""Size of a file; the names of 21,843 classes take 2 MiB."""
MOST_OF = {"layer": 4096, "depth": 4096, "block": 4096, "expert": 4096, "label": 2**20, "position": 2**26}
"""Largest whole number under a key that has this word."""
MOST = 2**40
"""Largest whole number under any other key."""
_CODE = ("auto_map", "custom_pipelines", "trust_remote_code", "attn_implementation", "experts_implementation")
_STORED = ("quantization_config", "compression_config")
_OTHER = ("use_cache", "return_dict", "use_return_dict", "transformers_version", "torchscript")
_DTYPES = Literal["float64", "float32", "bfloat16", "float16", "auto"]
_SCHEMA = "pass the config.json of a transformers model: it has model_type, architectures and the sizes of the model"


@dataclass(frozen=True)
class ConfigFile:
    """A configuration as it was read.

    path: of the file.  architectures: names of model classes, the first one counts.  model_type: name of the family, ""
    if the file has none.  content: what the configuration is made from.  notes: what was left out.
    """

    path: Path
    architectures: tuple[str, ...]
    model_type: str
    content: dict[str, Any]
    notes: tuple[str, ...] = ()


class _Config(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    architectures: Annotated[
        list[Annotated[str, Field(pattern=r"^[A-Za-z]\w{0,99}$")]] | None, Field(max_length=16)
    ] = None
    model_type: Annotated[str, Field(pattern=r"^[\w.-]{0,99}$")] = ""
    dtype: _DTYPES | None = None
    torch_dtype: _DTYPES | None = None
    backbone: None = None


def config_path(name: str) -> Path | None:
    """Return the configuration file that a name on a command line means: a .json file, or a folder that has one."""
    path = Path(name)
    if path.suffix == ".json":
        return path
    return path / CONFIG if path.is_dir() else None


def read_config(path: Path) -> ConfigFile:
    """Read and check a configuration file.  Raises UsageError with everything that is wrong, each with its path."""
    with named(path, UsageError, _SCHEMA):
        content = parse_json(read_text(path, most_bytes=MOST_BYTES))
        known = validated("describes no model", _Config.model_validate, content)
        if not known.model_type and not known.architectures:
            raise unreadable("describes no model", why="it has neither model_type nor architectures")
        if wrong := list(_too_large(content, ())):
            raise malformed("describes a model that is too large to build", wrong)
    notes: list[str] = []
    kept = _without(content, notes)
    return ConfigFile(path, tuple(known.architectures or ()), known.model_type, kept, tuple(dict.fromkeys(notes)))


def _too_large(node: object, place: tuple[str | int, ...]) -> Iterator[Problem]:
    """Yield the whole numbers that are too large for their key, as (path, message)."""
    entries: Any = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in entries:
        yield from _too_large(value, (*place, key))
    if type(node) is int:
        key = next((part for part in reversed(place) if isinstance(part, str)), "")
        most = min((most for word, most in MOST_OF.items() if word in key), default=MOST)
        if not -most <= node <= most:
            yield path_of(place), f"at most {most} is read, not {node}"


def _without(node: Any, notes: list[str]) -> Any:
    """Return a copy without the keys that name code or storage; note those that change what is planned."""
    if isinstance(node, list):
        return [_without(item, notes) for item in node]
    if not isinstance(node, dict):
        return node
    if "auto_map" in node:
        notes.append("auto_map names code of a repository, which is not read: the class of transformers is planned")
    notes += [f"{key} is left aside: the model is planned without it" for key in _STORED if key in node]
    skipped = (*_CODE, *_STORED, *_OTHER)
    return {key: _without(item, notes) for key, item in node.items() if key not in skipped and not key.startswith("_")}

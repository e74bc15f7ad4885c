"""Python values as JSON and back, to the bit: numbers, texts, lists, tuples, mappings, counters, 0-dim tensors.

What JSON cannot hold is written as an object with one key that begins with "$".
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from autopart.ir.errors import CheckpointError


def encoded(value: Any, name: str, tensors: dict[str, torch.Tensor] | None = None) -> Any:
    """Return a value as JSON can hold it.  name: of the value, for errors.  tensors: gets the larger ones in the value,
    under keys of their own.  Raises CheckpointError for a value that is not made of None, bool, int (63 bits), float,
    str, list, tuple, dict, Counter, 0-dim tensors, and, with `tensors`, other dense tensors."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int) and type(value) is int and abs(value) < 2**63:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return {"$tensor": [str(value.dtype).removeprefix("torch."), encoded(value.item(), name)]}
    if tensors is not None and isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta:
        tensors[key := f"{name}:{len(tensors)}"] = value.detach()
        return {"$stored": key}
    if type(value) is list:
        return [encoded(each, f"{name}[{place}]", tensors) for place, each in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [encoded(each, f"{name}[{place}]", tensors) for place, each in enumerate(value)]}
    if isinstance(value, Mapping) and type(value) in (dict, Counter):
        texts = type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value)
        if texts:
            return {key: encoded(each, f"{name}.{key}", tensors) for key, each in value.items()}
        pairs = [
            [encoded(key, f"a key of {name}"), encoded(each, f"{name}[{key!r}]", tensors)]
            for key, each in value.items()
        ]
        return {"$counter" if type(value) is Counter else "$items": pairs}
    raise CheckpointError(
        f"{name} cannot be saved: it is a {type(value).__module__}.{type(value).__qualname__}",
        why="checkpoints hold JSON and tensors, never pickled objects",
        fix="keep it as numbers, texts, dicts and lists (tensor.tolist()), and make the object from them later",
    )


def decoded(value: Any, name: str = "the value", tensors: Mapping[str, torch.Tensor] = MappingProxyType({})) -> Any:
    """Return the Python value that `encoded` wrote.  Raises CheckpointError for a form that it never writes."""
    try:
        return _decoded(value, tensors)
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{name} cannot be read", why=f"{error}", fix="use another checkpoint") from error


def _decoded(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decoded(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    mark = next((key for key in value if key.startswith("$")), None)
    if mark is None:
        return {key: _decoded(each, tensors) for key, each in value.items()}
    (inner,) = value.values()
    if mark == "$float" and inner in ("inf", "-inf", "nan"):
        return float(inner)
    if mark == "$tuple":
        return tuple(_decoded(_list(inner), tensors))
    if mark in ("$items", "$counter"):
        pairs = {_decoded(k, tensors): _decoded(each, tensors) for k, each in map(_list, _list(inner))}
        return Counter(pairs) if mark == "$counter" else pairs
    if mark == "$tensor":
        dtype, number = _list(inner)
        found = getattr(torch, dtype)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"{dtype} is not a type of tensors")
        made = torch.tensor(_decoded(number, tensors), dtype=found)
        if made.dim():
            raise ValueError("it holds several numbers")
        return made
    if mark == "$stored":
        return tensors[inner]
    raise ValueError(f"{mark} is unknown")


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("a list is missing")
    return value

"""Folders of `torch.distributed.checkpoint`, read without running what may be in them.

Their file `.metadata` is a pickle, which torch reads with `pickle.load`.  Here nothing comes of it but records, tuples,
numbers, texts and dtypes: every name that it asks for is one of `_RECORDS` or refused, and a record is a class of ours,
made for this file, not the one of torch.  Tensors and objects are read with torch's own restricted reader
(`torch.load(weights_only=True)`).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autopart.files.checkpoints.document import AGAIN, plain_name, unreadable_file
from autopart.files.checkpoints.storage import is_file, storage_of
from autopart.ir.errors import CheckpointError

METADATA = ".metadata"
_MOST_BYTES = 1 << 30
"""Of `.metadata` that are read; a checkpoint of 100,000 tensors on 1,000 ranks has less."""
_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "WindowsPath", "PurePosixPath", "Path"),
    "pathlib._local": ("PosixPath", "WindowsPath", "PurePosixPath", "Path"),
}  # fmt: skip


class _Record:
    """What a name of the pickle stands for: its arguments and its state."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Restricted(pickle.Unpickler):
    """Makes records, tuples and dtypes, and nothing else that a name could stand for."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch":
            found = getattr(torch, name, None)
            if name == "Size" or isinstance(found, torch.dtype):
                return tuple if name == "Size" else found
        if name not in _RECORDS.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no such file needs")
        return type(name, (_Record,), {})  # a new one each time: a pickle can set attributes of what it is given


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, or an object: where it begins and how large it is, and its bytes in a file."""

    begin: tuple[int, ...]
    shape: tuple[int, ...]
    file: Path
    offset: int
    length: int

    def load(self) -> Any:
        """Return what is there.  Raises CheckpointError."""
        try:
            with storage_of(self.file).open(self.file) as file:
                file.seek(self.offset)
                return torch.load(io.BytesIO(file.read(self.length)), map_location="cpu", weights_only=True)
        except OSError as error:
            raise unreadable_file(self.file, error) from error
        except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError) as error:
            why = str(error).strip().partition("\n")[0][:300]
            raise CheckpointError(
                f"{self.file.name} cannot be read", where=str(self.file), why=why, fix=AGAIN
            ) from error


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A tensor in boxes, which fill it once."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    def read(self) -> torch.Tensor:
        """Return the whole tensor; needs memory for it and one box.  Raises CheckpointError."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        for chunk in self.chunks:
            part = chunk.load()
            if not isinstance(part, torch.Tensor) or part.dtype != self.dtype or tuple(part.shape) != chunk.shape:
                raise CheckpointError(f"{self.name} is not what .metadata says", where=str(chunk.file), fix=AGAIN)
            target = whole
            for axis, (begin, size) in enumerate(zip(chunk.begin, chunk.shape, strict=True)):
                target = target.narrow(axis, begin, size)
            target.copy_(part)
        return whole


@dataclass(frozen=True, slots=True)
class DcpFolder:
    """What a folder holds, by the path of each value in the state that was saved.  Only `.metadata` is read."""

    tensors: dict[tuple[str | int, ...], ShardedTensor]
    objects: dict[tuple[str | int, ...], Chunk]


def is_dcp(folder: Path) -> bool:
    """Return whether a folder is one of `torch.distributed.checkpoint`."""
    return is_file(folder / METADATA)


def open_dcp(folder: Path) -> DcpFolder:
    """Read what a folder holds.  Raises CheckpointError for what torch would not have written."""
    path = folder / METADATA
    try:
        with storage_of(path).open(path) as file:
            raw = file.read(_MOST_BYTES + 1)
        if len(raw) > _MOST_BYTES:
            raise ValueError(f"it is larger than {_MOST_BYTES >> 20} MiB")
        return _folder(folder, _Restricted(io.BytesIO(raw)).load())
    except OSError as error:
        raise unreadable_file(path, error) from error
    except Exception as error:  # a pickle can fail in any way
        why = f"{type(error).__name__}: {error}"[:300]
        raise CheckpointError(
            f"{METADATA} is not one of torch.distributed.checkpoint", where=str(path), why=why, fix=AGAIN
        ) from error


def _folder(folder: Path, found: Any) -> DcpFolder:
    state = _state(found, "Metadata")
    paths = state["planner_data"] or {}
    stored = {}
    for index, info in state["storage_data"].items():
        key, place = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
        if place.get("transform_descriptors"):
            raise ValueError(f"{key['fqn']} is compressed or encrypted by an extension")
        stored[key["fqn"], key.get("offset")] = place
    made = DcpFolder({}, {})
    for name, entry in state["state_dict_metadata"].items():
        path = tuple(paths.get(name, (name,)))
        if type(entry).__name__ == "BytesStorageMetadata":
            made.objects[path] = _chunk(folder, (), (), stored[name, None])
            continue
        about = _state(entry, "TensorStorageMetadata")
        chunks = [_state(each, "ChunkStorageMetadata") for each in about["chunks"]]
        boxes = [_chunk(folder, each["offsets"], each["sizes"], stored[name, each["offsets"]]) for each in chunks]
        shape, dtype = _sizes(about["size"]), about["properties"].state[0]
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} has no dtype")
        _require_filled(name, shape, boxes)
        made.tensors[path] = ShardedTensor(name, shape, dtype, tuple(boxes))
    return made


def _state(record: Any, kind: str) -> dict[str, Any]:
    if not isinstance(record, _Record) or type(record).__name__ != kind:
        raise ValueError(f"a {kind} is missing")
    return dict(getattr(record, "state", {}))


def _sizes(given: Any) -> tuple[int, ...]:
    if not isinstance(given, tuple) or not all(type(each) is int and each >= 0 for each in given):
        raise ValueError(f"{given!r:.80} is no shape")
    return given


def _chunk(folder: Path, begin: Any, shape: Any, place: dict[str, Any]) -> Chunk:
    name = place["relative_path"]
    if not isinstance(name, str) or not plain_name(name):
        raise ValueError(f"{name!r:.80} is not the name of a file in the folder")
    offset, length = _sizes((place["offset"], place["length"]))
    return Chunk(_sizes(begin), _sizes(shape), folder / name, offset, length)


def _require_filled(name: str, shape: tuple[int, ...], boxes: Sequence[Chunk]) -> None:
    """Raise ValueError unless the boxes fill a tensor, each place once."""
    whole, filled = torch.Size(shape).numel(), 0
    for box in boxes:
        if len(box.shape) != len(shape) or any(
            begin + size > most for begin, size, most in zip(box.begin, box.shape, shape, strict=True)
        ):
            raise ValueError(f"a part of {name} lies outside of it")
        filled += torch.Size(box.shape).numel()
    if filled != whole or next(_overlaps(boxes), None):
        raise ValueError(f"the parts of {name} do not fill it")


def _overlaps(boxes: Sequence[Chunk]) -> Iterator[tuple[Chunk, Chunk]]:
    """Yield pairs of boxes that share a place.  O(boxes²) for boxes with the same begin along the first axis, as DCP
    writes them; sorted by it, so that a shard along one axis costs O(boxes)."""
    ordered = sorted((box for box in boxes if all(box.shape)), key=lambda box: box.begin)
    for number, first in enumerate(ordered):
        for second in ordered[number + 1 :]:
            if first.begin and second.begin[0] >= first.begin[0] + first.shape[0]:
                break
            if all(
                a < b + m and b < a + n
                for a, n, b, m in zip(first.begin, first.shape, second.begin, second.shape, strict=True)
            ):
                yield first, second

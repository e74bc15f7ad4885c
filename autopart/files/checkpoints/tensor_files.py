"""Files of tensors by name, in the safetensors format: written while they are hashed, read one tensor at a time.

A folder may hold several, with the index that Hugging Face's loaders read.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from autopart.files.checkpoints.hashes import AGAIN, Written, plain_name
from autopart.files.json_text import parse_json
from autopart.files.reading import named, read_text, unreadable
from autopart.ir.errors import CheckpointError

INDEX = "model.safetensors.index.json"
"""The file that says in which file of a folder each tensor is, as Hugging Face's loaders read it."""


_PIECE = 8 << 20
"""Bytes that are written and hashed at a time."""
_AHEAD = 4
"""Pieces by which the writing may be ahead of the hashing; copies of tensors on other devices live until then."""


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> Written:
    """Write a new file of tensors and wait until it is on the disk; returns its size and hash.

    A tensor that is contiguous in host memory is not copied, and the file is not read again: another thread hashes the
    bytes while they are written.  Tensors may share memory; each is written by itself, the largest dtypes first, so
    that all are aligned.  Raises OSError, and CheckpointError for a dtype that the format lacks.
    """
    ordered = sorted(tensors.items(), key=lambda each: (-each[1].element_size(), each[0]))
    digest, size = hashlib.sha256(), 0
    pieces: queue.Queue[memoryview | None] = queue.Queue(_AHEAD)

    def hash_pieces() -> None:
        for piece in iter(pieces.get, None):
            digest.update(piece)

    # A thread, and not a pool: pools start nothing once the script has ended, and a save may go on then.
    hasher = threading.Thread(target=hash_pieces, name="autopart-hasher")
    hasher.start()
    try:
        with open(path, "wb") as file:
            for piece in itertools.chain([memoryview(_header(ordered))], *(_bytes_of(tensor) for _, tensor in ordered)):
                pieces.put(piece)
                file.write(piece)
                size += len(piece)
            file.flush()
            os.fsync(file.fileno())
    finally:
        pieces.put(None)
        hasher.join()
    return Written(size, digest.hexdigest())


def _header(ordered: Sequence[tuple[str, torch.Tensor]]) -> bytes:
    """Return the head of a file with these tensors: its length, and JSON padded to a multiple of 8 bytes."""
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        if tensor.dtype not in _NAMES:
            raise CheckpointError(f"{name} cannot be saved", why=f"safetensors files hold no {tensor.dtype}")
        begin, end = end, end + tensor.numel() * tensor.element_size()
        head[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in pieces, without a copy if it is contiguous in host memory."""
    own = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if own.numel():
        whole = memoryview(own.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        for first in range(0, len(whole), _PIECE):
            yield whole[first : first + _PIECE]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file.  dtype: as torch has it."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


class TensorFiles:
    """Tensors by name in one or several safetensors files; nothing but their headers is read before `read`."""

    def __init__(self, files: Iterable[Path], index: Mapping[str, str] | None = None) -> None:
        """files: of the tensors.  index: the name of the file of each tensor, if the files must hold exactly these.

        Raises CheckpointError for a file that is missing, truncated or not in this format, a name in two files, and an
        index that says something else."""
        self.by_name: dict[str, StoredTensor] = {}
        for path in files:
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    if name in self.by_name:
                        raise CheckpointError(
                            f"tensor {name} is in two files", where=f"{self.by_name[name].file} and {path}", fix=AGAIN
                        )
                    part = file.get_slice(name)
                    dtype = _DTYPES.get(part.get_dtype())
                    if dtype is None:
                        raise CheckpointError(f"tensor {name} is of type {part.get_dtype()}", where=str(path))
                    self.by_name[name] = StoredTensor(path, tuple(part.get_shape()), dtype)
        for name, file_name in (index or {}).items():
            found = self.by_name.get(name)
            if found is None or found.file.name != file_name:
                raise CheckpointError(f"tensor {name} is missing", where=file_name, why="the index names it", fix=AGAIN)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor, in host memory of its own.  Raises CheckpointError."""
        stored = self.by_name.get(name)
        if stored is None:
            raise CheckpointError(f"tensor {name} is missing", fix=AGAIN)
        with _opened(stored.file) as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    def read_all(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors by name, each file opened once.  Raises CheckpointError."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            if name not in self.by_name:
                raise CheckpointError(f"tensor {name} is missing", fix=AGAIN)
            by_file.setdefault(self.by_name[name].file, []).append(name)
        for path, wanted in by_file.items():
            with _opened(path) as file:
                for name in wanted:
                    yield name, file.get_tensor(name)


def open_tensors(path: str | os.PathLike[str]) -> TensorFiles:
    """Open the weights at a path: a safetensors file, or a folder with an index or with `*.safetensors` files.

    Raises CheckpointError if there are none, and for what `TensorFiles` refuses."""
    place = Path(path)
    if place.is_file():
        return TensorFiles([place])
    if (place / INDEX).is_file():
        index = read_index(place / INDEX)
        return TensorFiles([place / name for name in sorted(set(index.values()))], index)
    files = sorted(place.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{place} holds no weights",
            why="it is neither a safetensors file nor a folder with such files",
            fix="pass a file such as model.safetensors, or the folder of a checkpoint",
        )
    return TensorFiles(files)


def read_index(path: Path) -> dict[str, str]:
    """Return the file name of each tensor as an index says.  Raises CheckpointError, also for a name with a folder."""
    with named(path, CheckpointError, AGAIN):
        found = parse_json(read_text(path))
        files = found.get("weight_map") if isinstance(found, dict) else None
        if not isinstance(files, dict) or not files:
            raise unreadable("is not an index of tensors", why="it has no weight_map")
        for name, file in files.items():
            if not isinstance(file, str) or not plain_name(file):
                raise unreadable("is not an index of tensors", where=f"weight_map.{name}", why="not the name of a file")
        return dict(files)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, RuntimeError) as error:
        missing = isinstance(error, FileNotFoundError)
        raise CheckpointError(
            f"{path.name} is missing" if missing else f"{path.name} cannot be read",
            where=str(path),
            why="" if missing else str(error),
            fix=AGAIN,
        ) from error


_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

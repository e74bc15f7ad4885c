"""Files of tensors by name, in the safetensors format: written while they are hashed, read one tensor at a time.

The library checks a file and its header.  Tensors are read here, into memory of their own: it would map the whole file
into memory, which counts against a limit of the process.  A folder may hold several, with the index that Hugging Face's
loaders read.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import mmap
import os
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from autopart.files.checkpoints.document import AGAIN, Document, Written, plain_name, require_unchanged, unreadable_file
from autopart.files.checkpoints.storage import FOLDERS, is_file, read, storage_of
from autopart.files.documents import parse_json
from autopart.files.reading import named, unreadable
from autopart.ir.errors import CheckpointError

INDEX = "model.safetensors.index.json"
"""The file that says in which file of a folder each tensor is, as Hugging Face's loaders read it."""


_PIECE = 8 << 20
"""Bytes that are written and hashed at a time."""
_FLUSHED = 64 << 20
"""Bytes after which the disk begins to write, while later ones are hashed; else all of it would wait for the end."""
_LONGEST_HEAD = 100 << 20
"""Bytes of a header that are read, as the library does."""
_AHEAD = 16
"""Pieces by which the writing may be ahead of the hashing; copies of tensors on other devices live until then."""


class Unread(Protocol):
    """A tensor that lies elsewhere, and is read when it is written."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self) -> torch.Tensor:
        """Return the tensor, in host memory.  Raises CheckpointError."""


def bytes_of(tensor: torch.Tensor | Unread) -> int:
    """Return the bytes of a tensor's numbers."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor | Unread]) -> Written:
    """Write a new file of tensors and wait until it is on the disk; returns its size and hash.

    A tensor that is contiguous in host memory is not copied, and the file is not read again: another thread hashes the
    bytes while they are written.  Tensors may share memory; each is written by itself, the largest dtypes first, so
    that all are aligned.  Raises OSError, and CheckpointError for a dtype that the format lacks.
    """
    ordered = sorted(tensors.items(), key=lambda each: (-each[1].dtype.itemsize, each[0]))
    digest, storage, size, flushed = hashlib.sha256(), storage_of(path), 0, 0
    pieces: queue.Queue[memoryview | None] = queue.Queue(_AHEAD)

    def hash_pieces() -> None:
        for piece in iter(pieces.get, None):
            digest.update(piece)

    # A thread, and not a pool: pools start nothing once the script has ended, and a save may go on then.
    hasher = threading.Thread(target=hash_pieces, name="autopart-hasher")
    hasher.start()
    try:
        with storage.create(path) as file:
            for piece in itertools.chain(
                [memoryview(_header(ordered))], *(_pieces_of(tensor) for _, tensor in ordered)
            ):
                pieces.put(piece)
                file.write(piece)
                size += len(piece)
                if size - flushed >= _FLUSHED:
                    storage.sync(file)
                    flushed = size
            storage.sync(file)
    finally:
        pieces.put(None)
        hasher.join()
    return Written(size, digest.hexdigest())


def _header(ordered: Sequence[tuple[str, torch.Tensor | Unread]]) -> bytes:
    """Return the head of a file with these tensors: its length, and JSON padded to a multiple of 8 bytes."""
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        if tensor.dtype not in _NAMES:
            raise CheckpointError(f"{name} cannot be saved", why=f"safetensors files hold no {tensor.dtype}")
        begin, end = end, end + bytes_of(tensor)
        head[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _pieces_of(given: torch.Tensor | Unread) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in pieces, without a copy if it is contiguous in host memory."""
    tensor = given if isinstance(given, torch.Tensor) else given.read()
    own = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if own.numel():
        whole = memoryview(own.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        for first in range(0, len(whole), _PIECE):
            yield whole[first : first + _PIECE]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file.  dtype: as torch has it.  offset: of its first byte in the file."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    def mapped(self) -> torch.Tensor:
        """Return the tensor, whose numbers are read from a local file where they are used.  Raises CheckpointError."""
        size = bytes_of(self)
        if storage_of(self.file) is not FOLDERS or not size:
            return self.read()
        begin = self.offset - self.offset % mmap.ALLOCATIONGRANULARITY
        try:
            with FOLDERS.open(self.file) as file:
                end = self.offset + size
                whole = mmap.mmap(file.fileno(), end - begin, access=mmap.ACCESS_COPY, offset=begin)
        except (OSError, ValueError) as error:  # ValueError: the file is shorter
            raise unreadable_file(self.file, error) from error
        # A mapping of its own: what writes a part of a larger one copies it first.
        own = torch.frombuffer(whole, dtype=torch.uint8, count=size, offset=self.offset - begin)
        return own.view(self.dtype).view(self.shape)

    def read(self) -> torch.Tensor:
        """Return the tensor, in host memory of its own.  Raises CheckpointError."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(tensor)
        return tensor

    def read_into(self, target: torch.Tensor) -> None:
        """Read the numbers into a contiguous tensor of this shape in host memory, converted to its dtype.

        Needs 8 MiB beside it at most.  Raises CheckpointError."""
        flat = target.detach().reshape(-1)
        step = flat.numel() if self.dtype == target.dtype else _PIECE // self.dtype.itemsize
        try:
            with storage_of(self.file).open(self.file) as file:
                file.seek(self.offset)
                for first in range(0, flat.numel(), step or 1):
                    part = flat[first : first + step]
                    piece = part if self.dtype == target.dtype else torch.empty(part.shape, dtype=self.dtype)
                    memory = memoryview(piece.view(torch.uint8).numpy())  # type: ignore[arg-type]
                    if file.readinto(memory) < len(memory):  # type: ignore[attr-defined]
                        raise OSError("the file ends before the tensor does")
                    if piece is not part:
                        part.copy_(piece)
        except OSError as error:
            raise unreadable_file(self.file, error) from error


class TensorFiles:
    """Tensors by name in one or several safetensors files; nothing but their headers is read before `read`."""

    def __init__(self, files: Iterable[Path], index: Mapping[str, str] | None = None) -> None:
        """files: of the tensors.  index: the name of the file of each tensor, if the files must hold exactly these.

        Raises CheckpointError for a file that is missing, truncated or not in this format, a name in two files, and an
        index that says something else."""
        self.by_name: dict[str, StoredTensor] = {}
        for path in files:
            for name, tensor in _stored(path):
                if name in self.by_name:
                    raise CheckpointError(
                        f"tensor {name} is in two files", where=f"{self.by_name[name].file} and {path}", fix=AGAIN
                    )
                self.by_name[name] = tensor
        for name, file_name in (index or {}).items():
            found = self.by_name.get(name)
            if found is None or found.file.name != file_name:
                raise CheckpointError(f"tensor {name} is missing", where=file_name, why="the index names it", fix=AGAIN)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor, in host memory of its own.  Raises CheckpointError."""
        stored = self.by_name.get(name)
        if stored is None:
            raise CheckpointError(f"tensor {name} is missing", fix=AGAIN)
        return stored.read()


def open_tensors(path: str | os.PathLike[str]) -> TensorFiles:
    """Open the weights at a path: a safetensors file, or a folder with an index or with `*.safetensors` files.

    Raises CheckpointError if there are none, and for what `TensorFiles` refuses."""
    place = Path(path)
    if is_file(place):
        return TensorFiles([place])
    if is_file(place / INDEX):
        index = read_index(place / INDEX)
        return TensorFiles([place / name for name in sorted(set(index.values()))], index)
    files = sorted(place / name for name in storage_of(place).names(place) if name.endswith(".safetensors"))
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
        found = parse_json(read(path))
        files = found.get("weight_map") if isinstance(found, dict) else None
        if not isinstance(files, dict) or not files:
            raise unreadable("is not an index of tensors", why="it has no weight_map")
        for name, file in files.items():
            if not isinstance(file, str) or not plain_name(file):
                raise unreadable("is not an index of tensors", where=f"weight_map.{name}", why="not the name of a file")
        return dict(files)


def _stored(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Yield what a file says of its tensors, by name, after the library has checked that against its size."""
    storage = storage_of(path)
    try:
        with storage.open(path) as file, ExitStack() as stack:
            size = int.from_bytes(first := file.read(8), "little")
            checked = path
            if storage is not FOLDERS:  # the library reads local files: give it one of that size, with the head alone
                copy = stack.enter_context(NamedTemporaryFile())
                copy.write(first + file.read(min(size, _LONGEST_HEAD)))
                copy.truncate(storage.size(path))
                copy.flush()
                file.seek(8)
                checked = Path(copy.name)
            with safe_open(checked, framework="np"):  # the library alone would wait for a pipe
                head = json.loads(file.read(size))
    except (SafetensorError, OSError, RuntimeError, MemoryError) as error:
        raise unreadable_file(path, error) from error
    for name, each in sorted(head.items()):
        if name != "__metadata__":
            if each["dtype"] not in _DTYPES:
                raise CheckpointError(f"tensor {name} is of type {each['dtype']}", where=str(path))
            begin, _ = each["data_offsets"]
            yield name, StoredTensor(path, tuple(each["shape"]), _DTYPES[each["dtype"]], 8 + size + begin)


def converts(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether a tensor of a dtype may be loaded into one of another: floats into floats, else equal ones."""
    return _kind(stored) == _kind(wanted)


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    return "real" if dtype.is_floating_point else str(dtype)


_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Stored:
    """The parts of a checkpoint.  weights: of the model, by name.  more: what else it keeps, by kind and name."""

    folder: Path
    document: Document
    weights: TensorFiles
    more: TensorFiles

    def check(self, weights: Iterable[str], more: Iterable[str] = ()) -> None:
        """Compare every file that has one of these tensors with its size and hash when it was written.

        Reads these files whole.  Raises CheckpointError, also for a tensor that is missing."""
        names = {self.weights.by_name[name].file.name for name in weights}
        for key in more:
            if key not in self.more.by_name:
                raise CheckpointError(f"tensor {key} is missing", where=str(self.folder), fix="use another checkpoint")
            names.add(self.more.by_name[key].file.name)
        require_unchanged(self.folder, {name: self.document.files[name] for name in names})


def opened(folder: Path, document: Document) -> Stored:
    """Open the tensors of a checkpoint; only headers are read.  Raises CheckpointError for files that are missing,
    truncated, or hold other tensors than the index says."""
    names = [name for name in document.files if name.endswith(".safetensors")]
    if INDEX not in document.files:
        raise CheckpointError("the checkpoint has no index of its weights", where=str(folder / INDEX))
    require_unchanged(folder, {INDEX: document.files[INDEX]})
    weights = [folder / name for name in names if name.startswith("model-")]
    more = [folder / name for name in names if not name.startswith("model-")]
    return Stored(folder, document, TensorFiles(weights, read_index(folder / INDEX)), TensorFiles(more))

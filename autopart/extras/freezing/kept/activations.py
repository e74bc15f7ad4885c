"""The activations of one rank: looked up by sample, computed where they are missing, and put into a batch."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopart.batch.batch import Batch
from autopart.capture import CaptureCache
from autopart.extras.freezing.kept.code import FrozenCode, Tensors, frozen_code
from autopart.extras.freezing.kept.store import SampleStore
from autopart.ir.errors import BatchError, UsageError
from autopart.session.lists import Samples
from autopart.session.session import Session

_FIRST = b""


@dataclass(frozen=True)
class AutoCache:
    """Where activations at the end of the frozen layers are kept, on each rank that is given data.

    memory_bytes, disk_bytes: the most that is kept in host memory and, when that is full, on disk.  folder: for the
    file on disk, None for that of temporary files.  samples: how many different samples the steps go over, for the
    planner; None if all of them fit.  augmented: True to keep the activations of each sample as it came first, although
    its inputs are drawn again every time; otherwise other inputs under the same name are refused."""

    memory_bytes: int
    disk_bytes: int = 0
    folder: str | None = None
    samples: int | None = None
    augmented: bool = False

    def __post_init__(self) -> None:
        for name, value in (("memory_bytes", self.memory_bytes), ("disk_bytes", self.disk_bytes)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise UsageError(f"{name} is {value!r}", fix="pass a number of bytes, such as 8 << 30")
        if self.samples is not None and (not isinstance(self.samples, int) or self.samples < 1):
            raise UsageError(f"samples is {self.samples!r}", fix="pass the number of samples of an epoch")


@dataclass
class Counts:
    """Rows whose activations were read, were computed from those of fewer frozen layers, and were computed whole."""

    read: int = 0
    continued: int = 0
    computed: int = 0


class Activations:
    """What a rank keeps while its plan begins behind frozen layers.

    values: what the plan begins with, () if it begins with the batch.  cache: the bounds, None before any were given.
    counts: of rows, since the start.  beside_s: seconds of a step for activations, as the planner expects them.
    """

    def __init__(self, captures: CaptureCache, device: torch.device) -> None:
        self._captures, self._device = captures, device
        self.values: tuple[str, ...] = ()
        self.counts = Counts()
        self._rows = 1
        self.cache: AutoCache | None = None
        self.beside_s = 0.0
        self._store = SampleStore(0)
        self._codes: dict[tuple[str, str], FrozenCode] = {}
        self._unproven = 0  # rows that may still be read before all numbers of the frozen layers are looked at

    @property
    def active(self) -> bool:
        """Whether the plan begins behind frozen layers."""
        return bool(self.values)

    @property
    def _augmented(self) -> bool:
        return self.cache is not None and self.cache.augmented

    @property
    def used_bytes(self) -> tuple[int, int]:
        """Bytes that are kept in memory and on disk."""
        return self._store.memory_used, self._store.disk_used

    def open(self, cache: AutoCache) -> None:
        """Keep activations within these bounds.  Raises UsageError if there can be no file in the folder."""
        if cache == self.cache:
            return
        try:
            store = SampleStore(cache.memory_bytes, cache.disk_bytes, cache.folder)
        except OSError as error:
            raise UsageError(f"no file for activations can be made in {cache.folder}", why=str(error)) from error
        self._store.close()
        self.cache, self._store = cache, store

    def begin(self, batch: Batch, rows: int) -> None:
        """Go on under a plan for batches like this one.  rows: that are run at once.

        What was kept stays if the new values follow from it; else it is forgotten, as layers learn again.  Local."""
        values = tuple(name for name, _ in batch.kept)
        self._codes.clear()
        self.beside_s = 0.0
        if self.values and not (values and self._code(batch, rows, values).starts_at(self.values)):
            self._store.clear()
        self.values, self._rows = values, rows

    def close(self) -> None:
        """Free what is kept."""
        self._store.close()

    def extended(self, batch: Batch, samples: Samples | None, own: Sequence[int], tensors: Tensors) -> Batch:
        """Return the batch with the values that the plan begins with, in the rows `own`; others stay zeros.

        samples: names of all rows; None to compute the values and keep none.  tensors: the model's that this rank
        holds.  Raises RefusedError as `frozen_code`, and BatchError for names that do not fit the batch, or for a
        sample with other inputs than before."""
        code = self._code(batch, self._rows, self.values)
        found = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in code.specs(batch.rows or 1).items()}
        if own:
            if code.follow(tensors):
                self._unproven = 0
            self._fill(found, code, batch, _names_of(samples, batch), own, tensors)
        return replace(batch, kept=tuple(found.items()))

    def _code(self, batch: Batch, rows: int, values: tuple[str, ...]) -> FrozenCode:
        version = self._captures.version
        key = version, repr(batch.plain.signature())
        if key not in self._codes:
            self._codes = {known: code for known, code in self._codes.items() if known[0] == version}
            self._codes[key] = frozen_code(self._captures, batch, rows, self._device, values)
        return self._codes[key]

    def _fill(
        self,
        found: Tensors,
        code: FrozenCode,
        batch: Batch,
        names: Samples | None,
        own: Sequence[int],
        tensors: Tensors,
    ) -> None:
        """Write the values of the rows `own` into `found`, and keep those that were computed."""
        kind, tag = repr(batch.plain.signature()), code.tag(self.values)
        known = {row: None if names is None else self._store.get((names[row], kind)) for row in own}
        entries = {
            row: entry for row, entry in known.items() if entry is not None and entry.tag == code.tag(entry.tag[0])
        }
        digests = {values: self._digests(code, values, batch, own) for values in {e.tag[0] for e in entries.values()}}
        for row, entry in entries.items():
            if entry.digest != digests[entry.tag[0]][row]:
                assert names is not None
                raise _other_inputs(names[row])
        self._prove(code, len(entries))
        missing: dict[tuple[str, ...], list[int]] = {}
        for row in own:
            earlier = entries[row].tag[0] if row in entries else ()
            if earlier != self.values:
                missing.setdefault(earlier, []).append(row)
                continue
            for name, kept in zip(self.values, entries[row].tensors, strict=True):
                found[name][row] = kept
            self.counts.read += 1
        for earlier, rows in missing.items():
            held = {n: torch.stack([entries[row].tensors[at] for row in rows]) for at, n in enumerate(earlier)}
            made = code.run(batch, rows, tensors, held)
            self.counts.continued += len(rows) if earlier else 0
            self.counts.computed += 0 if earlier else len(rows)
            digest = self._digests(code, self.values, batch, rows) if names is not None else {}
            for place, row in enumerate(rows):
                own_values = [made[name][place] for name in self.values]
                for name, value in zip(self.values, own_values, strict=True):
                    found[name][row] = value
                if names is not None:
                    self._store.put((names[row], kind), tag, digest[row], own_values)

    def _digests(
        self, code: FrozenCode, values: tuple[str, ...], batch: Batch, rows: Sequence[int]
    ) -> Mapping[int, bytes]:
        """Return digests of what these values depend on in the rows of a batch, by row."""
        return dict.fromkeys(rows, _FIRST) if self._augmented else _digests(code.inputs(values), batch, rows)

    def _prove(self, code: FrozenCode, rows: int) -> None:
        """Look whether the frozen layers were written to unnoticed, once while as many rows are read as there are
        samples with something kept, of whatever kinds of batches.

        rows: that are read next.  Raises RefusedError."""
        if rows and self._unproven <= 0:
            code.sources.prove()
            self._unproven = len({name for name, _ in self._store.keys})
        self._unproven -= rows

    def tried(self, batch: Batch, code: FrozenCode, cache: AutoCache) -> tuple[Batch, float, float]:
        """Return the batch with the values of some frozen layers, and the seconds that computing them took and reading
        them takes, for all rows.  They are those of the model on this rank.  Local."""
        rows = range(batch.rows or 1)
        tensors = {name: tensor.to(self._device) for name, tensor in code.captured.tensors.items()}
        code.run(batch, rows, tensors, {})
        began = time.perf_counter()
        made = code.run(batch, rows, tensors, {})
        computing_s = time.perf_counter() - began
        size = sum(tensor.nbytes for tensor in made.values())
        in_memory = size <= cache.memory_bytes or not cache.disk_bytes
        store = SampleStore(size, 0) if in_memory else SampleStore(0, size, cache.folder)
        for row in rows:
            store.put(row, ((), b""), b"", [made[name][row] for name in code.values])
        began = time.perf_counter()
        if not cache.augmented:
            _digests(code.inputs(code.values), batch, rows)
        read = {name: torch.zeros_like(tensor) for name, tensor in made.items()}  # new memory, as in every step
        for row in rows:
            entry = store.get(row)
            assert entry is not None
            for name, kept in zip(code.values, entry.tensors, strict=True):
                read[name][row] = kept
        reading_s = time.perf_counter() - began
        store.close()
        return replace(batch, kept=tuple(read.items())), computing_s, reading_s


def activations_of(session: Session) -> Activations:
    """Return the activations that a session keeps."""
    return next(step for step in session.road.steps if isinstance(step, Activations))


def _names_of(samples: Any, batch: Batch) -> Samples | None:
    """Return the names of the rows of a batch.  Raises BatchError."""
    if samples is None:
        return None
    names = samples.tolist() if isinstance(samples, torch.Tensor) else list(samples)
    if len(names) != batch.rows or not all(isinstance(name, (int, str)) for name in names):
        raise BatchError(
            f"samples= names {len(names)} samples, and the batch has {batch.rows} rows",
            fix="pass for each row the number or the name of its sample in the data set",
        )
    return names


def _digests(inputs: Sequence[int], batch: Batch, rows: Sequence[int]) -> dict[int, bytes]:
    """Return a digest of these inputs for each of these rows.  Reads the inputs once."""
    pairs = list(batch.plain.tensors_and_splits())
    read = [pairs[place] for place in inputs]
    whole = hashlib.blake2b(digest_size=16)
    for tensor, split in read:
        if not split:
            whole.update(_data(tensor))
    cut = [tensor.detach().cpu() for tensor, split in read if split]
    found = {}
    for row in rows:
        own = whole.copy()
        for tensor in cut:
            own.update(_data(tensor[row]))
        found[row] = own.digest()
    return found


def _data(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _other_inputs(name: int | str) -> BatchError:
    return BatchError(
        f"sample {name!r} came with other inputs than when its activations were kept",
        why="they belong to those inputs: under a random augmentation every step has others",
        fix="give other inputs another name; or pass AutoCache(..., augmented=True) to train on the first ones; or "
        "leave samples= out, which keeps nothing",
    )

"""A user-defined storage for checkpoints: the objects of a bucket, for which a file system of fsspec stands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

import autopart
from autopart.files.checkpoints.document import NAME
from autopart.files.checkpoints.storage import STORAGES

# -- code that a user writes ------------------------------------------------------------------------------------------


class Objects:
    """Objects by their keys: there are no folders, nothing is renamed at once, and closing a file brings it."""

    def __init__(self, system: Any) -> None:
        self.system, self.held = system, set[Path]()

    def open(self, path: Path) -> BinaryIO:
        return cast(BinaryIO, self.system.open(key(path), "rb"))

    def create(self, path: Path) -> BinaryIO:
        return cast(BinaryIO, self.system.open(key(path), "xb"))

    def rename(self, old: Path, new: Path) -> None:
        for each in sorted(self._below(old), key=is_document):
            self.system.cp_file(each, each.replace(key(old), key(new), 1))
        self.remove(old)

    def names(self, folder: Path) -> list[str]:
        home = f"{key(folder)}/"
        return sorted({each.removeprefix(home).split("/")[0] for each in self._below(folder) if each.startswith(home)})

    def size(self, path: Path) -> int | None:
        return self.system.size(key(path)) if self.system.isfile(key(path)) else None

    def make(self, folder: Path) -> None:
        pass

    def remove(self, path: Path) -> None:
        for each in sorted(self._below(path), key=is_document, reverse=True):
            self.system.rm_file(each)

    def sync(self, what: BinaryIO | Path) -> None:
        pass

    def lock(self, path: Path, holder: str) -> Callable[[], None] | None:
        if path in self.held:
            raise BlockingIOError(holder)
        self.held.add(path)
        return lambda: self.held.discard(path)

    def _below(self, path: Path) -> list[str]:
        return cast(list[str], self.system.find(key(path)))


def key(path: Path) -> str:
    """Return the key of bucket://a/b, /a/b."""
    return "/" + "/".join(path.parts[1:])


def is_document(name: str) -> bool:
    """Whether this makes a folder a checkpoint."""
    return name.endswith(f"/{NAME}")


# -- on the ranks of a pool -------------------------------------------------------------------------------------------


def saved_and_loaded(folder: str) -> tuple[list[float], list[float], list[str]]:
    """Train on two ranks, save to a bucket on the disk, and go on from there: the losses of both, and what is kept."""
    import fsspec

    from support.jobs.state import checkpoint_jobs as jobs

    STORAGES["bucket:"] = Objects(fsspec.filesystem("file", auto_mkdir=True))
    place, losses = f"bucket:/{folder}", []
    options: dict[str, Any] = {"sample": jobs.batch(0), "stages": 2, "micro_batches": 2}
    try:
        for seed in (1, 2):
            with autopart.compile(jobs.model(seed), "cpu:2", **options) as pipe:
                optimizer, scheduler = jobs.trainer(pipe)
                if seed == 1:
                    jobs.train(pipe, optimizer, scheduler, range(2))
                    pipe.save(place, optimizer, scheduler, keep=1)
                    jobs.train(pipe, optimizer, scheduler, range(2, 3))
                    pipe.save(place, optimizer, scheduler, keep=1, wait=False)
                else:
                    pipe.load(place, optimizer, scheduler)
                losses.append(jobs.train(pipe, optimizer, scheduler, range(3, 5)))
        return losses[0], losses[1], sorted(STORAGES["bucket:"].names(Path(place)))
    finally:
        del STORAGES["bucket:"]


def state_at(folder: str) -> list[torch.Tensor]:
    """Return the weights of the newest checkpoint in a folder."""
    model = torch.nn.Linear(3, 2)
    autopart.load_into(model, folder)
    return [*model.parameters()]

"""The process group as one rank sees it: who it is, on which device, and small messages to all.

torchrun's environment variables are the contract.  Gloo carries CPU tensors and control messages; NCCL carries CUDA
tensors, on one communicator per directed pair of ranks, because two directions on one communicator wait for each
other.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from autopart.ir.errors import ClusterError

_TIMEOUT_S = "AUTOPART_TIMEOUT_S"


_meeting: list[tuple[Store, int, int]] = []
"""Where the ranks meet, with rank and world size: found once in the life of a process."""
_openings = itertools.count()


def _open(backend: str, timeout: timedelta) -> None:
    """Open the default process group, each time under other keys of the same store: under those of a group that was
    left, ranks would find its addresses and wait for ever."""
    if not _meeting:
        _meeting.append(next(rendezvous("env://", timeout=timeout)))
    store, rank, size = _meeting[0]
    own = PrefixStore(f"autopart/{next(_openings)}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=timeout)


class World:
    """rank, size and device of this process, and collectives over all ranks.  With one rank nothing is opened."""

    def __init__(self, kind: str, size: int, *, command: str = "your_script.py") -> None:
        self.size = size
        self.rank = 0
        self._opened = False
        if size > 1 or dist.is_initialized():
            self._join(kind, size, command)
        self.device = self._device(kind)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def _join(self, kind: str, size: int, command: str) -> None:
        if not dist.is_initialized():
            if "RANK" not in os.environ:
                raise ClusterError(
                    f"the plan needs {size} processes and this is one process on its own",
                    why="RANK is not set, so neither torchrun nor autopart.launch started it",
                    fix=f"torchrun --standalone --nproc-per-node {size} {command}   (or autopart.launch(fn, cluster))",
                )
            require_world(size, int(os.environ["WORLD_SIZE"]), command)
            backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
            timeout = timedelta(seconds=float(os.environ.get(_TIMEOUT_S, "600")))
            _open(backend, timeout)
            self._opened = True
        require_world(size, dist.get_world_size(), command)
        self.size = dist.get_world_size()
        self.rank = dist.get_rank()

    def close(self) -> None:
        """Leave the process group if this world opened it."""
        if self._opened and dist.is_initialized():
            dist.destroy_process_group()
        self._opened = False

    def _device(self, kind: str) -> torch.device:
        if kind != "cuda":
            return torch.device("cpu")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", self.rank % max(torch.cuda.device_count(), 1))))
        torch.cuda.set_device(device)
        return device

    def channel(self, src: int, dst: int) -> dist.ProcessGroup:
        """The group that carries messages from src to dst; both call this, at the same place of the program."""
        if self.device.type == "cuda":
            return self.group((src, dst), ordered=True)
        return _default_group()

    def group(self, ranks: Sequence[int], *, ordered: bool = False) -> dist.ProcessGroup:
        """A group of some ranks.  Collective: every rank of the world calls it in the same order."""
        key = tuple(ranks) if ordered else tuple(sorted(ranks))
        if key not in self._groups:
            whole = len(key) == self.size and not ordered
            self._groups[key] = _default_group() if whole else dist.new_group(list(key))
        return self._groups[key]

    def gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """The numbers of every rank (all of the same count), by rank.  Collective."""
        if self.size == 1:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyone, mine)
        return [row.tolist() for row in everyone]

    def gather_text(self, text: str) -> list[str]:
        """A text of every rank.  Collective."""
        if self.size == 1:
            return [text]
        data = torch.tensor(list(text.encode()), dtype=torch.uint8)
        sizes = [int(row[0]) for row in self.gather_numbers([data.numel()])]
        rows = [torch.zeros(max(sizes), dtype=torch.uint8) for _ in sizes]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: data.numel()] = data
        if max(sizes):
            dist.all_gather(rows, padded)
        return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]

    def broadcast_json(self, content: Any, source: int = 0) -> Any:
        """`content` of rank `source`, on every rank.  Collective."""
        if self.size == 1:
            return content
        data = torch.tensor(list(json.dumps(content).encode()) if self.rank == source else [], dtype=torch.uint8)
        size = torch.tensor([data.numel()])
        dist.broadcast(size, source)
        if self.rank != source:
            data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, source)
        return json.loads(bytes(data.tolist()))

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """A CPU tensor of rank `source`, in place, on every rank.  Collective."""
        if self.size > 1:
            dist.broadcast(tensor, source)
        return tensor

    def sum_numbers(self, numbers: Iterable[float]) -> list[float]:
        """Sums over the ranks, in the order of the ranks, so that every rank gets the same bits.  Collective."""
        return [sum(column) for column in zip(*self.gather_numbers(list(numbers)), strict=True)]


def require_world(needed: int, found: int, command: str = "your_script.py") -> None:
    """Raises ClusterError when the launcher started another number of processes than the plan needs."""
    if found != needed:
        raise ClusterError(
            f"the cluster has {needed} devices and the launcher started {found} processes",
            fix=f"torchrun --standalone --nproc-per-node {needed} {command}",
        )


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group

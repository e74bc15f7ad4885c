"""The process group as one rank sees it: who it is, on which device, and small messages to all.

torchrun's environment variables are the contract.  Gloo carries CPU tensors and control messages; NCCL carries CUDA
tensors, on one communicator per directed pair of ranks, because two directions on one communicator wait for each
other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from autopart.ir.errors import ClusterError
from autopart.runtime.raw_bytes import from_bytes, to_bytes
from autopart.runtime.rendezvous import open_default_group

_TIMEOUT_S = "AUTOPART_TIMEOUT_S"


class _SharedGroup:
    """The default group while worlds of this process use it: the last one that leaves destroys it.

    A group that someone else opened is used, and never destroyed.
    """

    def __init__(self) -> None:
        self._users = 0

    def enter(self, backend: str, timeout: timedelta) -> None:
        """Open the group unless it is open.  Collective when it is not."""
        if not dist.is_initialized():
            open_default_group(backend, timeout)
            self._users = 1
        elif self._users:
            self._users += 1

    def leave(self) -> None:
        """Destroy the group if it was opened here and nobody uses it any more."""
        if not self._users:
            return
        self._users -= 1
        if not self._users and dist.is_initialized():
            dist.destroy_process_group()


_shared_group = _SharedGroup()


class World:
    """rank, size and device of this process, and collectives over all ranks.  With one rank nothing is opened."""

    def __init__(self, kind: str, size: int, *, command: str = "your_script.py") -> None:
        self.size = size
        self.rank = 0
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._joined = False
        if size > 1 or dist.is_initialized():
            self._join(kind, size, command)
        try:
            self.device = self._device(kind)
        except BaseException:
            self.close()
            raise

    def _join(self, kind: str, size: int, command: str) -> None:
        if not dist.is_initialized():
            if "RANK" not in os.environ:
                raise ClusterError(
                    f"the plan needs {size} processes and this is one process on its own",
                    why="RANK is not set, so neither torchrun nor autopart.launch started it",
                    fix=f"torchrun --standalone --nproc-per-node {size} {command}   (or autopart.launch(fn, cluster))",
                )
            require_world(size, int(os.environ["WORLD_SIZE"]), command)
        else:
            require_world(size, dist.get_world_size(), command)
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        _shared_group.enter(backend, timedelta(seconds=float(os.environ.get(_TIMEOUT_S, "600"))))
        self._joined = True
        self.size = dist.get_world_size()
        self.rank = dist.get_rank()

    def close(self) -> None:
        """Destroy the groups made here, and the default group when no other world uses it.  Safe to call twice."""
        if not self._joined:
            return
        self._joined = False
        for group in self._groups.values():
            if dist.is_initialized() and group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        self._groups.clear()
        _shared_group.leave()

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
        data = text.encode()
        sizes = [int(row[0]) for row in self.gather_numbers([len(data)])]
        if not max(sizes):
            return ["" for _ in sizes]
        rows = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]
        dist.all_gather(rows, from_bytes(data.ljust(max(sizes), b"\0")))
        return [to_bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]

    def broadcast_json(self, content: Any, source: int = 0) -> Any:
        """`content` of rank `source`, on every rank.  Collective."""
        if self.size == 1:
            return content
        data = json.dumps(content).encode() if self.rank == source else b""
        size = torch.tensor([len(data)])
        dist.broadcast(size, source)
        buffer = from_bytes(data) if self.rank == source else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(buffer, source)
        return json.loads(to_bytes(buffer))

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """A CPU tensor of rank `source`, in place, on every rank.  Collective."""
        if self.size > 1:
            dist.broadcast(tensor, source)
        return tensor

    def move(self, tensor: torch.Tensor, source: int, target: int) -> torch.Tensor:
        """A contiguous CPU tensor of rank `source`, in place, on rank `target`.  Both call this, in one order of all
        moves; elsewhere it does nothing."""
        if self.rank == source != target:
            dist.send(tensor, target)
        elif self.rank == target != source:
            dist.recv(tensor, source)
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

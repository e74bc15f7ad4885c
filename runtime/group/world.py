"""The process group as one rank sees it: who it is, on which device, and small messages to all.

torchrun's environment variables are the contract.  Gloo carries CPU tensors and control messages; NCCL carries CUDA
tensors, on one communicator per directed pair of ranks, because two directions on one communicator wait for each
other.  On request Gloo carries CUDA tensors too, staged through the host: then several ranks may share a device.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autopart.ir.errors import ClusterError
from autopart.launcher import launcher_variables, torchrun_line
from autopart.runtime.activity import waiting
from autopart.runtime.group.breaking import break_group
from autopart.runtime.group.carriers import CARRIERS, Carrier
from autopart.runtime.group.rendezvous import UNWATCHED
from autopart.runtime.group.shared_group import default_timeout_s, shared_group
from autopart.runtime.raw_bytes import from_bytes, to_bytes
from autopart.runtime.watch.slow_phase import watch_slow_phases

E = TypeVar("E", bound=BaseException)

AUTO, NCCL, GLOO = "auto", "nccl", "gloo"
PLANNING_TIMES = 10
"""Planning and capturing may take as many times `timeout=`, where that is given."""


def transports() -> tuple[str, ...]:
    """What may carry messages: NCCL between CUDA devices and Gloo between CPUs, or what is named."""
    return (AUTO, GLOO, *CARRIERS)


class World:
    """rank, size and device of this process, and collectives over all ranks.  With one rank nothing is opened."""

    def __init__(
        self,
        kind: str,
        size: int,
        *,
        local: int | None = None,
        timeout_s: float | None = None,
        transport: str = AUTO,
    ) -> None:
        """local: ranks on each host, None for all.  timeout_s: seconds that a rank may wait for others that do not go
        on; None for AUTOPART_TIMEOUT_S or 600.  A rank that plans or captures has ten times what is given here, and no
        limit for None.  transport: one of `transports()`.

        Raises ClusterError where this host lacks the CUDA devices that its ranks need."""
        watch_slow_phases()
        self.transport = transport_of(kind, transport)
        self.size = size
        self.rank = 0
        self._local = local
        self._groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        self._pairs: dict[tuple[int, int], dist.ProcessGroup] = {}
        self._talking: set[tuple[int, int]] = set()
        self._summing: set[tuple[str, tuple[int, ...]]] = set()
        self._backend = "cpu:gloo,cuda:nccl" if self.transport == NCCL else GLOO
        self._lease: int | None = None
        self._known: BaseException | None = None
        self._waiting = waiting()
        if kind == "cuda":
            require_devices(torch.cuda.device_count(), local_ranks(size), self.transport)
        if size > 1 or dist.is_initialized():
            self._join(size, timeout_s)
        try:
            self.device = self._device(kind)
            self.carrier = self._carrier()
        except BaseException:
            self.close()
            raise

    def _join(self, size: int, timeout_s: float | None) -> None:
        if not dist.is_initialized():
            os.environ.update(launcher_variables(os.environ))
            if "RANK" not in os.environ:
                raise ClusterError(
                    f"the plan needs {size} processes and this is one process on its own",
                    why="RANK is not set, so neither torchrun nor autopart.launch started it",
                    fix=f"{torchrun_line(size, self._local)}   (or autopart.launch(fn, cluster))",
                )
            require_world(size, int(os.environ["WORLD_SIZE"]), self._local)
        else:
            require_world(size, dist.get_world_size(), self._local)
        limit_s = default_timeout_s() if timeout_s is None else timeout_s
        planning_s = PLANNING_TIMES * timeout_s if timeout_s is not None else math.inf
        self._lease = shared_group.enter(self._backend, limit_s, planning_s, self._broken)
        self.size = dist.get_world_size()
        self.rank = dist.get_rank()

    def close(self) -> None:
        """Destroy the groups made here, and the default group when no other world uses it.  Safe to call twice."""
        if self._lease is None:
            return
        lease, self._lease = self._lease, None
        if shared_group.holds(lease):
            for group in (*self._groups.values(), *self._pairs.values()):
                with suppress(ValueError, AssertionError):
                    dist.destroy_process_group(group)
        self._groups.clear()
        self._pairs.clear()
        shared_group.leave(lease, self._broken)

    def _device(self, kind: str) -> torch.device:
        if kind != "cuda":
            return torch.device("cpu")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", self.rank)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device

    def _carrier(self) -> Carrier | None:
        """What posts messages at their places in the order; None where they may be posted ahead, or there are none."""
        return CARRIERS[self.transport](self) if self.transport in CARRIERS and self.size > 1 else None

    def _broken(self) -> None:
        """Break the groups made here."""
        for group in [*self._groups.values(), *self._pairs.values()]:
            if isinstance(group, dist.ProcessGroup):
                break_group(group)

    # -- groups ----------------------------------------------------------------------------------------------------

    def channel(self, src: int, dst: int) -> dist.ProcessGroup:
        """The group that carries messages from src to dst; both call this, at the same place of the program."""
        if self.transport == NCCL:
            return self.group((src, dst), ordered=True)
        return shared_group.group

    def group(self, ranks: Sequence[int], *, ordered: bool = False, purpose: str = "") -> dist.ProcessGroup:
        """A group of some ranks.  Collective: every rank of the world calls it in the same order.

        purpose: groups of other purposes are others, so that what is under way in one is not in the order of another.
        """
        key = tuple(ranks) if ordered else tuple(sorted(ranks))
        if len(key) == self.size and not ordered and not purpose and shared_group.backend == self._backend:
            group = shared_group.group  # of all worlds of this process: not ours to end
        elif (purpose, key) in self._groups:
            group = self._groups[purpose, key]
        else:
            group = self._groups[purpose, key] = self._new_group(key, self._backend)
        if self.carrier is not None and not ordered and self.rank in key and (purpose, key) not in self._summing:
            self._summing.add((purpose, key))
            self.carrier.open_group(group)
        return group

    def pair_group(self, low: int, high: int) -> dist.ProcessGroup:
        """The group of two ranks that carries their messages and nothing else.  Collective over all ranks."""
        if (low, high) not in self._pairs:
            self._pairs[low, high] = self._new_group((low, high), NCCL)
        return self._pairs[low, high]

    def open_pair(self, low: int, high: int) -> None:
        """Make ready for messages between two ranks, once, where that has to be done before the first of them.
        Collective over all ranks, in one order of all pairs and groups, nothing else being under way."""
        if self.carrier is not None and (low, high) not in self._talking:
            self._talking.add((low, high))
            self.carrier.open_pair(low, high)

    def _new_group(self, ranks: Sequence[int], backend: str) -> dist.ProcessGroup:
        with waiting():
            group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=UNWATCHED, backend=backend)
        return group

    @property
    def staged(self) -> bool:
        """Whether messages of the device pass through memory of the host."""
        return self.device.type == "cuda" and self.transport == GLOO

    def all_reduce(
        self,
        tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        to: int | None = None,
    ) -> None:
        """Sum, or another op, over the ranks of a group, in place.  Collective over that group.  to: the one rank that
        needs the result; what others then have is undefined."""
        with self._on_host(tensor) as data:
            if to is None:
                dist.all_reduce(data, op=op, group=group)
            else:
                dist.reduce(data, to, op=op, group=group)

    def give_group(self, tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> None:
        """A tensor of rank `source`, in place, on all ranks of a group.  Collective over that group."""
        with self._on_host(tensor) as data:
            dist.broadcast(data, source, group=group)

    @contextmanager
    def _on_host(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """The tensor, or where messages pass through the host a copy there, which is copied back."""
        if not self.staged or tensor.device.type == "cpu":
            yield tensor
            return
        data = tensor.cpu()
        yield data
        tensor.copy_(data)

    # -- failures --------------------------------------------------------------------------------------------------

    def known(self, error: E) -> E:
        """The error, which all ranks raise and none has to be told."""
        self._known = error
        return error

    def is_known(self, error: BaseException) -> bool:
        """Whether all ranks raise this error."""
        return error is self._known

    def end(self, error: BaseException) -> BaseException:
        """What to raise for an error of this rank: itself where all ranks raise it, else what failed first, of which
        all have been told (`fail`)."""
        if self.size == 1 or self.is_known(error):
            return error
        monitor = shared_group.monitor
        first = error if monitor is None or self._lease is None else monitor.explained(error)
        self.fail(first)
        return first

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed and why, and end what they wait in; nothing can be sent any more.

        Not collective.  Takes milliseconds, a second where the store of the launch does not answer."""
        if self._lease is None or not shared_group.holds(self._lease) or self.size == 1:
            return
        if shared_group.monitor is not None:
            shared_group.monitor.tell(error)
        shared_group.break_all()

    # -- small messages --------------------------------------------------------------------------------------------

    def gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """The numbers of every rank (all of the same count), by rank.  Collective."""
        if self.size == 1:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        with self._waiting:
            dist.all_gather(everyone, mine, group=shared_group.group)
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
        with self._waiting:
            dist.all_gather(rows, from_bytes(data.ljust(max(sizes), b"\0")), group=shared_group.group)
        return [to_bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]

    def broadcast_json(self, content: Any, source: int = 0) -> Any:
        """`content` of rank `source`, on every rank.  Collective."""
        if self.size == 1:
            return content
        data = json.dumps(content).encode() if self.rank == source else b""
        size = torch.tensor([len(data)])
        self.broadcast(size, source)
        buffer = from_bytes(data) if self.rank == source else torch.empty(int(size), dtype=torch.uint8)
        self.broadcast(buffer, source)
        return json.loads(to_bytes(buffer))

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """A CPU tensor of rank `source`, in place, on every rank.  Collective."""
        if self.size > 1:
            with self._waiting:
                dist.broadcast(tensor, source, group=shared_group.group)
        return tensor

    def move(self, tensor: torch.Tensor, source: int, target: int) -> torch.Tensor:
        """A contiguous CPU tensor of rank `source`, in place, on rank `target`.  Both call this, in one order of all
        moves; elsewhere it does nothing."""
        if self.rank == source != target:
            with waiting(target):
                dist.send(tensor, target, group=shared_group.group)
        elif self.rank == target != source:
            with waiting(source):
                dist.recv(tensor, source, group=shared_group.group)
        return tensor


def transport_of(kind: str, asked: str) -> str:
    """What carries the messages of devices of this kind, one of `transports()` but "auto".  Raises ClusterError for
    NCCL without CUDA devices."""
    if asked == NCCL and kind != "cuda":
        raise ClusterError("transport is nccl, and the cluster has no CUDA devices", fix='use transport="gloo"')
    if asked == AUTO:
        return NCCL if kind == "cuda" else GLOO
    return asked


def local_ranks(size: int) -> int:
    """How many ranks run on this host, as far as the launcher says."""
    return min(size, int(os.environ.get("LOCAL_WORLD_SIZE", size)))


def require_devices(found: int, ranks: int, transport: str) -> None:
    """Raises ClusterError when `ranks` ranks cannot run on the `found` CUDA devices of a host."""
    if not found:
        raise ClusterError(
            "the cluster is one of CUDA devices, and this host shows none",
            why="torch.cuda.device_count() is 0",
            fix="check the driver and CUDA_VISIBLE_DEVICES, or plan for CPUs",
        )
    if transport == NCCL and ranks > found:
        raise ClusterError(
            f"{ranks} ranks run on this host, which shows {found} CUDA device" + "s" * (found > 1),
            why="NCCL takes one rank on each device",
            fix='start as many ranks as there are devices, or use transport="gloo", under which ranks share devices',
        )


def require_world(needed: int, found: int, local: int | None = None) -> None:
    """Raises ClusterError when the launcher started another number of processes than the plan needs."""
    if found != needed:
        raise ClusterError(
            f"the cluster has {needed} devices and the launcher started {found} processes",
            fix=torchrun_line(needed, local),
        )

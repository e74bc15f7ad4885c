"""The process group as one rank sees it: who it is, on which device, and small messages to all.

Environment variables are those of torchrun.  Gloo carries CPU tensors and control messages, NCCL carries CUDA tensors.
On request Gloo carries CUDA tensors too, staged through the host: then several ranks may share a device.
"""

from __future__ import annotations

import logging
import math
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autopart.ir.cluster import DEVICE_KINDS
from autopart.ir.errors import AutopartError, ClusterError, RunError
from autopart.launcher import launcher_variables, torchrun_line
from autopart.runtime.activity import current, waiting
from autopart.runtime.group.carriers import CARRIERS, NcclCarrier
from autopart.runtime.group.reduction import TOGETHER, Tree, begin_together
from autopart.runtime.group.rendezvous import UNWATCHED
from autopart.runtime.group.shared_group import break_group, default_timeout_s, shared_group
from autopart.runtime.heap import give_back, keep_freed_memory
from autopart.runtime.watch.progress import show_progress
from autopart.runtime.watch.stop_signals import stop_signals

E = TypeVar("E", bound=BaseException)
T = TypeVar("T")

AUTO, NCCL, GLOO = "auto", "nccl", "gloo"
_log = logging.getLogger("autopart")
PLANNING_TIMES = 10
"""Planning and capturing may take this many times `timeout=`, if that is given."""


def transports() -> tuple[str, ...]:
    """Return the names of transports; "auto" is NCCL between CUDA devices and Gloo between CPUs."""
    return (AUTO, GLOO, *CARRIERS)


class World:
    """The rank and device of this process, the number of ranks, and collectives.  With one rank no group is opened.

    carrier: posts messages at their places in the program; None if receives may be posted ahead.  staged: whether
    messages of the device pass through host memory.  overlaps: whether collectives may run in the background while
    messages are in flight.
    stop_requested: whether a rank was asked to stop (`watch.stop_signals`).  Every exchange of numbers carries it, so
    it becomes True on all ranks in the same one.  stepped: whether this rank has trained; before that it does not stop
    so that others can join, since all would only start again.
    """

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
        on; None for AUTOPART_TIMEOUT_S or 600.  A rank that plans or captures has ten times `timeout_s`, or no limit
        for None.  transport: one of `transports()`.

        Raises ClusterError if this host lacks the CUDA devices that its ranks need."""
        show_progress()
        self.transport = transport_of(kind, transport)
        self.size = size
        self.rank = 0
        self._local = local
        self._groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        self._opened: set[tuple[str, tuple[int, ...]]] = set()
        self._backend = "cpu:gloo,cuda:nccl" if self.transport == NCCL else GLOO
        self._lease: int | None = None
        self._known: BaseException | None = None
        self._waiting = waiting()
        self._tree: Tree | None = None
        self.carrier: NcclCarrier | None = None
        self.stop_requested = self.stepped = self._catching = False
        if DEVICE_KINDS[kind].device_type == "cuda":
            require_devices(torch.cuda.device_count(), local_ranks(size), self.transport)
        if size > 1 or dist.is_initialized():
            self._join(size, timeout_s)
        try:
            self.device = device_of(kind, self.rank)
            if self.device.type == "cpu":
                keep_freed_memory()
            if self.transport in CARRIERS and self.size > 1:
                pair_group = lambda low, high: self._own_group("messages", (low, high), NCCL)  # noqa: E731
                self.carrier = CARRIERS[self.transport](self.rank, self.device, pair_group)
            self.staged = self.device.type != "cpu" and self.transport == GLOO
            self.overlaps = self.carrier is None and not self.staged
            self._catching = True
            stop_signals.enter()
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
        running = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
        require_world(size, running, self._local)
        limit_s = default_timeout_s() if timeout_s is None else timeout_s
        planning_s = PLANNING_TIMES * timeout_s if timeout_s is not None else math.inf
        self._lease = shared_group.enter(self._backend, limit_s, planning_s, self._broken)
        self.size = dist.get_world_size()
        self.rank = dist.get_rank()

    def close(self) -> None:
        """Destroy the groups made here, and the default group when no other world uses it.  Safe to call twice."""
        if self._catching:
            self._catching = False
            stop_signals.leave()
        give_back()
        if self._lease is None:
            return
        if self._tree is not None:
            self._tree.end()
        lease, self._lease = self._lease, None
        if shared_group.holds(lease):
            for group in self._groups.values():
                with suppress(ValueError, AssertionError):
                    dist.destroy_process_group(group)
        self._groups.clear()
        shared_group.leave(lease, self._broken)

    def _broken(self) -> None:
        """Break the groups made here."""
        for group in list(self._groups.values()):
            if isinstance(group, dist.ProcessGroup):
                break_group(group)

    # -- groups ----------------------------------------------------------------------------------------------------

    def group(self, ranks: Sequence[int], *, purpose: str = "") -> dist.ProcessGroup:
        """Return a group of some ranks.  Collective: every rank of the world calls it in the same order.

        purpose: groups of different purposes are separate, so that operations in one do not wait for those in another.
        """
        key = tuple(sorted(ranks))
        if len(key) == self.size and not purpose and shared_group.backend == self._backend:
            group = shared_group.group  # of all worlds of this process, and not closed by this one
        else:
            group = self._own_group(purpose, key, self._backend)
        if self.carrier is not None and self.rank in key and (purpose, key) not in self._opened:
            self._opened.add((purpose, key))
            self.carrier.open_group(group)
        return group

    def _own_group(self, purpose: str, ranks: tuple[int, ...], backend: str) -> dist.ProcessGroup:
        if (purpose, ranks) not in self._groups:
            with waiting():
                made = dist.new_group(list(ranks), timeout=UNWATCHED, backend=backend)
            self._groups[purpose, ranks] = made
        return self._groups[purpose, ranks]

    def all_reduce(
        self,
        tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        to: int | None = None,
    ) -> None:
        """Sum a tensor, or apply another op, over the ranks of a group, in place.  Collective over that group.

        to: the only rank that gets the result; it is then undefined on the others."""
        with _on_host(tensor, staged=self.staged) as data:
            if to is None:
                dist.all_reduce(data, op=op, group=group)
            else:
                dist.reduce(data, to, op=op, group=group)

    def give_group(self, tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> None:
        """Copy a tensor of rank `source` to all ranks of a group, in place.  Collective over that group."""
        with _on_host(tensor, staged=self.staged) as data:
            dist.broadcast(data, source, group=group)

    # -- failures --------------------------------------------------------------------------------------------------

    def known(self, error: E) -> E:
        """Mark an error that all ranks raise, so that none has to be told, and return it."""
        self._known = error
        if isinstance(error, AutopartError):
            error.everywhere = True
        return error

    def is_known(self, error: BaseException) -> bool:
        """Whether all ranks raise this error."""
        return error is self._known

    def end(self, error: BaseException) -> BaseException:
        """Return what to raise for an error of this rank: the error itself if all ranks raise it, else what failed
        first, after telling all ranks (`fail`)."""
        if self.size == 1 or self.is_known(error):
            return error
        monitor = shared_group.monitor
        first = error if monitor is None or self._lease is None else monitor.explained(error)
        self.fail(first)
        return first

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks why this one failed, and break the groups in which they wait; nothing can be sent then.

        Not collective.  Takes milliseconds, or 5 s if the store of the launch does not answer: the others should know
        why before their connections end."""
        if self._lease is None or not shared_group.holds(self._lease) or self.size == 1:
            return
        if shared_group.monitor is not None:
            shared_group.monitor.tell(error)
        shared_group.break_all()

    # -- small messages --------------------------------------------------------------------------------------------

    def gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every rank, by rank; each gives the same count.  Collective; O(ranks)."""
        told = [*numbers, _stop_asked(self.rank, stepped=self.stepped)]
        rows = [told]
        if self.size > 1:
            everyone = torch.empty(self.size, len(told), dtype=torch.float64)
            with self._waiting:
                dist.all_gather(list(everyone), torch.tensor(told, dtype=torch.float64), group=shared_group.group)
            rows = everyone.tolist()
        self._note_stop(max([row.pop() for row in rows]))
        return rows

    def reduce_numbers(self, largest: Sequence[float], summed: Sequence[float] = ()) -> list[float]:
        """Return the largest of each of these numbers over all ranks, then the sums of others, equal on all ranks to
        the last bit; each rank gives as many.  Collective."""
        return self.begin_reducing(largest, summed)()

    def begin_reducing(self, largest: Sequence[float], summed: Sequence[float] = ()) -> Callable[[], list[float]]:
        """Send numbers for `reduce_numbers`, without waiting; return a function that waits for its result.  Ranks begin
        these in one order, and wait for them in the same.  Collective; O(log(ranks)) messages (`reduction`)."""
        told = [_stop_asked(self.rank, stepped=self.stepped), *largest, *summed]
        found: Callable[[], list[float]] = lambda: told  # noqa: E731
        if self.size > 1:
            _require_group()
            mine, count, group = torch.tensor(told, dtype=torch.float64), 1 + len(largest), shared_group.group
            if self.size > TOGETHER and self._tree is None:
                self._tree = Tree(group)
            found = begin_together(group, mine, count) if self._tree is None else self._tree.begin(mine, count)

        def reduced() -> list[float]:
            with self._waiting:
                asked, *rest = found()
            self._note_stop(asked)
            return rest

        return reduced

    def _note_stop(self, asked: float) -> None:
        """Note whether some rank was asked to stop.  asked: the largest number of all ranks (`_stop_asked`)."""
        if not asked or self.stop_requested:
            return
        self.stop_requested = True
        if self.rank == 0:
            number = -(-int(asked) >> 32)
            why = f"rank {(number << 32) - int(asked)} got {signal.Signals(number).name}" if number else ""
            then = " (a second SIGTERM ends a process now)" if number else ""
            why = why or "other ranks wait to join"
            _log.warning("%s: pipe.stop_requested is True on all ranks; save and end the run%s", why, then)

    def gather_objects(self, content: T) -> list[T]:
        """Return what every rank gives, pickled on its way, by rank.  Collective."""
        found = [content] * self.size
        if self.size > 1:
            with self._waiting:
                dist.all_gather_object(found, content, group=shared_group.group)
        return found

    def broadcast_object(self, content: Any, source: int = 0) -> Any:
        """Return `content` of rank `source` on every rank.  Collective."""
        found = [content if self.rank == source else None]
        if self.size > 1:
            with self._waiting:
                dist.broadcast_object_list(found, source, group=shared_group.group)
        return found[0]

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Copy a CPU tensor of rank `source` to every rank, in place.  Collective."""
        if self.size > 1:
            with self._waiting:
                dist.broadcast(tensor, source, group=shared_group.group)
        return tensor

    def begin_moving(self, tensor: torch.Tensor, source: int, target: int) -> Callable[[], None]:
        """Begin to copy a contiguous CPU tensor of rank `source` to rank `target`, in place; return a function that
        waits for it.  Both call this, in one order of all that is sent between them; on other ranks it does nothing."""
        if source == target or self.rank not in (source, target):
            return lambda: None
        peer, begin = (target, dist.isend) if self.rank == source else (source, dist.irecv)
        work = begin(tensor, peer, group=shared_group.group)
        assert work is not None

        def finished() -> None:
            with waiting(peer):
                work.wait()

        return finished


def _require_group() -> None:
    """Raise RunError if the script has destroyed the group in which ranks exchange messages."""
    if not dist.is_initialized():
        raise RunError(
            "the process group was destroyed while the pipe is open",
            why="ranks exchange all messages in it",
            fix="leave torch.distributed.destroy_process_group() out: pipe.close() leaves the group",
        )


def _stop_asked(rank: int, *, stepped: bool) -> float:
    """Return whether this rank was asked to stop, and which it is, as one number: the largest of all ranks counts.

    0 if not, 0.5 so that others can join, else the signal and the rank, the lowest first."""
    if stop_signals.asked:
        return float((stop_signals.asked << 32) - rank)
    return 0.5 if stepped and current().asked else 0.0


def device_of(kind: str, rank: int) -> torch.device:
    """Return the device of this process, which becomes the current one."""
    name = DEVICE_KINDS[kind].device_type
    if name == "cpu":
        return torch.device(name)
    module = torch.get_device_module(name)
    device = torch.device(name, int(os.environ.get("LOCAL_RANK", rank)) % module.device_count())
    module.set_device(device)
    return device


@contextmanager
def _on_host(tensor: torch.Tensor, *, staged: bool) -> Iterator[torch.Tensor]:
    """Yield the tensor, or if it is staged a copy in host memory that is copied back afterwards."""
    if not staged or tensor.device.type == "cpu":
        yield tensor
        return
    data = tensor.cpu()
    yield data
    tensor.copy_(data)


def transport_of(kind: str, asked: str) -> str:
    """Return the transport for devices of this kind, resolving "auto".  Raises ClusterError for NCCL without CUDA
    devices."""
    if asked == NCCL and DEVICE_KINDS[kind].transport != NCCL:
        raise ClusterError("transport is nccl, and the cluster has no CUDA devices", fix='use transport="gloo"')
    if asked == AUTO:
        return DEVICE_KINDS[kind].transport
    return asked


def local_ranks(size: int) -> int:
    """Return the number of ranks on this host, if the launcher states it."""
    return min(size, int(os.environ.get("LOCAL_WORLD_SIZE", size)))


def require_devices(found: int, ranks: int, transport: str) -> None:
    """Raise ClusterError if `ranks` ranks cannot run on the `found` CUDA devices of a host."""
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
    """Raise ClusterError if the launcher started another number of processes than the plan needs."""
    if found != needed:
        raise ClusterError(
            f"the cluster has {needed} devices and the launcher started {found} processes",
            fix=torchrun_line(needed, local),
        )

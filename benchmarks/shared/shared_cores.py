"""A step of ranks that share cores, simulated from what each of their actions takes of a processor.

A rank is two threads: one plays its tasks in order, one carries its messages, those sent and those received, in the
order in which they come.  The threads of a pool share its cores evenly: n that run on c cores each go at the pace
min(1, c / n) (processor sharing; Kleinrock, Queueing Systems, vol. 2, section 4.4).  Assumed, and wrong where: a
system that shares cores takes turns of some milliseconds, and threads on one core slow each other's caches down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

_DONE = 1e-3  # nanoseconds left that are rounding


@dataclass(frozen=True)
class Task:
    """What a rank does next: it waits for messages, computes, and posts messages.

    ns: processor time.  waits: keys of messages.  posts: (key, rank) of messages; one to its own rank is there at once.
    """

    ns: float
    waits: tuple[Hashable, ...] = ()
    posts: tuple[tuple[Hashable, int], ...] = ()


@dataclass(frozen=True)
class Pool:
    """Ranks that share cores, and how many."""

    ranks: tuple[int, ...]
    cores: int = 1


@dataclass
class _Thread:
    """Jobs of a thread in order: what is left of each in nanoseconds, and what to do when it is over."""

    jobs: deque[tuple[float, Callable[[], None]]] = field(default_factory=deque)

    def run(self, ns: float) -> Callable[[], None] | None:
        """Work on the first job, and return what to do if it is over."""
        left, then = self.jobs.popleft()
        if left - ns <= _DONE:
            return then
        self.jobs.appendleft((left - ns, then))
        return None


def shared_ns(ranks: Sequence[Sequence[Task]], carrying_ns: Sequence[float], pools: Sequence[Pool]) -> float:
    """Return the nanoseconds until all ranks have done their tasks.

    carrying_ns: of each rank, processor time for its end of each message.  Raises ValueError for a rank that waits for
    ever.  O(tasks * threads).
    """
    return _Step(ranks, carrying_ns, pools).run()


class _Step:
    """One run.  here: keys of messages by rank that have arrived.  busy: ranks that have begun their first task."""

    def __init__(self, ranks: Sequence[Sequence[Task]], carrying_ns: Sequence[float], pools: Sequence[Pool]) -> None:
        self._tasks = [deque(own) for own in ranks]
        self._carrying_ns = carrying_ns
        self._computing, self._carriers = [_Thread() for _ in ranks], [_Thread() for _ in ranks]
        both = list(zip(self._computing, self._carriers, strict=True))
        self._pools = [([thread for rank in pool.ranks for thread in both[rank]], pool.cores) for pool in pools]
        self._here: list[set[Hashable]] = [set() for _ in ranks]
        self._busy: set[int] = set()

    def run(self) -> float:
        now = 0.0
        for rank in range(len(self._tasks)):
            self._go_on(rank)
        while True:
            running = []
            for threads, cores in self._pools:
                active = [thread for thread in threads if thread.jobs]
                running += [(thread, min(1.0, cores / len(active))) for thread in active]
            if not running:
                break
            taken = min(thread.jobs[0][0] / pace for thread, pace in running)
            now += taken
            for then in [thread.run(taken * pace) for thread, pace in running]:
                if then is not None:
                    then()
        for rank, left in enumerate(self._tasks):
            if left:
                raise ValueError(f"rank {rank} waits for ever for {sorted(map(str, left[0].waits))}")
        return now

    def _go_on(self, rank: int) -> None:
        """Begin the next task of a rank, unless it computes or waits."""
        tasks = self._tasks[rank]
        if tasks and rank not in self._busy and self._here[rank].issuperset(tasks[0].waits):
            self._busy.add(rank)
            self._computing[rank].jobs.append((tasks[0].ns, lambda: self._finish(rank)))

    def _finish(self, rank: int) -> None:
        self._busy.remove(rank)
        for key, target in self._tasks[rank].popleft().posts:
            if target == rank:
                self._here[rank].add(key)
            else:
                self._carriers[rank].jobs.append((self._carrying_ns[rank], self._to(target, key)))
        self._go_on(rank)

    def _to(self, rank: int, key: Hashable) -> Callable[[], None]:
        """Return what happens when a message has left: the receiver carries it, and then it is there."""

        def arrive() -> None:
            self._here[rank].add(key)
            self._go_on(rank)

        return lambda: self._carriers[rank].jobs.append((self._carrying_ns[rank], arrive))

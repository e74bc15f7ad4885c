"""Which devices of an elastic launch have ranks: those that were lost come back after a while.

Pure bookkeeping; times are those of time.monotonic(), in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from autopart.launcher import Living

LONGEST_S = 3600.0
"""Longest time in which a device that is lost again and again is left alone."""


@dataclass
class Members:
    """The devices of a cluster of `of` devices, and which of them may have a rank.

    least, most: the smallest and the largest number of ranks of the run.  rejoin_s: seconds after which a lost device
    is used again; they double each time that it is lost within ten times that time of coming back.  inf: never.
    """

    of: int
    least: int
    most: int
    rejoin_s: float
    back_at: dict[int, float] = field(default_factory=dict)
    """When a device that was lost comes back."""
    _waited_s: dict[int, float] = field(default_factory=dict)

    def living(self, now: float) -> Living:
        """Return the devices that have ranks in a generation that starts now: the first `most` that are there."""
        there = [device for device in range(self.of) if self.back_at.get(device, -math.inf) <= now]
        return Living(tuple(there[: self.most]), self.of)

    def lose(self, devices: Collection[int], now: float) -> bool:
        """Leave devices alone for a while; return False, and forget all losses, if too few are left then."""
        for device in devices:
            before = self._waited_s.get(device, 0.0)
            again = before and now - self.back_at.get(device, -math.inf) < 10 * before
            self._waited_s[device] = min(LONGEST_S, 2 * before) if again else self.rejoin_s
            self.back_at[device] = now + self._waited_s[device]
        if len(self.living(now).devices) >= self.least:
            return True
        self.back_at.clear()
        return False

    def join_at(self, living: Living) -> float:
        """Return when a generation on these devices could have more ranks; inf if never."""
        if len(living.devices) == self.most:
            return math.inf
        absent = (at for device, at in self.back_at.items() if device not in living.devices)
        return min(absent, default=math.inf)

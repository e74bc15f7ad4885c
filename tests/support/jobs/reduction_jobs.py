"""Exchanges of numbers, along the tree as among many ranks, and together as among few."""

from __future__ import annotations

import os
from unittest import mock

from autopart.runtime.group import world as worlds
from autopart.runtime.group.world import World


def tree_and_together() -> tuple[list[list[float]], list[list[float]]]:
    """Return the results of three exchanges, of which the second begins before the first is waited for, both ways."""
    found = []
    for together in (0, 32):
        with mock.patch.object(worlds, "TOGETHER", together):
            world = World("cpu", int(os.environ["WORLD_SIZE"]))
            mine = [float(world.rank), 7.0 - world.rank], [float(world.rank)]
            begun = [world.begin_reducing(*mine), world.begin_reducing(*mine)]
            found.append([*(settle() for settle in begun), world.reduce_numbers(*mine)])
            world.close()
    return found[0], found[1]

"""Jobs of the tests of messages that may block, which run on every rank."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist

from autopart.ir.program import Program
from autopart.passes.program.messages import with_posting
from autopart.passes.program.nccl_rules import SENT, Collective, Post
from autopart.runtime.group.world import World
from support.jobs.engine_jobs import step
from support.languages.nccl_programs import CASES, FINE, HANG, WRONG
from support.oracles.fake_nccl import NAME, Communicators, Hang, Wrong

BRIEF_S = 1.0
"""Timeout in seconds for programs that either finish or hang immediately."""


def played(name: str) -> str:
    """Run this rank's part of a program and return whether it finished, hung or was wrong."""
    case = CASES[name]
    world = World("cpu", 4)
    group = dist.new_group(list(range(world.size)))  # a hanging rank breaks this group
    assert isinstance(group, dist.ProcessGroup)
    communicators = Communicators(group, world.rank, BRIEF_S)
    if case.connected:
        for comm, members in case.members.items():
            communicators.used_before(comm, members)
    found = FINE
    try:
        for item in case.queues[world.rank] if world.rank < len(case.queues) else ():
            if isinstance(item, Post):
                messages = [
                    (end.way == SENT, end.peer, str(end.message), torch.zeros(8, dtype=torch.uint8))
                    for end in item.ends
                ]
                communicators.post(str(item.comm), case.members[str(item.comm)], messages)
            elif isinstance(item, Collective):
                communicators.sum(str(item.comm), case.members[str(item.comm)])
    except Hang:
        found = HANG
    except Wrong:
        found = WRONG
    everyone = world.gather_objects(found)
    with suppress(ValueError, AssertionError):
        dist.destroy_process_group(group)
    world.close()
    return found if WRONG not in everyone else WRONG


def all_receives_first(program: Program) -> Program:
    """Return the program with every receive posted before its first action."""
    posted = []
    for own in with_posting(program).posting:
        receives = [replace(exchange, after=0, sends=()) for exchange in own if exchange.receives]
        posted.append((*receives, *(replace(exchange, receives=()) for exchange in own if exchange.sends)))
    return replace(program, posting=tuple(posted))


def receives_first() -> None:
    """Take a step of two stages in which every receive is posted before the first action."""
    with (
        mock.patch("support.jobs.engine_jobs.with_posting", all_receives_first),
        mock.patch("support.oracles.fake_nccl.DEADLINE_S", BRIEF_S),
    ):
        step((0, 1, 0, 1), "in_loops", 2, NAME)

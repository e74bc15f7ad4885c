"""Programs of every kind of schedule, and random changes that break them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from random import Random

from autopart.ir.actions import Action
from autopart.ir.plan import Decision, Stage
from autopart.ir.program import Program
from autopart.ir.shares import Policy, division
from autopart.passes.program.routing import route
from autopart.passes.program.stream import stream_program
from support.languages.graphs import graph
from support.languages.programs import SKIPS

ORDER = (
    "0F0 3F0 3I0 0F1 0I0 0W0 3F1 3B1 3W0 0B1",
    "1F0 2F0 1F1 2B0 2F1 1I0 2I1 2W1 1W0 1B1",
)
"""A hand-made order of a V of four stages that mixes whole backwards and split ones."""

CASES: dict[str, tuple[str, tuple[tuple[int, ...], ...], int, tuple[str, ...]]] = {
    "zb-h1": ("zb-h1", ((0,), (1,), (2,), (3,)), 3, ()),
    "zb-h1, replicas": ("zb-h1", ((0, 1), (2,), (3,), (4, 5)), 2, ()),
    "zb-h2": ("zb-h2", ((0,), (1,), (2,), (3,)), 3, ()),
    "zb-v": ("zb-v", ((0,), (1,), (1,), (0,)), 3, ()),
    "zb-v, replicas": ("zb-v", ((0, 1), (2, 3), (2, 3), (0, 1)), 2, ()),
    "interleaved": ("interleaved", ((0,), (1,), (0,), (1,)), 3, ()),
    "gpipe on one rank": ("gpipe", ((0,), (0,), (0,), (0,)), 2, ()),
    "searched": ("searched", ((0,), (1,), (1,), (0,)), 2, ORDER),
    "1f1b, groups": ("1f1b", ((0, 1), (2, 3), (4, 5), (6, 7)), 3, ()),
    "zb-h1, groups of replicas": ("zb-h1", ((0, 1, 2, 3), (4, 5), (6, 7), (8, 9, 10, 11)), 2, ()),
    "zb-v, groups": ("zb-v", ((0, 1), (2, 3), (2, 3), (0, 1)), 3, ()),
    "interleaved, groups": ("interleaved", ((0, 1, 2), (3, 4, 5), (0, 1, 2), (3, 4, 5)), 3, ()),
    "gpipe, groups on other ranks": ("gpipe", ((0, 1), (3, 2), (4, 5), (7, 6)), 2, ()),
}
GROUPS = tuple(name for name in CASES if "groups" in name)
"""Those whose ranks compute together, two or three."""

STREAMS: dict[str, tuple[str, tuple[int, ...], Policy, int]] = {
    "pipedream": ("pipedream", (1, 1, 1, 1), "split", 1),
    "pipedream, batches in parts": ("pipedream", (1, 1, 1), "split", 2),
    "pipedream, replicas": ("pipedream", (2, 1, 1), "split", 1),
    "pipedream, replicas in turn": ("pipedream", (2, 1, 1), "turn", 1),
    "pipedream, split backwards": ("pipedream", (1, 1, 1), "split", 1),
    "pipedream-2bw": ("pipedream-2bw", (1, 1, 1, 1), "split", 3),
    "pipedream-2bw, replicas in turn": ("pipedream-2bw", (1, 2), "turn", 2),
}
"""Schedule, replicas of each stage, how they divide, and micro-batches of a batch; four batches each."""
ALL = [*CASES, *STREAMS]
"""Names of the programs that `made` makes."""


def streamed(name: str) -> tuple[Program, str]:
    """Return a program of asynchronous training by name, and its schedule."""
    schedule, replicas, policy, micros = STREAMS[name]
    stages, world = [], 0
    for number, count in enumerate(replicas):
        ops = "abcd"[number : number + 1] if number + 1 < len(replicas) else "abcd"[number:]
        ranks = tuple(range(world, world := world + count))
        stages.append(Stage(tuple(ops), ranks, policy=policy if count > 1 else "split"))
    made = stream_program(Decision(world, tuple(stages), (2,) * micros, schedule), graph(SKIPS), 4)
    if name.endswith("split backwards"):
        made = replace(made, order=tuple(split(made.order)))
    return made, schedule


def split(order: Iterable[Action]) -> Iterator[Action]:
    """Every second backward in two parts, one behind the other."""
    for action in order:
        if action.kind == "B" and action.micro % 2:
            yield action._replace(kind="I")
            yield action._replace(kind="W")
        else:
            yield action


def made(name: str) -> tuple[Program, str]:
    """Return a program by name, and its schedule."""
    if name in STREAMS:
        return streamed(name)
    schedule, ranks, micros, order = CASES[name]
    world = 1 + max(rank for own in ranks for rank in own)
    shards = (3 if name == "interleaved, groups" else 2) if name in GROUPS else 1
    stages = tuple(Stage((op,), own, shards=shards) for op, own in zip("abcd", ranks, strict=True))
    decision = Decision(world, stages, (1,) * micros, schedule, int(name in GROUPS), order=order)
    return route(decision, graph(SKIPS)), schedule


def mutated(program: Program, draw: Random) -> Program:
    """One to three changes: places, kinds, micro-batches, stages and peers; something left out, or twice.  Of a program
    with groups, rarely, the groups of a stage: others, or none."""
    order, kinds = list(program.order), list("FBIWU" if program.rhythm else "FBIW")
    if program.division(0).shards > 1 and draw.random() < 0.1:
        divided, stage = list(program.divisions), draw.randrange(len(program.divisions))
        ranks = len(program.stage_ranks[stage])
        shards = draw.choice([n for n in range(1, ranks + 1) if ranks % n == 0])
        divided[stage] = division(ranks // shards, shards=shards)
        return replace(program, divisions=tuple(divided))
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        one, two = draw.randrange(len(order)), draw.randrange(len(order))
        action = order[one]
        match draw.choice(["swap", "near", "near", "move", "micro", "stage", "peer", "kind", "drop", "double"]):
            case "swap":
                order[one], order[two] = order[two], order[one]
            case "near" if one:
                order[one - 1], order[one] = order[one], order[one - 1]
            case "move":
                order.insert(two, order.pop(one))
            case "micro":
                order[one] = action._replace(slot=action.slot._replace(micro=draw.randint(-1, program.micros)))
            case "stage":
                order[one] = action._replace(slot=action.slot.on(draw.randint(0, len(program.stage_ranks))))
            case "peer" if action.peer is not None:
                order[one] = action._replace(peer=draw.randrange(len(program.stage_ranks)))
            case "kind":
                order[one] = action._replace(kind=draw.choice({"SF": ["SB"], "SB": ["SF"]}.get(action.kind, kinds)))
            case "drop":
                order.pop(one)
            case "double":
                order.insert(two, action)
    return replace(program, order=tuple(order))

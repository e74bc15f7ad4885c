"""The built-in schedules: the orders of computes that have a name.

gpipe, 2 stages, 3 micro-batches        1f1b
0F0 0F1 0F2 0B0 0B1 0B2                 0F0 0F1 0B0 0F2 0B1 0B2
1F0 1F1 1F2 1B0 1B1 1B2                 1F0 1B0 1F1 1B1 1F2 1B2

Sequences may be cut into slices (TeraPipe, ICML 2021, for fill-drain; Seq1F1B, NAACL 2025, for 1F1B).  A slice needs
the keys and values of the slices before it, and gets gradients from those after it, so the slices of a micro-batch go
back last in, first out; micro-batches go back first in, first out, as ever.  A stage holds s - 1 slices more than it
would hold micro-batches, each an s-th as large: (s + p - 1) / s sequences under 1F1B instead of p.

1f1b, 2 stages, 2 micro-batches of 2 slices
0F0 0F0.1 0F1 0B0.1 0F1.1 0B0 0B1.1 0B1
1F0 1F0.1 1B0.1 1F1 1B0 1F1.1 1B1.1 1B1

Replicas that take micro-batches in turn are workers of their own.  A pipeline then holds as many micro-batches as one
that has a stage for each of these replicas, and each replica its part of those of its stage: of r replicas, with R of
them from this stage to the end, ceil(R / r) under 1F1B (PipeDream, SOSP 2019, section 3.2).  With slices it holds as
many micro-batches, slice by slice.

Zero-bubble schedules (Qi et al., ICLR 2024) run a backward in two parts: I, for which other stages wait, and W, which
fills what would be idle.  Under zb-h1 stage s runs W for the I that came s before, so that it holds p micro-batches
like the first stage of 1F1B; with p stages the bubble is (p - 1) (F + I - W) instead of (p - 1) (F + I + W).

zb-h1, 2 stages, 3 micro-batches
0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from autopart.ir.actions import BACKWARD, COMPUTES, FORWARD
from autopart.ir.errors import ProgramError
from autopart.passes.program.orders import LOOP, ONE, Limit, Schedule, Shape, Turn, Turns, V, placed, turns_of

_F, _B = COMPUTES[FORWARD], COMPUTES[BACKWARD]
_I, _W = "I", "W"

SEARCHED = "searched"
"""The schedule whose order is part of the plan (`Decision.order`)."""


# ---- one stage on each worker ----------------------------------------------------------------------------------------


def _all(stage: int, stages: int, micros: int) -> int:
    """GPipe (NeurIPS 2019, section 2.3)."""
    return micros


def _depth(stage: int, stages: int, micros: int) -> int:
    """1F1B (DAPPLE, PPoPP 2021, section 3.2; policy PA), which is PipeDream's order too (SOSP 2019)."""
    return min(micros, stages - stage)


def _twice_the_depth(stage: int, stages: int, micros: int) -> int:
    """1F1B whose longer warm-up hides slow messages (DAPPLE, section 3.3, policy PB)."""
    return min(micros, 2 * (stages - stage) - 1)


def _stages(stage: int, stages: int, micros: int) -> int:
    """ZB-H1 (Qi et al., ICLR 2024, section 2.1): as much as the first stage of 1F1B, on all."""
    return min(micros, stages)


def _almost_twice_the_stages(stage: int, stages: int, micros: int) -> int:
    """ZB-H2 (Qi et al., ICLR 2024, section 2.2): without a bubble where F, I and W take equal times."""
    return min(micros, 2 * stages - 1)


def ahead_of(limit: Limit, stage: int, shape: Shape) -> int:
    """Return the slots whose forward a rank of a stage runs before its first backward, at most.

    limit: the same for a pipeline of whole micro-batches without replicas in turn.
    """
    if shape.alternates:
        held, own = limit(0, sum(shape.in_turn[stage:]), shape.micros), shape.in_turn[stage]
        return shape.slices * min(-(-shape.micros // own), -(-held // own))
    units = shape.micros * shape.slices
    return min(units, limit(stage, shape.stages, units) + shape.slices - 1)


def _units(micros: Iterable[int], slices: int) -> tuple[list[int], list[int]]:
    """Return the units of these micro-batches in the order of their forwards, and in that of their backwards."""
    forward = [micro * slices + piece for micro in micros for piece in range(slices)]
    backward = [unit - piece + (slices - 1 - piece) for unit in forward for piece in (unit % slices,)]
    return forward, backward


def _alternating(forwards: list[Turn], backwards: list[list[Turn]], ahead: int, units: int = 1) -> tuple[Turn, ...]:
    """Return the first forwards, then as many backwards as forwards in turn, then the other backwards.

    units: that follow each other.  ahead: a multiple of it.
    """
    ahead = min(ahead, len(forwards))
    steady: list[Turn] = []
    for at in range(0, len(forwards) - ahead, units):
        steady += [turn for back in backwards[at : at + units] for turn in back]
        steady += forwards[ahead + at : ahead + at + units]
    return (*forwards[:ahead], *steady, *[turn for back in backwards[len(forwards) - ahead :] for turn in back])


def _one_stage(name: str, limit: Limit, each: int | None = None) -> Turns:
    """Return an order in which a backward runs as soon as the replica holds as many slots as it may.

    each: None for whole backwards; else W follows behind I after a delay, `each` times the stages before this one, of
    which replicas in turn count as stages (see the head of this module).
    """

    def turns(shape: Shape) -> Iterator[tuple[Turn, ...]]:
        _need_one_stage(name, shape)
        # The next micro-batch of a replica in turn is several behind this one.  Earlier stages send its first slice
        # only when this one is back whole, so between its slices it would be waited for without end.
        units = shape.slices if shape.alternates else 1
        for stage, replicas in enumerate(shape.replicas):
            for replica in range(replicas):
                forward, backward = _units(range(replica, shape.micros, replicas), shape.slices)
                forwards = [(_F, stage, unit) for unit in forward]
                backwards = [[(_B if each is None else _I, stage, unit)] for unit in backward]
                if each is not None:
                    delay = each * sum(shape.replicas[:stage]) // replicas
                    for place, unit in enumerate(backward):
                        backwards[min(place + delay, len(backward) - 1)].append((_W, stage, unit))
                yield _alternating(forwards, backwards, ahead_of(limit, stage, shape), units)

    return turns


def _need_one_stage(name: str, shape: Shape) -> None:
    if shape.homes:
        raise ProgramError(
            f"schedule {name} has no order for several stages on a worker",
            fix="use gpipe, interleaved, zb-v or searched, or one stage on each rank",
        )


def _fill_drain(shape: Shape) -> Iterator[tuple[Turn, ...]]:
    """Yield GPipe's order; with several stages on a worker it is breadth-first (Lamy-Poirier, MLSys 2023)."""
    if not shape.homes:
        yield from _one_stage("gpipe", _all)(shape)
        return
    _need_no_turns("gpipe", shape)
    forward, backward = _units(range(shape.micros), shape.slices)
    for stages in shape.workers:
        yield (
            *[(_F, stage, unit) for stage in stages for unit in forward],
            *[(_B, stage, unit) for stage in reversed(stages) for unit in backward],
        )


def _need_no_turns(name: str, shape: Shape) -> None:
    if shape.alternates:
        raise ProgramError(
            f"schedule {name} has no order for replicas that take micro-batches in turn beside other stages",
            fix='use replica_policy="split", or one stage on each rank',
        )


# ---- several stages on a worker --------------------------------------------------------------------------------------


def _interleaved(shape: Shape) -> Iterator[tuple[Turn, ...]]:
    """Yield Megatron-LM's interleaved 1F1B (Narayanan et al., SC 2021, section 2.2); of one stage each, 1F1B.

    Micro-batches go through a worker's stages in groups of as many as there are workers.  Megatron needs full groups;
    where the numbers do not divide, groups are larger here: a smaller one could wait for itself.  With slices a group
    has as many slices, in whole micro-batches.
    """
    if not shape.homes:
        yield from _one_stage("interleaved", _depth)(shape)
        return
    _need_no_turns("interleaved", shape)
    workers = shape.workers
    _need_placement("interleaved", LOOP, shape)
    slices, least = shape.slices, -(-len(workers) // shape.slices)
    groups = [_units(micros, slices) for micros in _groups(shape.micros, least)]
    first_group, rounds = len(groups[0][0]), len(workers[0])
    for worker, stages in enumerate(workers):
        forwards = [(_F, stage, unit) for forward, _ in groups for stage in stages for unit in forward]
        backwards = [[(_B, stage, unit)] for _, backward in groups for stage in reversed(stages) for unit in backward]
        warm_up = (rounds - 1) * first_group + 2 * (len(workers) - 1 - worker) + slices
        yield _alternating(forwards, backwards, warm_up)


def _groups(micros: int, least: int) -> list[range]:
    """Return the micro-batches in as many groups of at least this many as there can be, larger ones first."""
    count = max(1, micros // least)
    ends = [-(-micros * number // count) for number in range(count + 1)]
    return [range(first, end) for first, end in pairwise(ends)]


def _need_placement(name: str, placement: str, shape: Shape) -> None:
    workers = shape.workers
    if shape.homes != placed(placement, shape.stages, len(workers)) or len({*map(len, workers)}) > 1:
        raise ProgramError(
            f"schedule {name} has no order for these stages on these workers",
            where=f"stages of each worker: {', '.join(str(list(own)) for own in workers)}",
            why=f"every worker needs as many stages, placed {'in a loop' if placement == LOOP else 'as a V'}",
            fix=f"place them so, or use {SEARCHED!r}",
        )


def _zb_v(shape: Shape) -> Iterator[tuple[Turn, ...]]:
    """Yield ZB-V (Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024; appendix of ICLR 2024).

    Two stages a worker as a V; of one stage each it is ZB-H1.  The phases are those of
    `torch.distributed.pipelining.ScheduleZBVZeroBubble`: made for at least 2 p - 1 micro-batches, of which those that
    do not exist are left out.
    """
    if not shape.homes:
        yield from _one_stage("zb-v", _depth, 1)(shape)
        return
    _need_no_turns("zb-v", shape)
    _need_placement("zb-v", V, shape)
    workers = shape.workers
    if len(workers[0]) != 2:
        raise ProgramError(
            "schedule zb-v runs two stages on each worker",
            why=f"there are {len(workers[0])}",
            fix=f"use 2, or {SEARCHED!r}",
        )
    for worker, (first, second) in enumerate(workers):
        turns = _v_turns(worker, len(workers), first, second, shape.micros)
        yield tuple([turn for turn in turns if turn[2] < shape.micros])


def _v_turns(worker: int, workers: int, first: int, second: int, micros: int) -> Iterator[Turn]:
    """Yield the computes of one worker of ZB-V.  first, second: its stages."""
    micros = max(micros, 2 * workers - 1)
    done = dict.fromkeys([(kind, stage) for kind in (_F, _I, _W) for stage in (first, second)], 0)

    def play(*what: tuple[str, int]) -> Iterator[Turn]:
        for kind, stage in what:
            yield kind, stage, done[kind, stage]
            done[kind, stage] += 1

    whole = [[(_I, stage), (_W, stage)] for stage in (first, second)]
    for _ in range(2 * (workers - worker) - 1):
        yield from play((_F, first))
    for _ in range(worker):
        yield from play((_F, second), (_F, first))
    for _ in range(workers - worker):
        yield from play((_F, second), *whole[1])
    while done[_F, second] < done[_F, first] or done[_F, first] < micros:
        if done[_F, first] < micros:
            yield from play((_F, first))
        yield from play(*whole[0], (_F, second), *whole[1])
    for _ in range(worker):
        yield from play((_I, first), (_I, second))
    for _ in range(workers - worker):
        yield from play((_I, first), (_W, first))
    for stage in (second, first):
        while done[_W, stage] < done[_I, stage]:
            yield from play((_W, stage))


def _fixed(shape: Shape) -> Iterator[tuple[Turn, ...]]:
    """Yield the order that the plan fixes."""
    if not shape.order:
        raise ProgramError(
            f"schedule {SEARCHED} needs an order", why="the plan has none", fix="make the plan again, or add one"
        )
    yield from turns_of(shape.order, shape.slices)


STASHED, DELAYED = "pipedream", "pipedream-2bw"
"""PipeDream with weight stashing (Harlap et al., SOSP 2019, section 3.3), and with two versions of the weights
(Narayanan et al., ICML 2021)."""


def _built_in(
    name: str,
    turns: Turns,
    limit: Limit | None = None,
    warm_up: int = 0,
    *,
    synchronous: bool = True,
    placement: str = ONE,
    splits: bool = False,
    sliced: bool = True,
) -> Schedule:
    def order(stages: int, micros: int) -> list[tuple[Turn, ...]]:
        return list(turns(Shape(stages, micros)))

    return Schedule(name, order, synchronous, limit, warm_up, placement, splits, sliced, turns)


BUILT_IN = (
    _built_in("1f1b", _one_stage("1f1b", _depth), _depth, 1),
    _built_in("1f1b-deep", _one_stage("1f1b-deep", _twice_the_depth), _twice_the_depth, 2),
    _built_in("gpipe", _fill_drain, _all, 1),
    _built_in(STASHED, _one_stage(STASHED, _depth), _depth, 1, synchronous=False, sliced=False),
    _built_in(DELAYED, _one_stage(DELAYED, _depth), _depth, 1, synchronous=False, sliced=False),
    _built_in("interleaved", _interleaved, placement=LOOP),
    _built_in("zb-h1", _one_stage("zb-h1", _depth, 1), _stages, splits=True),
    _built_in("zb-h2", _one_stage("zb-h2", _twice_the_depth, 2), _almost_twice_the_stages, splits=True),
    _built_in("zb-v", _zb_v, placement=V, splits=True, sliced=False),
    _built_in(SEARCHED, _fixed, splits=True),
)
FAMILY = ("1f1b", "1f1b-deep", "gpipe")
"""The family of 1F1B: one stage on each worker, whole backwards, and the optimizer step behind all of them."""

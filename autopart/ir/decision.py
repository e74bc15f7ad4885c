"""Decisions: which ops run on which ranks, in which micro-batches, under which schedule; and their check."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

from autopart.ir.actions import COMPUTE, parse_action
from autopart.ir.errors import PlanError, ProgramError, printable, shortened
from autopart.ir.graph import Graph, module_range
from autopart.ir.program import BUCKET_BYTES, MAX_BUCKET_BYTES
from autopart.ir.shares import Division, Policy, copies_of, division, division_problems

AGAIN = "make the plan again: autopart.plan(model, cluster, sample=...)"
"""How to fix a plan that does not fit."""

Problem = tuple[str, str]
"""(path of a field, what is wrong there)."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: the captured ops it runs, in captured order, and the ranks that run it.

    Ops that depend on constants or inputs alone may be in several stages; every other op is in one.  Several ranks are
    replicas: each gets a share of the rows of every micro-batch, in the order of `ranks`, equal or proportional to its
    number in `shares`.  Under the policy "turn" they get whole micro-batches instead, round robin (PipeDream, SOSP
    2019, section 3.2).  recompute: groups of ops of which only the inputs are kept; a group is computed again before
    its backward.  forward_only: whether it has no backward, since nothing on it learns, nor anything that it depends on
    (`Graph.learning_ops`).  whole_backward: whether its backward is one compute also where the schedule splits
    backwards: then nothing is kept from I to W, and what recomputation frees is not held again.  shards: ranks that
    compute parts of the same rows (tensor parallelism), next to each other in `ranks`; each so many are one replica.
    modules: the layers of its ops, for people: nothing depends on them.
    """

    ops: tuple[str, ...]
    ranks: tuple[int, ...]
    recompute: tuple[tuple[str, ...], ...] = ()
    shares: tuple[int, ...] = ()
    policy: Policy = "split"
    forward_only: bool = False
    whole_backward: bool = False
    shards: int = 1
    modules: tuple[str, ...] = field(default=(), compare=False)

    @property
    def division(self) -> Division:
        """How the ranks of the stage divide micro-batches."""
        return division(self.replicas, self.shares, self.policy, self.shards)

    @property
    def replicas(self) -> int:
        """The number of replicas: of ranks, or of groups of ranks that compute together."""
        return len(self.ranks) // self.shards

    def shard_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that compute parts of the rows of one of them."""
        first = self.ranks.index(rank) // self.shards * self.shards
        return self.ranks[first : first + self.shards]


@dataclass(frozen=True, slots=True)
class Decision:
    """Everything that the planner decides; a program is made from it.

    world: number of ranks, of which some may idle.  micro_rows: rows of each micro-batch, in order; they differ by at
    most one.  zero: 1 if each replica of a stage keeps the optimizer state (and fp32 master weights) of only its share
    of the stage's parameters, and new values are gathered after the step (ZeRO, SC 2020); 0 if each keeps all of it.
    token_slices: lengths of the slices of every sequence, in order; (): sequences are whole.  bucket_bytes: size of the
    buckets in which replicas sum gradients, filled in the order in which the last backward releases them.  order: the
    computes of each worker in order, like "0F0 0F1 0I0 0W0", where the schedule leaves them to the plan ("searched");
    a worker is the ranks that run the same stages, counted in the order of their first stages.  (): the schedule has
    an order of its own.
    """

    world: int
    stages: tuple[Stage, ...]
    micro_rows: tuple[int, ...]
    schedule: str
    zero: int = 0
    token_slices: tuple[int, ...] = ()
    bucket_bytes: int = BUCKET_BYTES
    order: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return one line; the plan file has all of it."""
        what = [printable(module_range(stage.modules)) or f"{len(stage.ops)} ops" for stage in self.stages]
        ranks = [shortened(", ".join(map(str, stage.ranks)), 20) for stage in self.stages]
        stages = [f"{ops} on {where}" for ops, where in zip(what, ranks, strict=True)]
        shown = stages if len(stages) <= 6 else [*stages[:5], "...", stages[-1]]
        rows = shortened(" ".join(map(str, dict.fromkeys(self.micro_rows))), 20)
        count = len(self.micro_rows)
        cut = f"{count} micro-batch{'es' * (count > 1)} of {rows} row{'s' * (rows != '1')}"
        return f"{self.schedule}, {cut}, world {self.world}, {len(stages)} stages: {' | '.join(shown)}"

    def __repr__(self) -> str:
        return f"<Decision {self}>"

    @property
    def slices(self) -> int:
        """Number of slices of each micro-batch, at least 1."""
        return max(1, len(self.token_slices))

    @property
    def copies(self) -> int:
        """Number of equal pipelines side by side: the common divisor of all replica counts."""
        return copies_of([stage.division for stage in self.stages])

    @property
    def shards(self) -> int:
        """Ranks that compute parts of the same rows, the same on every stage."""
        return self.stages[0].shards

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank runs, ascending; () for a rank that idles."""
        return tuple(index for index, stage in enumerate(self.stages) if rank in stage.ranks)


def check_decision(decision: Decision, graph: Graph | None = None) -> Decision:
    """Check a decision, also against its graph when given; return it.

    1. It has no problem without the graph (`decision_problems`).
    2. Every op of the graph is in at least one stage, and the stages have no other ops; an op that is trained, draws
       random numbers or updates a buffer is in exactly one.
    3. No value flows from a stage to an earlier one.
    4. All uses of a buffer that is updated are in the stage that updates it, since each stage has its own copy.
    5. No op of a stage that is forward only has a backward.
    Raises PlanError.  O(reads).
    """
    refuse(decision_problems(decision))
    if graph is None:
        return decision
    where = stage_of_ops(decision, graph)
    have = [set(stage.ops) for stage in decision.stages]
    for op in graph.ops:
        if op.name not in where:
            raise PlanError(f"op {op.name} of the graph is in no stage", fix=AGAIN)
    _check_updates(graph, have)
    _check_forward_only(decision, graph)
    writer = graph.writer()
    for op in graph.ops:
        for s in [s for s, ops in enumerate(have) if op.name in ops]:
            for read in op.reads:
                source = writer.get(read)
                if source is not None and source not in have[s] and where[source] > s:
                    raise PlanError(
                        f"value {read} flows back from stage {where[source]} to stage {s}",
                        where=f"op {op.name} {op.module} {op.where}".strip(),
                    )
    return decision


def decision_problems(decision: Decision) -> Iterator[Problem]:
    """Yield everything that is wrong with a decision without its graph, as (path, message).

    The schedule has a name (`passes.program.schedules` checks whether it is known), sizes are positive, micro-batches
    differ by at most one row, ranks exist, no stage lists a rank or an op twice, recomputed ops are ops of the stage,
    each listed once, and a fixed order has each compute of the pipeline at most once, and no part of a backward that is
    whole (whether it has all and can end is proven of the program).
    """
    if decision.world < 1:
        yield "world", f"at least 1 rank is needed, not {decision.world}"
    if not decision.schedule:
        yield "schedule", "a schedule needs a name"
    if decision.zero not in (0, 1):
        yield "zero", f"optimizer state is shared (1) or not (0), not {decision.zero}"
    if not 1 <= decision.bucket_bytes <= MAX_BUCKET_BYTES:
        yield "bucket_bytes", f"a bucket holds 1 to {MAX_BUCKET_BYTES} bytes, not {decision.bucket_bytes}"
    if not decision.stages:
        yield "stages", "at least one stage is needed"
    yield from _size_problems(decision)
    yield from _rank_problems(decision)
    for s, stage in enumerate(decision.stages):
        yield from _op_problems(s, stage)
    yield from _order_problems(decision)


def _order_problems(decision: Decision) -> Iterator[Problem]:
    seen: set[str] = set()
    limits = len(decision.stages), len(decision.micro_rows), decision.slices
    for i, text in enumerate(decision.order):
        for word in text.split():
            wrong = _not_a_compute(word, limits) or _in_parts(word, decision)
            if wrong or word in seen:
                yield f"order[{i}]", wrong or f"{word} stands twice"
                break
            seen.add(word)


def _not_a_compute(word: str, limits: tuple[int, int, int]) -> str:
    """Return what is wrong with a word of an order; limits: numbers of stages, micro-batches and slices."""
    try:
        action = parse_action(word)
    except ProgramError:
        return f"{shortened(repr(word))} is not a compute, which looks like 2F0, 2B0, 2I0 or 2W0"
    if action.is_a.role != COMPUTE or str(action) != word:
        return f"{shortened(word)} is not a compute; messages and sums follow from the computes"
    if any(not number < limit for number, limit in zip(action.slot, limits, strict=True)):
        return f"{shortened(word)}: there are {limits[0]} stages, {limits[1]} micro-batches and {limits[2]} slices"
    return ""


def _in_parts(word: str, decision: Decision) -> str:
    """Return what is wrong with a compute of an order if it is a part of a backward that is whole."""
    action = parse_action(word)
    if not (action.is_a.part_of and decision.stages[action.stage].whole_backward):
        return ""
    return f"{word}: stage {action.stage} has whole backwards, which look like {action.stage}B{action.micro}"


def _size_problems(decision: Decision) -> Iterator[Problem]:
    if not decision.micro_rows:
        yield "micro_rows", "at least one micro-batch is needed"
    if len(decision.token_slices) == 1:
        yield "token_slices", "one slice is the whole sequence, which is []"
    for name, what in (("micro_rows", "row"), ("token_slices", "token")):
        for i, size in enumerate(getattr(decision, name)):
            if size < 1:
                yield f"{name}[{i}]", f"at least 1 {what} is needed, not {size}"
    if decision.micro_rows and max(decision.micro_rows) - min(decision.micro_rows) > 1:
        yield "micro_rows", f"micro-batches differ by at most one row, not {shortened(str(decision.micro_rows), 100)}"


def _rank_problems(decision: Decision) -> Iterator[Problem]:
    for s, stage in enumerate(decision.stages):
        taken: set[int] = set()
        if not stage.ranks:
            yield f"stages[{s}].ranks", "a stage needs a rank"
        for i, rank in enumerate(stage.ranks):
            if not 0 <= rank < decision.world:
                yield f"stages[{s}].ranks[{i}]", f"rank {rank} is outside 0..{decision.world - 1}"
            elif rank in taken:
                yield f"stages[{s}].ranks[{i}]", f"rank {rank} appears twice in this stage"
            taken.add(rank)
        if stage.shards < 1 or len(stage.ranks) % stage.shards or stage.shards != decision.shards:
            yield f"stages[{s}].shards", f"{stage.shards}: it divides the ranks of each stage, and is equal on all"
        elif stage.shards > 1 and stage.policy == "turn":
            yield f"stages[{s}].policy", "ranks that compute together do not take turns"
        for name, message in division_problems(len(stage.ranks) // max(1, stage.shards), stage.shares, stage.policy):
            yield f"stages[{s}].{name}", message


def _op_problems(s: int, stage: Stage) -> Iterator[Problem]:
    seen: set[str] = set()
    for i, name in enumerate(stage.ops):
        if name in seen:
            yield f"stages[{s}].ops[{i}]", f"op {shortened(name)} appears twice in this stage"
        seen.add(name)
    again = [name for group in stage.recompute for name in group]
    if len(again) > len(set(again)) or not seen.issuperset(again):
        yield f"stages[{s}].recompute", "names an op twice, or one that is not in the stage"


def refuse(found: Iterator[Problem]) -> None:
    """Raise PlanError for the first problem, with the number of others."""
    first = next(found, None)
    if first is not None:
        path, message = first
        more = sum(1 for _ in found)
        raise PlanError(f"the plan is not valid: {message}", where=path, why=f"{more} more problems" if more else "")


def stage_of_ops(decision: Decision, graph: Graph) -> dict[str, int]:
    """Return the first stage of each op.

    Raises PlanError for an op that the graph does not have, and for one that must run once and is in several stages.
    """
    first: dict[str, int] = {}
    ops = graph.op_map()
    single = {v.name for v in graph.values if v.grad} | {value for _, value in graph.updates}
    learned = {p.name for p in graph.params if p.trainable} | {buffer for buffer, _ in graph.updates}
    for s, stage in enumerate(decision.stages):
        for name in stage.ops:
            op = ops.get(name)
            if op is None:
                raise PlanError(f"the plan names op {shortened(name)}, which the graph does not have", fix=AGAIN)
            if name in first and (op.random or not single.isdisjoint(op.writes) or not learned.isdisjoint(op.params)):
                raise PlanError(
                    f"op {name} is in stages {first[name]} and {s}",
                    where=f"{op.module} {op.where}".strip(),
                    why="an op that is trained, draws random numbers or updates a buffer must run once",
                )
            first.setdefault(name, s)
    return first


def _check_forward_only(decision: Decision, graph: Graph) -> None:
    marked = [s for s, stage in enumerate(decision.stages) if stage.forward_only]
    learning = graph.learning_ops() if marked else frozenset()
    for s in marked:
        first = next((name for name in decision.stages[s].ops if name in learning), None)
        if first is not None:
            op = graph.op_map()[first]
            raise PlanError(
                f"stage {s} is marked as forward only, and op {first} has a backward",
                where=f"{op.module} {op.where}".strip(),
                why="it uses a trainable parameter, or reads a value with a gradient",
                fix="set forward_only to false there",
            )


def _check_updates(graph: Graph, have: list[set[str]]) -> None:
    writer = graph.writer()
    for buffer, value in graph.updates:
        uses = {op.name for op in graph.ops if buffer in op.params} | {writer[value]}
        stages = [s for s, ops in enumerate(have) if not uses.isdisjoint(ops)]
        if len(stages) > 1:
            raise PlanError(
                f"buffer {buffer} is used in stages {', '.join(map(str, stages))} and updated in one of them",
                why="each stage has its own copy: another stage would read a stale one",
                fix=f"keep {', '.join(sorted(uses))} in one stage",
            )


def listed_runs(lengths: tuple[int, ...]) -> str:
    """Write 128, 128, 64 as "128x2 64"."""
    runs = [(length, len(list(same))) for length, same in groupby(lengths)]
    return " ".join(f"{length}x{times}" if times > 1 else f"{length}" for length, times in runs)

"""Bringing a pipeline up: rank 0 plans, every rank checks that it holds the same model, and the lanes are made."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from autopart.capture import CaptureCache
from autopart.capture.batch import Batch
from autopart.capture.guards import tied_names
from autopart.files.plans import plan_from_json, plan_to_json
from autopart.ir import errors
from autopart.ir.cluster import Cluster
from autopart.ir.errors import AutopartError, PlanError, UsageError
from autopart.ir.graph import Graph, LossReduction
from autopart.ir.plan import Plan
from autopart.options import Options
from autopart.passes.program.projection import project_plan
from autopart.planning import WHOLE, Planned, make_plan, read_plan
from autopart.runtime.tensors import LocalTensors, broadcast_weights_if_different
from autopart.runtime.world import World
from autopart.session.executor import Executor, RankContext


@dataclass(frozen=True)
class Started:
    """A pipeline that can run.  lane: the training step; owners: the rank that answers for each parameter and buffer;
    tied: every other name of a tensor to its first."""

    world: World
    plan: Plan
    lane: Executor
    setting: RankContext
    owners: dict[str, int]
    tied: dict[str, str]

    @property
    def tensors(self) -> LocalTensors:
        """What this rank holds."""
        return self.setting.tensors


def start(capturer: CaptureCache, batch: Batch, cluster: Cluster, options: Options) -> Started:
    """Plan on rank 0 and prepare this rank.  Collective.  Everything that can be refused is refused here."""
    read_plan(options)  # a bad plan file is refused before any process talks
    _refuse_meta(capturer.model)
    world = World(cluster.kind, cluster.world)
    planned = _plan_together(world, capturer, batch, cluster, options)
    tensors = LocalTensors(world.device)
    setting = RankContext(capturer, world, options, tensors)
    broadcast_weights_if_different(world, planned.captured.tensors)
    lane = Executor(setting, "step", planned.captured, planned.plan, planned.plan.stages, planned.weight)
    lane.prepare(batch, (max(planned.plan.micro_rows),))
    owners = _owners(planned.captured.graph, planned.plan)
    return Started(world, planned.plan, lane, setting, owners, tied_names(capturer.model))


def _refuse_meta(model: nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise UsageError(
                f"{name} is on the meta device: it has no values to train",
                fix="use autopart.plan for planning alone; to run, build the model with weights",
            )


def _plan_together(world: World, capturer: CaptureCache, batch: Batch, cluster: Cluster, options: Options) -> Planned:
    """The plan of rank 0 on every rank, each with its own capture.  An error of rank 0 is raised on all of them."""
    mine: Planned | None = None
    answer: dict[str, Any] = {}
    if world.rank == 0:
        try:
            mine = make_plan(capturer, batch, cluster, options)
            answer = {"plan": plan_to_json(mine.plan), "weight": asdict(mine.weight)}
        except AutopartError as error:
            answer = _described(error)
            if world.size == 1:
                raise
    answer = world.broadcast_json(answer)
    if "error" in answer:
        raise _error(answer)
    if mine is None:
        plan = plan_from_json(answer["plan"], "plan of rank 0")
        captured = capturer(batch, max(plan.micro_rows))
        mine = Planned(plan, captured, LossReduction(**answer["weight"]))
    _agree(world, mine, options)
    return mine


def _agree(world: World, planned: Planned, options: Options) -> None:
    """Every rank must have captured the same program.  Collective; raises PlanError on all ranks."""
    digests = world.gather_text(f"{planned.captured.graph.shape_digest()} {planned.plan.digest()} {options.seed}")
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise PlanError(
                f"ranks 0 and {rank} hold different models or batches",
                why="their captured programs, or their seeds, differ",
                fix="build the same model, with the same flags, and pass the same sample and seed on every rank",
            )


def _described(error: AutopartError) -> dict[str, Any]:
    return {"error": type(error).__name__, "text": [error.what, error.where, error.why, error.fix]}


def _error(answer: dict[str, Any]) -> AutopartError:
    kind = getattr(errors, answer["error"], AutopartError)
    what, where, why, fix = answer["text"]
    found = kind(what, where=where, why=why, fix=fix)
    assert isinstance(found, AutopartError)
    return found


def _owners(graph: Graph, plan: Plan) -> dict[str, int]:
    """The first stage that uses a parameter answers for it; for a buffer, the stage that updates it."""
    ops = graph.op_map()
    owners: dict[str, int] = {}
    for stage in plan.stages:
        for op in stage.ops:
            for name in ops[op].params:
                owners.setdefault(name, stage.ranks[0])
    writer = graph.writer()
    for buffer, value in graph.updates:
        stage = next(s for s in plan.stages if writer[value] in s.ops)
        owners[buffer] = stage.ranks[0]
    return owners


def evaluation_lane(started: Started, mode: str, batch: Batch) -> Executor:
    """A lane for "loss" or "predict" along the stages of the training plan.  Collective."""
    setting, plan = started.setting, started.plan
    captured = setting.capturer(batch, batch.rows or 1, mode)
    stages = project_plan(captured.graph, started.lane.graph, plan.decision)
    return Executor(setting, mode, captured, plan, stages, WHOLE)

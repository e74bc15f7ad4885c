"""Steps under plans made by hand: several stages on a rank, split backwards, any order of computes; each compared with
one process, or, for models that draw random numbers or round, with one device that runs whole backwards."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

import autopart
from autopart.batch.batch import flatten, split_rows
from autopart.files.clusters import parse_cluster
from autopart.ir.errors import PlanError
from autopart.ir.graph import Graph
from autopart.ir.plan import Decision, Plan, Provenance, Stage, check
from autopart.ir.program import BUCKET_BYTES
from autopart.ir.shares import Policy
from autopart.ir.size import Size
from autopart.passes.program.messages import check_messages
from autopart.passes.program.named import SEARCHED
from autopart.passes.program.orders import LOOP
from autopart.passes.program.orders import placed as placed_on
from autopart.passes.program.schedules import register
from autopart.passes.program.verify import check_program
from autopart.pipe.pipe import Pipe
from support.jobs import precision_jobs
from support.jobs.step_jobs import EVERY, cluster, compiled, expected_of, fresh, refusal_of
from support.languages.own_orders import OWN, drawn_order, registered
from support.oracles.one_process import Difference, Expected, difference, gradients_of, plain_loss, plain_step


@dataclass(frozen=True)
class Placed:
    """A plan to be made by hand for all ranks of a pool.

    per_rank: stages of each rank.  workers: of replicas of the same stages, 0 for as many as there are ranks for; other
    ranks idle.  schedule: a built-in one; "" draws an order (`own_orders`), in which a backward is split with the
    probability `split`; so does "searched", where the plan has the order.  replicas: of every stage, with these shares
    of the rows, () for equal ones.  synced: whether they share batch statistics.  recompute: the part of each stage's
    ops that is recomputed.  seed: of the order, and of how much the cuts are off from equal numbers of ops.
    """

    per_rank: int = 2
    workers: int = 0
    placement: str = LOOP
    schedule: str = ""
    split: float = 1.0
    seed: int = 0
    micros: int = 4
    replicas: int = 1
    policy: Policy = "split"
    zero: int = 0
    recompute: float = 0.0
    slices: tuple[int, ...] = ()
    bucket_bytes: int = BUCKET_BYTES
    precision: Any = "fp32"
    shares: tuple[int, ...] = ()
    synced: bool = False

    def schedule_on(self, workers: int) -> str:
        """Return the name of the schedule, registered in this process."""
        if self.schedule in OWN:
            return register(OWN[self.schedule]).name
        return self.schedule or registered(self.placement, workers, self.split, self.seed)


WHOLE = Placed(per_rank=1, schedule="gpipe")
"""Whole backwards; with `alone`, on one device."""


def plan_of(graph: Graph, placed: Placed, rows: int, world: int, *, alone: bool = False) -> Plan:
    """Return the plan for a graph, cut near equal numbers of ops where a cut is allowed.  alone: one stage on rank 0;
    the other ranks idle."""
    workers = 1 if alone else placed.workers or world // placed.replicas
    count = 1 if alone else workers * placed.per_rank
    homes, draw = placed_on(placed.placement, count, workers) or range(count), random.Random(placed.seed)
    schedule, order = placed.schedule_on(workers), ()
    if schedule == SEARCHED:
        order = tuple(map(" ".join, drawn_order(tuple(homes), placed.micros, placed.split, placed.seed)))
    provenance = Provenance(
        graph.shape_digest(), graph.structure_digest(), torch.__version__, precision=placed.precision
    )
    for _ in range(200):
        stages = []
        for stage, (first, end) in enumerate(pairwise(_ends(len(graph.ops), count, draw))):
            ops = tuple(op.name for op in graph.ops[first:end])
            again = ops[: round(placed.recompute * len(ops))]
            home = homes[stage]
            ranks = (0,) if alone else tuple(range(home * placed.replicas, (home + 1) * placed.replicas))
            stages.append(Stage(ops, ranks, (again,) if again else (), placed.shares, placed.policy))
        decision = Decision(
            world, tuple(stages), split_rows(rows, placed.micros), schedule, placed.zero,
            token_slices=placed.slices, bucket_bytes=placed.bucket_bytes, order=order,
        )  # fmt: skip
        try:
            return check(Plan(provenance, decision), graph)
        except PlanError:  # a buffer on two stages
            continue
    raise AssertionError(f"{count} stages of {len(graph.ops)} ops cannot be cut")


def _ends(ops: int, count: int, draw: random.Random) -> list[int]:
    """Return where stages end, each somewhere near an equal part; the last ops mostly sum up the loss."""
    free = max(count, ops - 7)
    near = [round(free * (k + draw.uniform(-0.3, 0.3)) / count) for k in range(1, count)]
    inner = list(itertools.accumulate(near, lambda last, end: max(last + 1, end), initial=0))[1:]
    return [0, *inner, ops]


def plan_for(name: str, placed: Placed, rows: int, dtype: torch.dtype = torch.float32, *, alone: bool = False) -> Plan:
    """Return the plan for a model of the tests."""
    case, captures = EVERY[name], fresh(name, dtype, placed.precision)
    captures.run_in(placed.precision, "cpu")
    size = Size(max(split_rows(rows, placed.micros)))
    graph = captures(flatten(case.data(rows, dtype), with_target=case.loss_fn is not None), size).graph
    return plan_of(graph, placed, rows, parse_cluster(cluster()).world, alone=alone)


def stepped(
    name: str, placed: Placed, rows: int, dtype: torch.dtype, *, alone: bool = False, transport: str = "auto"
) -> tuple[Expected, list[str], bool]:
    """Take a step and return what it left, the kinds of computes that this rank ran, and whether this is rank 0.

    The program is proven under the rules of Gloo and of NCCL.
    """
    plan, case = plan_for(name, placed, rows, dtype, alone=alone), EVERY[name]
    captures, batch = fresh(name, dtype, placed.precision), case.data(rows, dtype)
    asked = {"sync_batchnorm": True} if placed.synced else {}
    with compiled(case, captures, batch, plan=plan, seed=5, transport=transport, **asked) as pipe:
        check_messages(check_program(pipe.program, pipe.plan.schedule))
        loss = pipe.step(batch).item()
        found = Expected(loss, pipe.gradients(), dict(pipe.state_dict()))
        return found, [action.kind for action in pipe.program.part(pipe.rank)], pipe.rank == 0


def compare_placed(
    name: str,
    placed: Placed,
    rows: int = 12,
    dtype: str = "float32",
    against: str = "one process",
    transport: str = "auto",
) -> tuple[Difference | None, list[str]]:
    """Compare a step with one process, or with whole backwards on "one device"; the difference is on rank 0."""
    chosen = getattr(torch, dtype)
    found, kinds, leads = stepped(name, placed, rows, chosen, transport=transport)
    if against == "one process":
        case = EVERY[name]
        expected = expected_of(name, chosen, rows, placed.micros if case.coupled else 1)
    else:
        plain = replace(WHOLE, micros=placed.micros, precision=placed.precision)
        expected, _, _ = stepped(name, plain, rows, chosen, alone=True)
    return difference(found.loss, found.gradients, found.buffers, expected, chosen) if leads else None, kinds


def trained_in_half(name: str, placed: Placed, steps: int) -> dict[str, Any]:
    """Return `precision_jobs.trained` under a plan."""
    return precision_jobs.trained(name, placed.precision, steps, {"plan": plan_for(name, placed, 8)})


def lived(name: str, plans: list[Placed], rows: int, steps: int = 2) -> dict[str, Any]:
    """Train some steps under each plan in turn, every other one with a small batch, and return losses, gradients, an
    evaluation loss and the state beside those of one process."""
    dtype, case = torch.float64, EVERY[name]
    made = [plan_for(name, placed, rows, dtype) for placed in plans]
    sizes = [rows, 4]
    with compiled(case, fresh(name, dtype), case.data(rows, dtype), plan=made[0]) as pipe:
        ours = _trained(pipe, case, made, sizes, steps)
        batch = case.data(rows, dtype)
        ours["evaluated"] = pipe.eval_loss(batch).item()
        ours["state"], leads = pipe.state_dict(), pipe.rank == 0
    return {"ours": ours, "alone": _trained_alone(case, len(made), sizes, steps) if leads else None}


def _trained(pipe: Pipe, case: Any, plans: list[Plan], sizes: list[int], steps: int) -> dict[str, Any]:
    found: dict[str, Any] = {"losses": [], "gradients": []}
    for number, plan in enumerate(plans):
        if number:
            pipe.adopt(plan)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for step in range(steps):
            found["losses"].append(pipe.step(case.data(sizes[step % 2], torch.float64)).item())
            found["gradients"].append(pipe.gradients())
            optimizer.step()
            optimizer.zero_grad()
    return found


def _trained_alone(case: Any, plans: int, sizes: list[int], steps: int) -> dict[str, Any]:
    model = case.model(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: dict[str, Any] = {"losses": [], "gradients": []}
    for _ in range(plans):
        for step in range(steps):
            found["losses"].append(plain_step(case, model, case.data(sizes[step % 2], torch.float64), 1).item())
            found["gradients"].append(gradients_of(model))
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        found["evaluated"] = plain_loss(case, model, case.data(sizes[0], torch.float64)).item()
    return found | {"state": model.state_dict()}


def refusal(name: str, placed: Placed, rows: int) -> str:
    """Return the error of a step."""
    return str(refusal_of(lambda: stepped(name, placed, rows, torch.float64)))


def verified(name: str, placed: Placed, rows: int) -> tuple[bool, int]:
    """Return whether `verify` finds a step exact, and the number of gradients that it compared."""
    case = EVERY[name]
    plan = plan_for(name, placed, rows)
    found = autopart.verify(case.model(), cluster(), sample=case.data(rows), loss_fn=case.loss_fn, plan=plan)
    return found.ok, len(found.gradients)


def verified_by_options(name: str, options: dict[str, Any]) -> tuple[bool, set[int]]:
    """Return whether `verify` finds a step exact under the plan that these options give, and the stages compared."""
    case = EVERY[name]
    given = {"sample": case.data(8), "loss_fn": case.loss_fn, "costs": "analytic", **options}
    found = autopart.verify(case.model(), cluster(), **given)
    return found.ok, {difference.stage for difference in found.gradients}

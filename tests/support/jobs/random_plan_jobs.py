"""Random models under random plans, each compared with the model in one process."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from autopart.batch.batch import flatten, split_rows
from autopart.capture import CaptureCache
from autopart.files.clusters import parse_cluster
from autopart.ir.errors import RefusedError
from autopart.ir.graph import Graph
from autopart.ir.plan import Decision, Plan, Provenance, Stage, check
from autopart.ir.program import BUCKET_BYTES
from autopart.ir.shares import POLICIES
from autopart.ir.size import Size
from autopart.options import read_options
from autopart.passes.program.messages import check_messages
from autopart.passes.program.named import FAMILY
from autopart.passes.program.routing import route
from autopart.passes.program.verify import check_program
from autopart.pipe.pipe import Pipe
from support.jobs.step_jobs import cluster
from support.languages.text import decision_text
from support.models.random_models import OPS, RANDOM_OPS, Random, batch_of
from support.oracles.one_process import Expected, difference

NAMES = sorted(set(OPS) - set(RANDOM_OPS) - {"norm"})  # random ops and batch statistics have separate tests


def drawn_plan(graph: Graph, rows: int, micros: int, world: int, draw: random.Random) -> Plan:
    """Return a plan with random cuts, replicas, shares, recomputed groups and schedule."""
    count = draw.randint(1, min(3, world, len(graph.ops)))
    last = max(count, len(graph.ops) - 7)  # the last ops mostly sum up the loss
    ends = [0, *sorted(draw.sample(range(1, last), count - 1)), len(graph.ops)]
    ranks = draw.sample(range(world), world)
    widths = [1] * count
    for _ in range(draw.randint(0, world - count)):
        widths[draw.randrange(count)] += 1
    stages = []
    for first, end in pairwise(ends):
        ops = tuple(op.name for op in graph.ops[first:end])
        again = sorted(draw.sample(range(len(ops) + 1), 2))
        groups = (ops[again[0] : again[1]],) if draw.random() < 0.4 else ()
        own = tuple(ranks.pop() for _ in range(widths[len(stages)]))
        policy = draw.choice(POLICIES)
        shares = tuple(draw.randint(1, 5) for _ in own) if policy == "split" and draw.random() < 0.5 else ()
        stages.append(Stage(ops, own, groups, shares, policy))
    zero, bucket_bytes = draw.choice((0, 1)), draw.choice((64, BUCKET_BYTES))
    decision = Decision(
        world, tuple(stages), split_rows(rows, micros), draw.choice(FAMILY), zero, bucket_bytes=bucket_bytes
    )
    return check(Plan(Provenance(graph.shape_digest(), graph.structure_digest(), torch.__version__), decision), graph)


def random_plans(seeds: list[int]) -> list[tuple[str, bool | None]]:
    """Return for each seed the plan and whether loss and gradients were exact, or None where the plan was refused."""
    return [_random_plan(seed) for seed in seeds]


def _random_plan(seed: int) -> tuple[str, bool | None]:
    draw = random.Random(seed)
    steps = tuple((draw.choice(NAMES), draw.randint(0, 12), draw.randint(0, 12)) for _ in range(draw.randint(3, 12)))
    rows = draw.randint(2, 9)
    micros = draw.randint(1, min(5, rows))
    batch: dict[str, Any] = batch_of(rows, seed)
    batch["x"] = batch["x"].double()
    captures, cpus = CaptureCache(Random(steps).double()), parse_cluster(cluster())
    graph = captures(flatten(batch), Size(max(split_rows(rows, micros)))).graph
    plan = drawn_plan(graph, rows, micros, cpus.world, draw)
    for count in range(1, micros + 1):  # smaller batches too; under the rules of Gloo and of NCCL
        decision = replace(plan.decision, micro_rows=(1,) * count)
        check_messages(check_program(route(decision, graph), plan.schedule))
    transport = draw.choice(("auto", "fake-nccl"))
    text = f"seed {seed}: {steps} {decision_text(plan.decision)} {transport}"
    try:
        with Pipe(captures, cpus, read_options(plan=plan, costs="analytic", transport=transport), batch) as pipe:
            loss = pipe.step(batch).item()
            gradients = pipe.gradients()
            other = pipe.step(batch_of_double(max(1, rows - 1), seed)).item()  # accumulates, with other shares
            total, leads = pipe.gradients(), pipe.rank == 0
            good = _as_alone(steps, seed, ((loss, gradients, rows), (other, total, max(1, rows - 1)))) if leads else []
    except RefusedError as refusal:
        assert "divided between replicas" in str(refusal) or "nothing to train" in str(refusal), text
        return text, None
    return text, all(good)


def _as_alone(steps: Any, seed: int, results: Any) -> list[bool]:
    """Return for each (loss, gradients, rows) of accumulating steps whether it equals one process.

    Run while the pipe is open: the other ranks wait for this rank in the next step.
    """
    model, good = Random(steps).double(), []
    for found, given, size in results:
        expected = model(**batch_of_double(size, seed))
        if expected.requires_grad:
            expected.backward()
        off = difference(found, given, {}, Expected.of(expected.detach(), model), torch.float64)
        good.append(off.within(torch.float64))
    return good


def batch_of_double(rows: int, seed: int) -> dict[str, Any]:
    """Return `batch_of` in double precision."""
    batch = batch_of(rows, seed)
    return {**batch, "x": batch["x"].double()}

"""Training of a setup on the ranks of a pool: what it leaves, or the error that refuses it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from autopart.batch.batch import flatten, split_rows
from autopart.capture import CaptureCache
from autopart.ir.decision import Stage
from autopart.ir.errors import AutopartError, PlanError, RunError
from autopart.ir.graph import Graph, Size
from autopart.ir.plan import Decision, Plan, Provenance, check
from autopart.ir.shares import Piece
from autopart.passes.program.messages import check_messages
from autopart.passes.program.named import SEARCHED
from autopart.passes.program.orders import placed
from autopart.passes.program.schedules import register
from autopart.passes.program.verify import check_program
from autopart.pipe.pipe import Pipe
from support.extending.own_orders import OWN, drawn_order, registered
from support.jobs.step_jobs import EVERY, compiled
from support.languages.setups import DRAWN, Setup
from support.models.random_models import OPS, RANDOM_OPS, Random, batch_of
from support.models.small_models import Small
from support.models.tokens.decoder import Shape, decoder

Tensors = dict[str, torch.Tensor]
NAMES = sorted(set(OPS) - set(RANDOM_OPS) - {"norm"})
"""Ops of random models."""
SCALE = 256.0
"""Of losses in fp16: no gradient of the models is infinite."""
_DECODERS = {
    "decoder": Shape(), "decoder_window": Shape(window=5, term=True, written_out=True),
    "decoder_merged": Shape(merged=True), "decoder_dropout": Shape(dropout=0.2, term=True),
    "decoder_written": Shape(dropout=0.2, written_out=True, merged=True),
}  # fmt: skip


def case_of(name: str) -> Any:
    """Return the model and batches of a name: one of the zoos, a decoder, or "random N"."""
    if name.startswith("random"):
        draw = random.Random(int(name.split()[1]))
        steps = tuple(
            (draw.choice(NAMES), draw.randint(0, 12), draw.randint(0, 12)) for _ in range(draw.randint(3, 12))
        )
        return Small(lambda: Random(steps), batch_of)
    if name in _DECODERS:
        return decoder(_DECODERS[name])
    return EVERY[name]


def model_of(setup: Setup) -> nn.Module:
    """Return the model of a setup, with the same weights at every call."""
    model: nn.Module = case_of(setup.model).model(dtype=getattr(torch, setup.dtype))
    for parameter in list(model.parameters())[: setup.frozen]:
        parameter.requires_grad_(False)
    return model


def batches_of(setup: Setup) -> list[Any]:
    """Return the batches of a setup."""
    return [case_of(setup.model).data(rows, getattr(torch, setup.dtype)) for rows in setup.rows]


def optimizer_of(setup: Setup, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Return an optimizer with state that does not amplify the rounding of gradients near zero."""
    if setup.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=0.01, eps=0.01)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def state_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Tensors:
    """Return what an optimizer keeps for a parameter."""
    kept = optimizer.state.get(parameter, {})
    return {key: value.clone() for key, value in kept.items() if isinstance(value, torch.Tensor)}


@dataclass(frozen=True)
class Trained:
    """What training leaves on a rank, or in one process.

    losses: of each batch.  gradients: before each step of the optimizer.  state: parameters and buffers of the model.
    values, optimizer: parameters that this rank updates, and what its optimizer keeps for them.  (gradients and state
    are the same on all ranks, and returned by rank 0.)  evaluated: the loss of the first batch, where it is asked for.
    pieces: what this rank has of a parameter, if not all.
    """

    losses: list[float]
    gradients: list[dict[str, torch.Tensor | None]]
    state: Tensors
    values: Tensors
    optimizer: dict[str, Tensors]
    evaluated: float = 0.0
    pieces: Mapping[str, Piece] = field(default_factory=dict)


@dataclass(frozen=True)
class Refused:
    """The error that refuses a setup."""

    kind: str
    text: str


def train(
    setup: Setup, step: Callable[[Any], float], gradients: Callable[[], Any], named: Callable[[], Iterable[Any]]
) -> tuple[list[float], list[Any], torch.optim.Optimizer]:
    """Take the steps of a setup; return losses, gradients and the optimizer."""
    losses, found, last = [], [], len(setup.rows) - 1
    optimizer = optimizer_of(setup, [parameter for _, parameter in named()])
    for place, batch in enumerate(batches_of(setup)):
        losses.append(step(batch))
        if place in (0, last):
            found.append(gradients())
            optimizer.step()
            optimizer.zero_grad()
    return losses, found, optimizer


# -- on a rank -----------------------------------------------------------------------------------------------------


def play(setup: Setup) -> Trained | Refused:
    """Train a setup on this rank."""
    try:
        with pipe_of(setup) as pipe:
            _as_asked(pipe, setup)
            if pipe.scaler is not None:
                pipe.scaler.scale = SCALE
            losses, gradients, optimizer = train(
                setup, lambda batch: pipe.step(batch).item(), pipe.gradients, pipe.named_parameters
            )
            assert not pipe.skipped
            state, held = dict(pipe.state_dict()), {n: p for n, p in pipe.named_parameters() if p.numel()}
            evaluated = pipe.eval_loss(batches_of(setup)[0]).item() if setup.evaluated else 0.0
            leads, placement = pipe.rank == 0, pipe.session.standing.context.placement
            return Trained(
                losses, gradients if leads else [], state if leads else {},
                {name: parameter.detach().clone() for name, parameter in held.items()},
                {name: state_of(optimizer, parameter) for name, parameter in held.items()}, evaluated,
                {name: placement.piece(pipe.rank, name) for name in held if name in placement.cuts},
            )  # fmt: skip
    except RunError:
        raise
    except AutopartError as error:
        return Refused(type(error).__name__, str(error))


def pipe_of(setup: Setup) -> Pipe:
    """Return the pipe of a setup over all ranks."""
    case = case_of(setup.model)
    captures = CaptureCache(model_of(setup), case.loss_fn)
    asked = _options(setup) if setup.by_options else {"plan": plan_for(setup, captures)}
    return compiled(
        case, captures, batches_of(setup)[0], seed=5, transport=setup.transport, sync_batchnorm=setup.synced or None,
        master_weights=setup.masters or None, backend=setup.backend, **asked,
    )  # fmt: skip


def plan_for(setup: Setup, captures: CaptureCache | None = None) -> Plan:
    """Return the plan of a setup.  captures: of its model."""
    case = case_of(setup.model)
    captures = captures or CaptureCache(model_of(setup), case.loss_fn)
    captures.run_in(setup.precision, "cpu")
    batch = flatten(batches_of(setup)[0], with_target=case.loss_fn is not None)
    return plan_of(captures(batch, Size(max(split_rows(setup.rows[0], setup.micros)))).graph, setup)


def _options(setup: Setup) -> dict[str, Any]:
    count = len(setup.counts) * setup.per_rank
    alike = setup.counts[0] if len({*setup.counts}) == 1 else setup.counts
    return {
        "stages": count, "stages_per_rank": setup.per_rank, "schedule": setup.schedule, "replicas": alike,
        "micro_batches": setup.micros, "zero": setup.zero, "bucket_bytes": setup.bucket_bytes,
        "recompute": "all" if setup.recompute else "off", "token_slices": setup.slices or None,
        "replica_policy": setup.policies[0] if setup.policies else None, "precision": setup.precision,
        "tensor_parallel": setup.shards,
    }  # fmt: skip


def plan_of(graph: Graph, setup: Setup) -> Plan:
    """Return the plan of a setup, cut near equal numbers of ops where a cut is allowed."""
    workers, draw = len(setup.counts), random.Random(setup.seed)
    count = workers * setup.per_rank
    homes, order = placed(setup.placement, count, workers) or tuple(range(count)), ()
    schedule = setup.schedule
    if schedule in OWN:
        register(OWN[schedule])
    if schedule == DRAWN:
        schedule = registered(setup.placement, workers, setup.split, setup.seed)
    if schedule == SEARCHED:
        order = tuple(map(" ".join, drawn_order(homes, setup.micros, setup.split, setup.seed)))
    starts = [0, *itertools.accumulate(count * setup.shards for count in setup.counts)]
    placed_on = [list(range(*pair)) for pair in pairwise(starts)]
    for own in placed_on if setup.shards > 1 else ():
        draw.shuffle(own)
    provenance = Provenance(
        graph.shape_digest(), graph.structure_digest(), torch.__version__, precision=setup.precision
    )
    refusal = PlanError(f"{len(graph.ops)} ops cannot be cut into {count} stages", fix="draw fewer stages")
    for _ in range(200 if len(graph.ops) >= count else 0):
        stages = []
        for home, (first, end) in zip(homes, pairwise(_ends(len(graph.ops), count, draw)), strict=True):
            ops = tuple(op.name for op in graph.ops[first:end])
            again = ops[: round(setup.recompute * len(ops))]
            shares = setup.shares[home] if setup.shares else ()
            policy = setup.policies[home] if setup.policies else "split"
            ranks = tuple(placed_on[home])
            whole = random.Random(f"{setup.seed}, stage {len(stages)}").random() < setup.whole
            groups = (again,) if again else ()
            stages.append(Stage(ops, ranks, groups, shares, policy, whole_backward=whole, shards=setup.shards))
        decision = Decision(
            setup.world, tuple(stages), split_rows(setup.rows[0], setup.micros), schedule, setup.zero,
            token_slices=setup.slices, bucket_bytes=setup.bucket_bytes, order=order,
        )  # fmt: skip
        try:
            return check(Plan(provenance, decision), graph)
        except PlanError as error:  # a buffer on two stages
            refusal = error
    raise refusal


def _ends(ops: int, count: int, draw: random.Random) -> list[int]:
    """Return where stages end, each somewhere near an equal part; the last ops mostly sum up the loss."""
    free = max(count, ops - 7)
    near = [round(free * (k + draw.uniform(-0.3, 0.3)) / count) for k in range(1, count)]
    inner = list(itertools.accumulate(near, lambda last, end: max(last + 1, end), initial=0))[1:]
    return [0, *inner, ops]


def _as_asked(pipe: Pipe, setup: Setup) -> None:
    """Check that the plan is what was asked for, and its program under the rules of Gloo and of NCCL."""
    decision = pipe.plan.decision
    assert len(decision.stages) == len(setup.counts) * setup.per_rank
    assert sorted(stage.replicas for stage in decision.stages) == sorted(setup.counts * setup.per_rank)
    assert decision.shards == setup.shards
    assert decision.zero == setup.zero and decision.token_slices == setup.slices
    assert len(decision.micro_rows) == setup.micros
    recomputing = any if setup.by_options else all  # the planner leaves out stages that would save nothing
    assert setup.recompute < 1 or recomputing(stage.recompute for stage in decision.stages)
    check_messages(check_program(pipe.program, pipe.plan.schedule))

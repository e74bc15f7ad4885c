"""One step of a pipeline compared with the same step in one process: the loss, every gradient and every buffer.

The reference in one process is

- the user's model on the whole batch;
- the user's model over the same micro-batches, with the loss weights of the pipeline, if batch statistics or buffers
  couple the rows of a micro-batch, or under autocast, where sums over rows are rounded;
- the captured program in one stage, over the same micro-batches, if the model draws random numbers (no other program
  draws the same masks), or if rows are coupled and terms of the loss have weights of their own.

The pipeline and the reference each work on a copy of the model.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from autopart.batch.batch import Batch, flatten
from autopart.capture import CaptureCache
from autopart.capture.python.guards import check_model
from autopart.capture.trace.export import LossFn, loss_of, scalar
from autopart.capture.trained import Trained
from autopart.ir.cluster import Cluster
from autopart.ir.errors import UsageError
from autopart.ir.graph import Graph
from autopart.ir.shares import Piece
from autopart.options import Options
from autopart.passes.program.schedules import find
from autopart.pipe.pipe import Pipe
from autopart.planning.derive.reduction import coupling_ops
from autopart.report.plan_table import table_lines
from autopart.runtime.tensors import dense
from autopart.session.ranks.agreement import from_rank
from autopart.session.step.loss_shares import whole_shares
from autopart.state.state_dict import gather_state

TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "float16": 2e-2, "bfloat16": 1e-1}
NEGLIGIBLE = {"float64": 1e-14, "float32": 1e-7, "float16": 1e-4, "bfloat16": 1e-3}  # of the whole gradient's norm

PLAIN = "the model itself, on the whole batch"
CAST = "the model itself under torch.autocast, over the same micro-batches"
BUFFERS = "the model itself, over the same micro-batches (it updates buffers while it trains)"
TERMS = (
    "the captured program in one stage, over the same micro-batches (it updates buffers, and weighs terms of its loss)"
)
RANDOM = "the captured program in one stage, with the same random keys (the model draws random numbers)"

Tensors = Mapping[str, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of one gradient or buffer.  stage: that has it, -1 for none.  size: its norm in one process.

    cut: how ranks divide the tensor, "" for whole ones.  error: norm of the difference, divided by `size`.  negligible:
    beyond the tolerance, but rounding compared with the gradient of the whole model (or for a running mean, with its
    deviation), as if the exact value is zero.  ok: within tolerance or negligible.
    """

    name: str
    kind: str
    stage: int
    size: float
    error: float
    negligible: bool
    ok: bool
    cut: str = ""

    @property
    def verdict(self) -> str:
        """The verdict that the table shows."""
        if not self.ok:
            return "OUT OF TOLERANCE"
        return "negligible" if self.negligible else "ok"


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of `verify`, the largest errors first.  reference: what one process ran."""

    loss: float
    expected_loss: float
    tolerance: float
    reference: str
    gradients: tuple[Difference, ...]
    buffers: tuple[Difference, ...]

    @property
    def loss_error(self) -> float:
        """Relative difference of the losses."""
        return _ratio(abs(self.loss - self.expected_loss), abs(self.expected_loss))

    @property
    def largest(self) -> float:
        """Largest relative error of a gradient that is not negligible; 0 when there is none."""
        return max((d.error for d in self.gradients if not d.negligible), default=0.0)

    @property
    def ok(self) -> bool:
        """Whether the loss, every gradient and every buffer are within tolerance."""
        return self.loss_error <= self.tolerance and all(d.ok for d in (*self.gradients, *self.buffers))

    def table(self, limit: int = 20) -> str:
        """Return the differences as text: the `limit` largest, all that are out of tolerance, and a verdict."""
        every = (*self.gradients, *self.buffers)
        shown = [d for place, d in enumerate(every) if place < limit or not d.ok]
        divided = any(d.cut for d in every)
        grid = [["name", "of", "stage", "norm", "relative error", "verdict", *["divided"] * divided]]
        for d in shown:
            stage = str(d.stage) if d.stage >= 0 else "-"
            cut = [d.cut or "whole"] * divided
            grid.append([d.name, d.kind, stage, f"{d.size:.3e}", f"{d.error:.1e}", d.verdict, *cut])
        lines = table_lines(grid, words=(0, 1, 5, 6))
        if len(shown) < len(every):
            lines.append(f"... and {len(every) - len(shown)} more, all within tolerance")
        bad = sum(not d.ok for d in every)
        lines += [
            f"compared with: {self.reference}",
            f"loss {self.loss:.9g} in the pipeline, {self.expected_loss:.9g} in one process, "
            f"relative difference {self.loss_error:.1e}",
            f"largest relative gradient error {self.largest:.1e}",
            f"{'within' if self.ok else 'OUT OF'} tolerance {self.tolerance:g}: {len(self.gradients)} gradients and "
            f"{len(self.buffers)} buffers compared" + (f", {bad} of them out of tolerance" if bad else ""),
        ]
        return "\n".join(lines) + "\n"


def verify_step(
    model: nn.Module, cluster: Cluster, sample: Any, options: Options, tolerance: float | None = None
) -> Verification:
    """Run one training step both ways, and compare.  Collective; every rank of the cluster gets the result."""
    check_model(model)  # a copy no longer shows which tensors share memory
    if first := Trained(model, options.loss_fn).without_values:
        raise UsageError(
            f"{first} is on the meta device: there is no model to compare with",
            fix="verify a small model of the same code, with values",
        )
    batch = flatten(sample, with_target=options.loss_fn is not None, rows_axis=options.rows_axis)
    with _pipe_of_copy(model, cluster, sample, options) as pipe:
        if not find(pipe.plan.schedule).synchronous:
            asynchronous = UsageError(
                f"a step of schedule {pipe.plan.schedule!r} cannot be compared with one process",
                why="it updates weights within the step, so that its gradients are taken at other weights",
                fix="verify with a synchronous schedule, such as schedule='1f1b'; or compare losses over several steps",
            )
            raise pipe.session.world.known(asynchronous)
        found, session = _outcome(pipe, sample), pipe.session
        graph, decision = session.graph, pipe.plan.decision
        assert session.road.executor is not None
        micro_rows, preparation = session.road.rows, session.road.executor.preparation
        shares, autocast = whole_shares(preparation.shares), session.captures.autocast
        coupling = coupling_ops(graph, synced=options.sync_batchnorm)
        if any(stage.replicas > 1 and coupling & set(stage.ops) for stage in decision.stages):
            error = UsageError(
                "this plan cannot be compared with one process",
                why="the model takes statistics of a batch or updates buffers, and each replica of a stage has its own",
                fix="verify with replicas=1, or, if these are the statistics of batch norms, with sync_batchnorm=True",
            )
            raise session.world.known(error)
        random, couples = any(op.random for op in graph.ops), bool(coupling_ops(graph))
        expected: Outcome | None = None
        if random or (couples and shares is None):
            reference = RANDOM if random else TERMS
            alone = replace(
                options, stages=1, stages_per_rank=1, replicas=1, micro_batches=len(micro_rows), schedule="1f1b",
                tensor_parallel=1, cuts=(), pins={}, plan=None, costs="analytic",
            )  # fmt: skip
            with _pipe_of_copy(model, cluster, sample, alone) as single:
                expected = _outcome(single, sample)
        elif couples or (autocast is not None and shares is not None):
            reference = BUFFERS if couples else CAST
        else:
            reference, micro_rows, shares = PLAIN, (batch.rows or 1,), None

        def content() -> Verification:
            with autocast.region() if autocast is not None else contextlib.nullcontext():
                given = (model, batch, options.loss_fn, micro_rows, shares or [1.0])
                plain = expected or plain_outcome(*given, device=session.world.device, steady=preparation.rule.steady)
            stages, ops = reversed([*enumerate(decision.stages)]), graph.op_map()
            first = {name: number for number, stage in stages for op in stage.ops for name in ops[op].params}
            cuts = {name: _divided(pieces[0]) for name, pieces in session.standing.context.placement.cuts.items()}
            return compared(found, plain, first, precision_of(graph), tolerance, reference, cuts)

        home = decision.stages[0].ranks[0]
        return from_rank(session.world, home, "running the model in one process", content)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one training step, by original names, on the CPU."""

    loss: float
    gradients: Tensors
    buffers: Tensors


def fresh_copy(model: nn.Module, loss_fn: LossFn | None = None) -> tuple[nn.Module, LossFn | None]:
    """Return copies of the model and of a loss function that is a module, without gradients."""
    own = isinstance(loss_fn, nn.Module)
    other, loss = copy.deepcopy((model, loss_fn if own else None))
    loss = loss if own else loss_fn
    for _, parameter in Trained(other, loss).named_parameters():
        parameter.grad = None
    return other, loss


def _pipe_of_copy(model: nn.Module, cluster: Cluster, sample: Any, options: Options) -> Pipe:
    return Pipe(CaptureCache(*fresh_copy(model, options.loss_fn)), cluster, options, sample)


def _outcome(pipe: Pipe, sample: Any) -> Outcome:
    """Run one step of a pipeline.  Collective."""
    if pipe.scaler is not None:  # one process runs without; powers of two make no other difference
        pipe.scaler.scale = 1.0
    loss = pipe.step(sample)
    with pipe.session.call("state_dict") as session:
        state = gather_state(session)  # by the model's own names, whatever its state_dict() makes of them
    buffers = {name: state[name] for name, _ in pipe.session.captures.trained.named_buffers() if name in state}
    return Outcome(loss.item(), pipe.gradients(), buffers)


def plain_outcome(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFn | None,
    micro_rows: tuple[int, ...],
    weights: Sequence[float],
    device: torch.device | None = None,
    steady: frozenset[str] = frozenset(),
) -> Outcome:
    """Run one step of a copy of the model over micro-batches, in order.  weights: of their losses.  steady: buffers
    that a step updates once."""
    model, loss_fn = fresh_copy(model, loss_fn)
    for module in (model, loss_fn):
        if isinstance(module, nn.Module) and device is not None:
            module.to(device)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    total = 0.0
    once = [(b, b.clone()) for name, b in Trained(model, loss_fn).named_buffers() if name in steady]
    with torch.enable_grad():
        for tensors, weight in zip(batch.to(device).micro(micro_rows), weights, strict=True):
            queue = iter(tensors)
            leaves = tuple(next(queue) if isinstance(x, torch.Tensor) else x for x in batch.leaves)
            args, kwargs, target = batch.arguments(leaves)
            for buffer, value in once:
                buffer.copy_(value)
            result = model(*args, **kwargs)
            loss = scalar(loss_fn(result, target), "loss_fn") if loss_fn is not None else loss_of(result)
            (loss * weight).backward()  # type: ignore[no-untyped-call]
            total += loss.item() * weight
    trained = Trained(model, loss_fn)
    gradients = {name: p.grad for name, p in trained.named_parameters() if p.requires_grad}
    return Outcome(total, gradients, dict(trained.named_buffers()))


def precision_of(graph: Graph) -> str:
    """Return the coarsest floating dtype that a gradient flows through, which bounds the accuracy."""
    used = {v.dtype for v in graph.values if v.grad and v.dtype in TOLERANCE}
    return max(used, key=lambda dtype: TOLERANCE[dtype], default="float32")


def compared(
    found: Outcome,
    expected: Outcome,
    stages: Mapping[str, int],
    precision: str,
    tolerance: float | None,
    reference: str,
    cuts: Mapping[str, str] = MappingProxyType({}),
) -> Verification:
    """Compare the loss, gradients and buffers of two steps.

    stages: of each tensor, by name.  tolerance: relative, None for the default of `precision`.  reference: what the
    other step ran.  cuts: how ranks divide tensors.
    """
    limit = tolerance if tolerance is not None else TOLERANCE[precision]
    whole = math.hypot(*map(_distance, expected.gradients.values()))
    floors = dict.fromkeys(expected.gradients, NEGLIGIBLE[precision] * whole)
    kind = "running_mean"
    for name in found.buffers:
        if name.endswith(kind):  # its mean may be zero in theory, as behind another batch norm: deviations count
            variance = expected.buffers.get(f"{name.removesuffix(kind)}running_var")
            floors[name] = NEGLIGIBLE[precision] * math.sqrt(_distance(variance))

    def differences(kind: str, ours: Tensors, theirs: Tensors) -> tuple[Difference, ...]:
        rows = []
        for name, other in theirs.items():
            size, off = _distance(other), _distance(ours.get(name), other)
            error = _ratio(off, size)
            close = error <= limit
            negligible = not close and off <= floors.get(name, 0.0)
            good = close or negligible
            rows.append(Difference(name, kind, stages.get(name, -1), size, error, negligible, good, cuts.get(name, "")))
        return tuple(
            sorted(rows, key=lambda d: (d.ok, d.negligible, -math.inf if math.isnan(d.error) else -d.error, d.name))
        )

    gradients = differences("gradient", found.gradients, expected.gradients)
    buffers = differences("buffer", found.buffers, {name: expected.buffers[name] for name in found.buffers})
    return Verification(found.loss, expected.loss, limit, reference, gradients, buffers)


def _divided(piece: Piece) -> str:
    """Describe how ranks divide a tensor, by one of its pieces."""
    inside = f", each of {piece.blocks} blocks" if piece.blocks > 1 else ""
    return f"axis {piece.axis} by {piece.parts}{inside}"


def _distance(a: torch.Tensor | None, b: torch.Tensor | None = None) -> float:
    """Return the norm of a - b in double precision, where None is zero."""
    kinds = {True: torch.complex128, False: torch.float64}
    present = [dense(t.detach()).cpu().to(kinds[t.is_complex()]) for t in (a, b) if t is not None]
    if not present:
        return 0.0
    return float(torch.linalg.vector_norm(present[0] - present[1] if len(present) == 2 else present[0]))


def _ratio(off: float, size: float) -> float:
    if off == 0.0:
        return 0.0
    return off / size if size else math.inf

"""One step of a pipeline against the same step in one process: how far the loss and every gradient differ.

What one process runs:

- the user's own model on the whole batch;
- when the model updates buffers in training (batch statistics couple the rows of a micro-batch): the user's own
  model over the same micro-batches, in order, each loss weighted as the pipeline weighs it;
- under an autocast: the same under that autocast, over the same micro-batches, for sums over rows are rounded;
- when the model draws random numbers (dropout): the captured program in one stage, over the same micro-batches and
  with the same keys, for no other program draws the same masks; the same when it updates buffers and terms of its loss
  are weighed by themselves.

The pipeline and the reference each work on a copy of the model; the user's stays as it is.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from autopart.capture import CaptureCache
from autopart.capture.batch.batch import Batch, flatten, unflatten
from autopart.capture.derive.reduction import couples_rows, coupling_ops
from autopart.capture.guards import check_model
from autopart.capture.trace.export import LossFn, loss_of, scalar
from autopart.capture.trained import Trained
from autopart.ir.cluster import Cluster
from autopart.ir.errors import UsageError
from autopart.ir.explain import table_lines
from autopart.ir.graph import Graph
from autopart.ir.plan import Decision
from autopart.options import Options
from autopart.runtime.tensors import dense
from autopart.session.pipe import Pipe
from autopart.session.ranks.agreement import FAILURES, broadcast_result

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
    """One gradient or buffer.  stage: where the pipeline has it, -1 for nowhere; size: its norm in one process.

    error: norm of the difference over `size`; negligible: beyond tolerance, but rounding beside the gradient of the
    whole model, as for a gradient that is zero in theory, or of a running mean beside its deviations; ok: within
    tolerance or negligible.
    """

    name: str
    kind: str
    stage: int
    size: float
    error: float
    negligible: bool
    ok: bool

    @property
    def verdict(self) -> str:
        """One word, or a shout."""
        if not self.ok:
            return "OUT OF TOLERANCE"
        return "negligible" if self.negligible else "ok"


@dataclass(frozen=True, slots=True)
class Verification:
    """What `verify` found, the largest errors first.  reference: what one process ran."""

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
        """The differences as text: the `limit` largest, all that are out of tolerance, and a verdict."""
        every = (*self.gradients, *self.buffers)
        shown = [d for place, d in enumerate(every) if place < limit or not d.ok]
        grid = [["name", "of", "stage", "norm", "relative error", "verdict"]]
        for d in shown:
            stage = str(d.stage) if d.stage >= 0 else "-"
            grid.append([d.name, d.kind, stage, f"{d.size:.3e}", f"{d.error:.1e}", d.verdict])
        lines = table_lines(grid, words=(0, 1, 5))
        if len(shown) < len(every):
            lines.append(f"... and {len(every) - len(shown)} more, all within tolerance")
        return "\n".join([*lines, *self._summary()]) + "\n"

    def _summary(self) -> list[str]:
        bad = sum(not d.ok for d in (*self.gradients, *self.buffers))
        return [
            f"compared with: {self.reference}",
            f"loss {self.loss:.9g} in the pipeline, {self.expected_loss:.9g} in one process, "
            f"relative difference {self.loss_error:.1e}",
            f"largest relative gradient error {self.largest:.1e}",
            f"{'within' if self.ok else 'OUT OF'} tolerance {self.tolerance:g}: {len(self.gradients)} gradients and "
            f"{len(self.buffers)} buffers compared" + (f", {bad} of them out of tolerance" if bad else ""),
        ]


def verify_step(
    model: nn.Module, cluster: Cluster, sample: Any, options: Options, tolerance: float | None = None
) -> Verification:
    """One training step both ways.  Collective: call it on every rank of the cluster; every rank gets the result."""
    check_model(model)  # a copy no longer shows which tensors share memory
    batch = flatten(sample, with_target=options.loss_fn is not None)
    mine = _fresh(model, options.loss_fn)
    with Pipe(CaptureCache(mine.model, mine.loss_fn), cluster, options, sample) as pipe:
        found = _outcome(pipe, mine, sample)
        session = pipe.session
        graph, decision = session.graph, pipe.plan.decision
        weights = session.loss_shares(sample)
        micro_rows, shares = weights.micro_rows, weights.whole()
        autocast = session.captures.autocast
        home = decision.stages[0].ranks[0]
        alone: Outcome | None = None
        random, couples = any(op.random for op in graph.ops), couples_rows(graph)
        if _of_own_rows(graph, decision, options.sync_batchnorm):
            raise session.world.known(_per_replica())
        if random or (couples and shares is None):
            reference = RANDOM if random else TERMS
            alone = _captured_alone(model, cluster, sample, options, len(micro_rows))
        elif couples:
            reference = BUFFERS
        elif autocast is not None and shares is not None:
            reference = CAST
        else:
            reference = PLAIN
            micro_rows, shares = (batch.rows or 1,), None
        content: dict[str, Any] | None = None
        failure: BaseException | None = None
        if pipe.rank == home:
            try:
                expected = alone
                if expected is None:
                    plain = _fresh(model, options.loss_fn).to(session.world.device)
                    with autocast.region() if autocast is not None else contextlib.nullcontext():
                        expected = plain_outcome(plain.model, batch, plain.loss_fn, micro_rows, shares or [1.0])
                stages = first_stages(graph, decision)
                content = asdict(compared(found, expected, stages, precision_of(graph), tolerance, reference))
            except FAILURES as error:
                failure = error
        return _from_json(broadcast_result(session.world, content, failure, "running the model in one process", home))


def first_stages(graph: Graph, decision: Decision) -> dict[str, int]:
    """The first stage that uses each parameter and buffer."""
    ops, found = graph.op_map(), dict[str, int]()
    for number, stage in enumerate(decision.stages):
        for name in (name for op in stage.ops for name in ops[op].params):
            found.setdefault(name, number)
    return found


def _of_own_rows(graph: Graph, decision: Decision, synced: bool) -> bool:
    """Whether replicas take statistics or update buffers by the rows of their own alone."""
    coupling = coupling_ops(graph, synced=synced)
    return any(len(stage.ranks) > 1 and coupling & set(stage.ops) for stage in decision.stages)


def _per_replica() -> UsageError:
    return UsageError(
        "this plan cannot be compared with one process",
        why="the model takes statistics of a batch or updates buffers, of which each replica of a stage has its own",
        fix="verify with replicas=1, or, where these are the statistics of batch norms, with sync_batchnorm=True",
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one training step leaves, by original names, on the CPU."""

    loss: float
    gradients: Tensors
    buffers: Tensors


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy of the model and of its loss function, without gradients."""

    model: nn.Module
    loss_fn: LossFn | None

    @property
    def trained(self) -> Trained:
        return Trained(self.model, self.loss_fn)

    def to(self, device: torch.device) -> _Copy:
        """On a device, in place."""
        for module in (self.model, self.loss_fn):
            if isinstance(module, nn.Module):
                module.to(device)
        return self


def _fresh(model: nn.Module, loss_fn: LossFn | None) -> _Copy:
    own = isinstance(loss_fn, nn.Module)
    other, loss = copy.deepcopy((model, loss_fn if own else None))
    found = _Copy(other, loss if own else loss_fn)
    for _, parameter in found.trained.named_parameters():
        parameter.grad = None
    return found


def fresh_copy(model: nn.Module) -> nn.Module:
    """A copy of the model without gradients."""
    return _fresh(model, None).model


def _outcome(pipe: Pipe, mine: _Copy, sample: Any) -> Outcome:
    """One step of a pipeline of `mine`.  Collective."""
    if pipe.scaler is not None:  # one process runs without; powers of two make no other difference
        pipe.scaler.scale = 1.0
    loss = pipe.step(sample)
    state = pipe.state_dict()
    buffers = {name: state[name] for name, _ in mine.trained.named_buffers() if name in state}
    return Outcome(loss.item(), pipe.gradients(), buffers)


def _captured_alone(model: nn.Module, cluster: Cluster, sample: Any, options: Options, micros: int) -> Outcome:
    """The captured program in one stage, over as many micro-batches.  Collective."""
    alone = replace(options, stages=1, replicas=1, micro_batches=micros, cuts=(), plan=None, costs="analytic")
    mine = _fresh(model, options.loss_fn)
    with Pipe(CaptureCache(mine.model, mine.loss_fn), cluster, alone, sample) as pipe:
        return _outcome(pipe, mine, sample)


def plain_outcome(
    model: nn.Module, batch: Batch, loss_fn: LossFn | None, micro_rows: tuple[int, ...], weights: Sequence[float]
) -> Outcome:
    """The plain model over micro-batches, in order."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    total = 0.0
    with torch.enable_grad():
        for tensors, weight in zip(batch.to(device).micro(micro_rows), weights, strict=True):
            queue = iter(tensors)
            leaves = tuple(next(queue) if isinstance(x, torch.Tensor) else x for x in batch.leaves)
            args, kwargs, target = unflatten(leaves, batch.spec)
            result = model(*args, **kwargs)
            loss = scalar(loss_fn(result, target), "loss_fn") if loss_fn is not None else loss_of(result)
            (loss * weight).backward()  # type: ignore[no-untyped-call]
            total += loss.item() * weight
    trained = Trained(model, loss_fn)
    gradients = {name: p.grad for name, p in trained.named_parameters() if p.requires_grad}
    return Outcome(total, gradients, dict(trained.named_buffers()))


def precision_of(graph: Graph) -> str:
    """The coarsest floating type that a gradient flows through: it bounds what can be expected."""
    used = {v.dtype for v in graph.values if v.grad and v.dtype in TOLERANCE}
    return max(used, key=lambda dtype: TOLERANCE[dtype], default="float32")


def compared(
    found: Outcome,
    expected: Outcome,
    stages: Mapping[str, int | None],
    precision: str,
    tolerance: float | None,
    reference: str,
) -> Verification:
    """Every gradient, buffer and the loss of one step against another.  stages: where each tensor is, by name;
    precision, tolerance: what can be expected; reference: what the other step ran."""
    limit = tolerance if tolerance is not None else TOLERANCE[precision]
    whole = NEGLIGIBLE[precision] * math.hypot(*(_norm(g) for g in expected.gradients.values() if g is not None))
    least = dict.fromkeys(expected.gradients, whole)
    buffers = {name: expected.buffers[name] for name in found.buffers}
    floors = {name: NEGLIGIBLE[precision] * deviation for name, deviation in _deviations(buffers).items()}
    return Verification(
        found.loss,
        expected.loss,
        limit,
        reference,
        _differences("gradient", found.gradients, expected.gradients, stages, limit, least),
        _differences("buffer", found.buffers, buffers, stages, limit, floors),
    )


def _deviations(buffers: Tensors) -> dict[str, float]:
    """Of each running mean of a batch norm the norm of the deviations that it stands beside: it may be zero in theory,
    as behind another batch norm."""
    kind = "running_mean"
    beside = {name: buffers.get(f"{name.removesuffix(kind)}running_var") for name in buffers if name.endswith(kind)}
    return {name: math.sqrt(_norm(variance)) for name, variance in beside.items() if variance is not None}


def _differences(
    kind: str,
    found: Tensors,
    expected: Tensors,
    stages: Mapping[str, int | None],
    limit: float,
    floors: Mapping[str, float],
) -> tuple[Difference, ...]:
    """Every tensor of one kind, the largest relevant error first.  floors: by name norms below which nothing counts."""
    rows = []
    for name, reference in expected.items():
        size = _norm(reference) if reference is not None else 0.0
        off = _distance(found.get(name), reference)
        error = _ratio(off, size)
        close = error <= limit
        negligible = not close and off <= floors.get(name, 0.0)
        stage = stages.get(name)
        rows.append(
            Difference(name, kind, -1 if stage is None else stage, size, error, negligible, close or negligible)
        )
    return tuple(sorted(rows, key=_urgency))


def _urgency(d: Difference) -> tuple[bool, bool, float, str]:
    return d.ok, d.negligible, -math.inf if math.isnan(d.error) else -d.error, d.name


def _distance(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """Norm of a - b, where None is zero."""
    if a is None or b is None:
        present = a if a is not None else b
        return 0.0 if present is None else _norm(present)
    return _norm(_wide(a) - _wide(b))


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(_wide(tensor)))


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return dense(tensor.detach()).cpu().to(torch.complex128 if tensor.is_complex() else torch.float64)


def _ratio(off: float, size: float) -> float:
    if off == 0.0:
        return 0.0
    return off / size if size else math.inf


def _from_json(content: dict[str, Any]) -> Verification:
    rows: dict[str, Iterable[dict[str, Any]]] = {key: content[key] for key in ("gradients", "buffers")}
    lists = {key: tuple(Difference(**row) for row in value) for key, value in rows.items()}
    return Verification(**{**content, **lists})

"""What runs a kind of batch: an executor for its program, along the stages of the training plan, kept for the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopart.batch.batch import Batch
from autopart.capture import Captured
from autopart.capture.recent import Recent
from autopart.ir.graph import Graph, Size
from autopart.ir.plan import Decision
from autopart.passes.program.projection import check_gradients_stay, project_plan
from autopart.passes.program.routing import with_forward_only
from autopart.planning.derive.reduction import WHOLE, BatchRule
from autopart.runtime.activity import patient
from autopart.session.executors.evaluation import evaluated_rows, evaluation_decision, evaluation_rule
from autopart.session.executors.executor import Executor
from autopart.session.ranks.agreement import from_rank, together
from autopart.session.ranks.call_sync import digest_of
from autopart.session.standing import Standing
from autopart.session.step.data import micro_rows
from autopart.session.step.parts import SEVERAL, fitting_cut, of_micros, undivided

Kind = tuple[str, float, float, str]
"""A kind of batch: the mode, digests of the model's version and of the batch's signature, and how it is cut ("": as
planned, `_WHOLE` or `_APART`); equal on all ranks."""
_WHOLE = "one row"
_APART = "parts of several rows, each on one replica"
_KEEP = 32  # kinds of batches whose executor is kept


def largest_part(batch: Batch, mode: str, decision: Decision) -> Size:
    """Return the size of the largest part of this batch that is run at once.  decision: of the training plan."""
    return Size(max(micro_rows(batch, (), decision) if mode == "step" else evaluated_rows(mode, batch, decision)))


def projected(captured: Captured, planned: Graph, decision: Decision) -> Decision:
    """Return the decision of the training plan for a program that differs from the planned one.  Raises PlanError.

    Stages on which parameters were frozen or unfrozen may have lost or got their backward."""
    same = [(op.name, op.target) for op in captured.graph.ops] == [(op.name, op.target) for op in planned.ops]
    if same:
        return with_forward_only(decision, captured.graph.learning_ops())
    return replace(decision, stages=project_plan(captured.graph, planned, decision))


class KnownKinds:
    """The executors of the kinds of batches that came under the present plan; the one used longest ago goes first."""

    _standing: Standing

    def __init__(self) -> None:
        self._found: Recent[Kind, Executor] = Recent(_KEEP, lambda executor: executor.planned.program_bytes)

    def begin(self, standing: Standing, batch: Batch) -> None:
        """Begin under a plan for batches like this one."""
        self._standing = standing
        self._found.clear()
        self._found.add(self.kind("step", digest_of(repr(batch.signature())), batch.rows), standing.executor)

    def get(self, kind: Kind) -> Executor | None:
        """Return the executor of a kind, None if there is none yet."""
        return self._found.peek(kind)

    def used(self, kind: Kind) -> Executor:
        """Return the executor of a kind that is there, and keep it as the one used last."""
        executor = self._found.get(kind)
        assert executor is not None
        return executor

    def kind(self, mode: str, signature: float, rows: int | None) -> Kind:
        """Return the kind of a batch of this number of rows.  signature: digest of its signature."""
        version = digest_of(self._standing.context.captures.version)
        known = self._found.peek((mode, version, signature, ""))
        fitting = known.preparation.fitting if known is not None else None
        apart = known is not None and rows and fitting is not None and not fitting_cut(rows, known.decision, fitting)
        return mode, version, signature, _WHOLE if rows == 1 else _APART if apart else ""

    def executor(self, kind: Kind, batch: Batch, shards: tuple[int, ...] = ()) -> Executor:
        """Return the executor of a kind of batch, made at first use along the stages of the training plan.  Collective.

        A batch of another kind, or a model that was changed, may run another program than the one that was planned.
        """
        executor = self._found.get(kind)
        if executor is None:
            world = self._standing.context.world
            rule = self._evaluation_rule(batch) if kind[0] == "loss" and not kind[3] else None
            with together(world, "capturing the model"), patient("capturing the model"):
                executor = self._made(kind, batch, shards, rule)
            executor.agree_on_orders()
            self._found.add(kind, executor)
        return executor

    def _evaluation_rule(self, batch: Batch) -> BatchRule | None:
        """Return how an evaluated batch is cut, as the first rank finds it; None if it stays whole.  Collective."""
        context, decision, planned = self._standing.context, self._standing.plan.decision, self._standing.captured.graph
        if len(evaluated_rows("loss", batch, decision)) == 1:
            return None

        def derived() -> BatchRule | None:
            with patient("preparing the batch"):
                return evaluation_rule(context.captures, batch, planned, decision, context.options.loss_reduction)

        return from_rank(context.world, decision.stages[0].ranks[0], "preparing the batch", derived)

    def _made(self, kind: Kind, batch: Batch, shards: Sequence[int], rule: BatchRule | None) -> Executor:
        """Return what runs batches like this one.  rule: how they are cut in evaluation, None to leave them whole.
        Local; raises RefusedError."""
        context, decision, planned = self._standing.context, self._standing.plan.decision, self._standing.captured.graph
        mode, _, _, cut = kind
        if mode != "step":
            rows = evaluated_rows(mode, batch, decision) if rule is not None else (batch.rows or 1,)
            captured = context.captures(batch, Size(max(rows)), mode)
            evaluated = evaluation_decision(captured.graph, planned, decision, cut=rule is not None)
            return Executor(mode, context, captured, evaluated, rule)
        if cut:
            decision = undivided(decision if cut == _APART else of_micros(decision, 1))
        rows = fitting_cut(batch.rows or 1, decision, SEVERAL) if cut == _APART else micro_rows(batch, shards, decision)
        captured = context.captures(batch, Size(max(rows)), mode)
        own = projected(captured, planned, decision)
        check_gradients_stay(captured.graph, own.stages, planned, decision)
        executor = Executor(mode, context, captured, own, BatchRule(WHOLE) if cut == _WHOLE else None)
        executor.preparation.fitting = SEVERAL if cut == _APART else None
        return executor

    def clear(self) -> None:
        """Forget all executors."""
        self._found.clear()

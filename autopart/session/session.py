"""One rank of a running pipeline: it takes each batch to its executor, and runs it with the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from autopart.batch.batch import Batch
from autopart.batch.stand_in import with_rows
from autopart.ir.errors import BatchError, OtherProgramError
from autopart.runtime.activity import patient
from autopart.runtime.engine import BatchPlan
from autopart.session.executors.executor import Executor
from autopart.session.executors.kinds import Kind, largest_part
from autopart.session.executors.step_end import StepEnd
from autopart.session.lists import Samples
from autopart.session.ranks.agreement import FAILURES
from autopart.session.ranks.call_sync import STEP_FAILED, Given, digest_of
from autopart.session.session_plan import SessionPlan
from autopart.session.step.data import (
    Arguments,
    as_shard,
    micro_rows,
    own_rows,
    rows_of_shards,
    shared_stand_in,
)  # fmt: skip
from autopart.session.step.parts import ONE, SEVERAL, fitting_cut, warn_of_other_batches

_CALLS = {"step": "step", "loss": "eval_loss", "predict": "predict"}
"""The call of a pipe by the mode in which the model is captured."""


class Session(SessionPlan):
    """One rank of a running pipeline; every rank has one, and calls its methods in the same order."""

    _batches_compared = False

    # -- running ---------------------------------------------------------------------------------------------------

    def loss(
        self,
        mode: str,
        arguments: Arguments,
        step: int = 0,
        *,
        sharded: bool = False,
        scale: float = 1.0,
        unscaled: float | None = None,
        samples: Samples | None = None,
    ) -> StepEnd:
        """Return how a batch ended: its loss, and the first gradient that is not finite ("" if all are, or are not
        checked).

        In mode "step" gradients are accumulated, unless one is not finite.  step: for random numbers.  sharded: whether
        each replica of the first stage is given its own rows.  scale: of the loss, for its backward.  unscaled: what
        gradients are divided by before they are checked, None to leave them.  samples: names of the rows (`_begun`).
        Collective."""
        with self.calls.collective(STEP_FAILED if mode == "step" else f"a {_CALLS[mode]} failed"):
            executor, _, plan = self.planned_batch(mode, arguments, step, scale, sharded=sharded, samples=samples)
            with self.calls.running(STEP_FAILED):
                end = executor.loss(plan, self.spans if mode == "step" else None, unscaled=unscaled)
            for each in self.calls.listeners if mode == "step" else ():
                each.step_ended(end)
            return end

    def predict(self, arguments: Arguments) -> Any:
        """Return what the model returns in eval mode, on every rank, on the CPU.  Collective."""
        with self.calls.collective("a prediction failed"):
            executor, batch, plan = self.planned_batch("predict", arguments)
            with self.calls.running("a prediction failed"):
                return executor.predict(batch, plan)

    # -- the road of a batch, up to its plan (`Executor.plan`) -----------------------------------------------------

    def own_batch(
        self, mode: str, arguments: Arguments, *, sharded: bool, samples: Samples | None = None
    ) -> tuple[Batch | None, str, Sequence[float] | None, BaseException | None]:
        """Return this rank's batch of a call, its signature, what it counts of it (None: not yet, or a shard), and what
        is wrong with it, which all ranks will raise.  Local."""
        batch: Batch | None = None
        try:
            batch = self._read(arguments, mode)
            self.follow_model(training=mode == "step")
            if batch is None:  # the counts of others are enough, unless buffers have to be compared here
                return None, "", None if self.plan.decision.token_slices else (), None
            if sharded:
                batch = as_shard(batch, self._captured)
                batch = self._begun(batch, mode, samples, sharded=True)
                return batch, repr(batch.signature()), None, None
            with patient("capturing the model"):
                batch = self.captures.settled(batch, largest_part(batch, mode, self.plan.decision), mode)
                batch = self._begun(batch, mode, samples, sharded=False)
            signature = repr(batch.signature())
            known = self._kinds.get(self._kind(mode, digest_of(signature), batch.rows))
            return batch, signature, known.count(batch) if known is not None else None, None
        except FAILURES as error:
            return batch, "", None, error

    def _begun(self, batch: Batch, mode: str, samples: Samples | None, *, sharded: bool) -> Batch:
        """Return the batch with what the plan begins with, if it begins behind frozen layers: in this rank's rows, read
        if they are kept under these names of the samples, else computed.  Local."""
        steps = [step for step in self.batch_steps if step.active] if mode == "step" else []
        if not steps:
            return batch
        rows, first, rank = batch.rows or 0, self.plan.stages[0], self.world.rank
        own: Sequence[int] = range(rows) if sharded and rank in first.ranks else ()
        if not sharded and rank in first.ranks:
            cut = micro_rows(batch, (), self.plan.decision)
            own = own_rows(cut, first.division, first.ranks.index(rank))
            if cut != fitting_cut(rows, self.plan.decision, SEVERAL):  # parts of one row may run on another replica
                own = range(rows)
        for step in steps:
            batch = step.extended(batch, samples, own, self.tensors.held)
        return batch

    def planned_batch(
        self,
        mode: str,
        arguments: Arguments,
        step: int = 0,
        scale: float = 1.0,
        *,
        sharded: bool = False,
        samples: Samples | None = None,
    ) -> tuple[Executor, Batch, BatchPlan]:
        """Return the executor of the batch of a call, the batch as this rank has it, and this rank's plan for it.
        Collective; raises on all ranks what any rank finds wrong.

        A batch of a kind that came before takes one exchange, and another if shards are given.
        """
        batch, signature, counts, failure = self.own_batch(mode, arguments, sharded=sharded, samples=samples)
        version = self.captures.version
        needed, key = self.needing if mode == "step" else self.needing[:1], (self.options.seed, step)
        settle = self.calls.enter(
            _CALLS[mode], failure, needed=needed, signature=signature, version=version,
            rows=(batch.rows or 0) if batch is not None else 0, scale=scale, sharded=sharded, counts=counts,
        )  # fmt: skip
        if batch is not None and counts is not None and failure is None:
            kind = self._kind(mode, digest_of(signature), batch.rows)
            executor = self._kinds.get(kind)
            assert executor is not None  # it counted the batch
            if executor.begin(batch, counts):
                agree = partial(self._agree, settle, kind, batch, needed[0])
                plan = replace(executor.plan(batch, key, scale), agree=agree)
                self.last_shares, self.last_executor = (plan.rows, executor.shares), executor
                return executor, batch, plan
        given = settle()
        if mode == "step" and not (sharded or self._batches_compared):
            self._batches_compared = True
            warn_of_other_batches(self.world, batch, self.needing)
        shards = given.shards
        kind = self._kind(mode, given.signature, sum(shards) if sharded else given.rows)
        known = self._kinds.get(kind)
        stand_in = known.stand_in if known is not None else None
        if stand_in is None and (given.missing or sharded):
            stand_in = shared_stand_in(self.world, batch, needed[0], given.signature)
        try:
            if shards:
                rows_of_shards(shards, self.plan.decision)
        except BatchError as error:
            raise self.world.known(error) from None
        if batch is None or (sharded and self.world.rank not in needed):
            assert stand_in is not None
            batch = with_rows(stand_in, sum(shards) if sharded else given.rows)
        executor = self._agreed(kind, batch, given.counts, shards, stand_in)
        plan = executor.plan(batch, key, scale, shards)
        self.last_shares, self.last_executor = (plan.rows, executor.shares), executor
        return executor, batch, plan

    def _kind(self, mode: str, signature: float, rows: int | None) -> Kind:
        return self._kinds.kind(mode, digest_of(self.captures.version), signature, rows)

    def _agreed(
        self, kind: Kind, batch: Batch, counts: Sequence[float], shards: tuple[int, ...], stand_in: Batch | None
    ) -> Executor:
        """Return the executor of a batch once it knows its shares.  Collective.

        Where the model runs another program on a single row, there are fewer micro-batches, or each runs on one replica
        of a stage, so that no part has one."""
        executor = self._kinds.executor(kind, batch, shards)
        executor.stand_in = stand_in
        try:
            executor.agree(batch, counts, shards)
        except OtherProgramError:
            if shards or batch.rows in (None, 1) or executor.fitting is not None:
                raise
            executor.fitting = ONE if executor.planned.graph.rows == 1 else SEVERAL
            kind = self._kinds.kind(*kind[:3], batch.rows)
            executor = self._kinds.executor(kind, batch)
            executor.stand_in = stand_in
            executor.agree(batch, ())
        return executor

    def _agree(self, settle: Callable[[], Given], kind: Kind, batch: Batch, first: int) -> None:
        """Wait until every rank makes this step with a batch like this rank's, which has begun with it.  Collective;
        raises on all ranks what any rank finds wrong."""
        given = settle()
        executor = self._kinds.executor(kind, batch)
        if given.missing and executor.stand_in is None:
            executor.stand_in = shared_stand_in(self.world, batch, first, given.signature)
        executor.agree(batch, given.counts)

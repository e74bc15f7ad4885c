"""The road of a batch on one rank, up to its plan (`Executor.plan`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from autopart.batch.batch import Batch, BatchReader
from autopart.batch.stand_in import with_rows
from autopart.capture import CaptureCache, Captured
from autopart.capture.python.guards import check_autocast
from autopart.capture.python.reads.masks import with_masks
from autopart.ir.errors import BatchError, OtherProgramError
from autopart.options import Options
from autopart.runtime.activity import patient, set_activity
from autopart.runtime.group.world import World
from autopart.runtime.player import BatchPlan
from autopart.session.executors.executor import Executor
from autopart.session.executors.kinds import Kind, KnownKinds, largest_part
from autopart.session.lists import BATCH_STEPS, Samples
from autopart.session.ranks.agreement import FAILURES
from autopart.session.ranks.call_sync import Calls, Given, digest_of
from autopart.session.standing import Standing
from autopart.session.step.data import (
    Arguments,
    micro_rows,
    one_batch,
    own_rows,
    refuse_target,
    rows_of_shards,
    shared_stand_in,
)  # fmt: skip
from autopart.session.step.parts import ONE, SEVERAL, fitting_cut, warn_of_other_batches

CALLS = {"step": "step", "loss": "eval_loss", "predict": "predict"}
"""The call of a pipe by the mode in which the model is captured."""


class Road:
    """Takes batches to their executors and plans, together with the other ranks.

    steps: what is done to each batch (`lists.BATCH_STEPS`).  rows: of each micro-batch of the last batch.  executor:
    that ran it, None before the first one.
    """

    _standing: Standing

    def __init__(self, world: World, calls: Calls, captures: CaptureCache, options: Options) -> None:
        self._world, self._calls, self._captures, self._options = world, calls, captures, options
        self._reader = BatchReader(options.rows_axis)
        self._kinds = KnownKinds()
        self._compared = False
        self.steps = [make(captures, world.device) for make in BATCH_STEPS]
        self.rows: tuple[int, ...] = ()
        self.executor: Executor | None = None

    def begin(self, standing: Standing, batch: Batch) -> None:
        """Go on under a plan for batches like this one.  Local."""
        self._standing = standing
        for step in self.steps:
            step.begin(batch, max(standing.plan.micro_rows))
        self._kinds.begin(standing, batch)

    @property
    def captured(self) -> Captured:
        """The capture of the last batch, at the size of its largest micro-batch; before the first one, the planned."""
        return self._standing.captured if self.executor is None else self.executor.planned

    @property
    def ran_as_planned(self) -> bool:
        """Whether the last batch was like the one that the plan is for, and as large."""
        return self.executor is self._standing.executor and self.rows == self._standing.plan.micro_rows

    def read(self, arguments: Arguments, mode: str = "step") -> Batch | None:
        """Return the batch of a call taken apart, None if this rank is given none; in a prediction without target."""
        batch = one_batch(arguments)
        if batch is None:
            return None
        if mode == "predict" and self._options.loss_fn is not None:
            refuse_target(self._captures.model, batch)
        return self._reader.read(batch, with_target=self._options.loss_fn is not None and mode != "predict")

    def follow_model(self, *, training: bool) -> None:
        """Compare the model with its captures, and bring its new values and flags to what this rank holds.  training:
        whether training flags count.  Raises RefusedError for a change that no run can follow."""
        tensors = self._standing.context.tensors
        check_autocast(self._world.device.type)
        set_activity("comparing the model with its capture")
        tensors.check()
        if toggled := tensors.masters.toggled():
            for name, parameter in self._captures.trained.named_parameters():
                parameter.requires_grad_(toggled.get(name, parameter.requires_grad))
        if self._captures.refresh(training=training):
            tensors.follow_flags(self._captures.trained.named_parameters())
        tensors.masters.write()

    def own_batch(
        self, mode: str, arguments: Arguments, *, sharded: bool, samples: Samples | None = None
    ) -> tuple[Batch | None, str, Sequence[float] | None, BaseException | None]:
        """Return this rank's batch of a call, its signature, what it counts of it (None: not yet, or a shard), and what
        is wrong with it, which all ranks will raise.  Local."""
        batch: Batch | None = None
        try:
            batch = self.read(arguments, mode)
            self.follow_model(training=mode == "step")
            if batch is None:  # the counts of others are enough, unless buffers have to be compared here
                return None, "", None if self._standing.plan.decision.token_slices else (), None
            if sharded:
                questions = self._standing.captured.questions
                if questions is not None and len(questions.asked) > len(questions.asked_by_python):
                    batch = with_masks(batch, ())  # shortcuts for attention masks need the whole batch
                batch = self._begun(batch, mode, samples, sharded=True)
                return batch, repr(batch.signature()), None, None
            with patient("capturing the model"):
                batch = self._captures.settled(batch, largest_part(batch, mode, self._standing.plan.decision), mode)
                batch = self._begun(batch, mode, samples, sharded=False)
            signature = repr(batch.signature())
            known = self._kinds.get(self._kinds.kind(mode, digest_of(signature), batch.rows))
            return batch, signature, known.preparation.count(batch) if known is not None else None, None
        except FAILURES as error:
            return batch, "", None, error

    def _begun(self, batch: Batch, mode: str, samples: Samples | None, *, sharded: bool) -> Batch:
        """Return the batch with what the plan begins with, if it begins behind frozen layers: in this rank's rows, read
        if they are kept under these names of the samples, else computed.  Local."""
        steps = [step for step in self.steps if step.active] if mode == "step" else []
        if not steps:
            return batch
        rows, decision, rank = batch.rows or 0, self._standing.plan.decision, self._world.rank
        first = decision.stages[0]
        own: Sequence[int] = range(rows) if sharded and rank in first.ranks else ()
        if not sharded and rank in first.ranks:
            cut = micro_rows(batch, (), decision)
            own = own_rows(cut, first.division, first.ranks.index(rank))
            if cut != fitting_cut(rows, decision, SEVERAL):  # parts of one row may run on another replica
                own = range(rows)
        for step in steps:
            batch = step.extended(batch, samples, own, self._standing.context.tensors.held)
        return batch

    def plan(
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
        version = self._captures.version
        needing = self._standing.needing
        needed = needing if mode == "step" else needing[: self._standing.plan.decision.shards]
        key = self._options.seed, step
        settle = self._calls.enter(
            CALLS[mode], failure, needed=needed, signature=signature, version=version,
            rows=(batch.rows or 0) if batch is not None else 0, scale=scale, sharded=sharded, counts=counts,
            step=step,
        )  # fmt: skip
        if batch is not None and counts is not None:
            kind = self._kinds.kind(mode, digest_of(signature), batch.rows)
            executor = self._kinds.get(kind)
            assert executor is not None  # it counted the batch
            if executor.begin(batch, counts):
                agree = partial(self._agree, settle, kind, batch, needed[0])
                plan = replace(executor.plan(batch, key, scale), agree=agree)
                self.rows, self.executor = plan.rows, executor
                return executor, batch, plan
        given = settle()
        if mode == "step" and not (sharded or self._compared):
            self._compared = True
            warn_of_other_batches(self._world, batch, needing)
        shards = given.shards
        rows = sum(shards) if sharded else given.rows
        kind = self._kinds.kind(mode, given.signature, rows)
        known = self._kinds.get(kind)
        stand_in = known.stand_in if known is not None else None
        if stand_in is None and (given.missing or sharded):
            stand_in = shared_stand_in(self._world, batch, needed[0], given.signature)
        try:
            if shards:
                rows_of_shards(shards, self._standing.plan.decision)
        except BatchError as error:
            raise self._world.known(error) from None
        if batch is None or (sharded and self._world.rank not in needed):
            assert stand_in is not None
            batch = with_rows(stand_in, rows)
        executor = self._agreed(kind, batch, given.counts, shards, stand_in)
        plan = executor.plan(batch, key, scale, shards)
        self.rows, self.executor = plan.rows, executor
        return executor, batch, plan

    def _agreed(
        self, kind: Kind, batch: Batch, counts: Sequence[float], shards: tuple[int, ...], stand_in: Batch | None
    ) -> Executor:
        """Return the executor of a batch once it knows its shares.  Collective.

        Where the model runs another program on a single row, there are fewer micro-batches, or each runs on one replica
        of a stage, so that no part has one."""
        executor = self._kinds.executor(kind, batch, shards)
        executor.stand_in = stand_in
        try:
            executor.preparation.agree(batch, counts, shards)
        except OtherProgramError:
            if shards or batch.rows in (None, 1) or executor.preparation.fitting is not None:
                raise
            executor.preparation.fitting = ONE if executor.planned.graph.rows == 1 else SEVERAL
            kind = self._kinds.kind(kind[0], kind[2], batch.rows)
            executor = self._kinds.executor(kind, batch)
            executor.stand_in = stand_in
            executor.preparation.agree(batch, ())
        return executor

    def _agree(self, settle: Callable[[], Given], kind: Kind, batch: Batch, first: int) -> None:
        """Wait until every rank makes this step with a batch like this rank's, which has begun with it.  Collective;
        raises on all ranks what any rank finds wrong."""
        given = settle()
        executor = self._kinds.used(kind)
        if given.missing and executor.stand_in is None:
            executor.stand_in = shared_stand_in(self._world, batch, first, given.signature)
        executor.preparation.agree(batch, given.counts)

    def close(self) -> None:
        """Forget all executors, and free what batch steps keep."""
        self._kinds.clear()
        for step in self.steps:
            step.close()

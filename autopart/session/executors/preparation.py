"""How each batch of one kind is prepared on one rank: the code for its rows, and its shares in the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from autopart.batch.batch import Batch
from autopart.capture import Captured
from autopart.ir.graph import Size
from autopart.ir.plan import Decision
from autopart.passes.program.routing import divided_values
from autopart.planning.derive.family import require_same_program
from autopart.planning.derive.reduction import WHOLE, BatchRule, family_of_batch, loss_reduction, rule_of
from autopart.runtime.activity import patient
from autopart.session.executors.context import RankContext
from autopart.session.ranks.agreement import FAILURES, from_rank, raise_first
from autopart.session.ranks.call_sync import different_batches
from autopart.session.step.batch_counts import BatchCounts
from autopart.session.step.data import micro_rows, require_no_questions
from autopart.session.step.loss_shares import Shares, count_width, counting_ranks, loss_shares, pieces_of
from autopart.session.step.parts import code_sizes, digest, inputs_of
from autopart.session.step.synced import require_weights
from autopart.stagecode.stage_code import StageCode


class Preparation:
    """Prepares the batches of one kind, at any number of rows.

    shares: of the last batch in its loss.  fitting: the rows that parts of a batch may have, None for any
    (`micro_rows`).
    """

    def __init__(
        self,
        mode: str,
        context: RankContext,
        planned: Captured,
        decision: Decision,
        code: StageCode,
        rule: BatchRule | None,
        *,
        synced: bool,
    ) -> None:
        """Take what an executor is made of.  rule: how such batches are cut; derived from the first one if None.
        synced: whether stages share batch statistics."""
        self._mode, self._context, self._world = mode, context, context.world
        self._planned, self._graph, self._decision = planned, planned.graph, decision
        self._code, self._synced = code, synced
        self._rank = rank = context.world.rank
        self._stages = {stage: decision.stages[stage] for stage in decision.stages_of_rank(rank)}
        self._divisions = tuple(dict.fromkeys(stage.division for stage in decision.stages))
        self._first_rank = decision.stages[0].ranks[0]
        whole = len(decision.micro_rows) == 1 and not any(each.splits for each in self._divisions)
        self._given_rule = BatchRule(WHOLE) if whole else rule
        self._counts = BatchCounts(context.tensors, self._world.device)
        self._agreed: dict[tuple[int, ...], Shares | None] = {}
        self.shares: Shares = {}
        self.fitting: range | None = None

    @property
    def rule(self) -> BatchRule:  # known from the first batch on
        assert self._given_rule is not None
        return self._given_rule

    def rows_of(self, batch: Batch, shards: Sequence[int] = (), before: int = 0) -> tuple[int, ...]:
        """Return the rows of each micro-batch of a batch.  shards, before: as for `agree`."""
        return (0,) * before + micro_rows(batch, shards, self._decision, self.fitting)

    def count(self, batch: Batch) -> list[float] | None:
        """Return what this rank counts of a whole batch (`_counted`), None if its code is not made yet on all ranks.
        Local; raises BatchError and RefusedError."""
        rows = self.rows_of(batch)
        if rows not in self._agreed:
            return None
        self._code.checks.check_constants()
        return self._counted(batch, rows, sharded=False)

    def begin(self, batch: Batch, counts: Sequence[float]) -> bool:
        """Return whether this rank alone knows the shares of a batch, and take them.  Local.

        counts: of this rank (`count`), which are those of all pieces on the first rank."""
        rows = self.rows_of(batch)
        if rows not in self._agreed or self._mode != "step" or self._synced:
            return False
        if self._agreed[rows] is None and self._rank != self._first_rank:
            return False
        self.shares = self._shares(rows, counts[1:], sharded=False)
        return True

    def agree(self, batch: Batch, counts: Sequence[float], shards: Sequence[int] = (), before: int = 0) -> None:
        """Find the shares of a batch in its loss together with all ranks.  Collective; raises BatchError on all ranks.

        counts: of the first rank, () to make the code and count now.  shards: rows that each replica of the first stage
        was given, () if each was given the whole batch.  before: offset of the round robin, in micro-batches.
        """
        rows = self.rows_of(batch, shards, before)
        counts = counts or self._prepare_together(batch, rows, sharded=bool(shards))
        self.shares = self._shares(rows, counts[1:], sharded=bool(shards))
        if self._synced and (weightless := require_weights(rows, self.shares)) is not None:
            raise self._world.known(weightless)

    def _prepare_together(self, batch: Batch, rows: tuple[int, ...], *, sharded: bool) -> list[float]:
        """Make the code for this batch, and return a digest and the counts of all pieces.  Collective; raises on all
        ranks what any rank finds wrong."""
        if self._given_rule is None:
            derived = partial(self._derived, batch, rows)
            self._given_rule = from_rank(self._world, self._first_rank, "preparing the batch", derived)
        mine: list[float] = []
        failure: BaseException | None = None
        try:
            with patient("preparing the batch"):
                if sharded:
                    require_no_questions(self._planned)
                self.prepare(batch, rows, sharded=sharded)
                mine = self._counted(batch, rows, sharded=sharded)
        except FAILURES as error:
            failure = error
        width, own, first = count_width(self.rule.reduction), iter(mine), self._decision.stages[0].ranks
        seen = next(own, -math.inf) if self._rank in first else -math.inf
        owners = counting_ranks(rows, self._divisions, first, sharded=sharded) if width else ()
        pieces = [next(own, 0.0) if rank == self._rank else -math.inf for rank in owners for _ in range(width)]
        told = [float(failure is not None), seen, -abs(seen), *pieces]
        failed, most, least, *counts = self._world.reduce_numbers(told)
        if failed:
            raise_first(self._world, failure, "preparing the batch")
        if most != -least:
            raise self._world.known(different_batches(first))
        if not sharded:
            self._agreed[rows] = None if width else loss_shares(self.rule.reduction, rows, self._divisions)
        return [most, *counts]

    def _derived(self, batch: Batch, rows: Sequence[int]) -> BatchRule:
        """Return how such batches are cut: a Python value or a length in the batch may choose another loss than the one
        that was planned for."""
        with patient("preparing the batch"):
            several = rows if len(rows) > 1 else [*rows, *rows]
            family = family_of_batch(self._context.captures, batch, several)
            reduction = loss_reduction(family, (several,), self._context.options.loss_reduction)
            divided = divided_values(self._decision, self._graph, self._code.prologue_of(batch))
            return rule_of(family, reduction, *divided)

    def prepare(self, batch: Batch, rows: Sequence[int], *, sharded: bool = False) -> None:
        """Make the code for every number of rows.  Local; raises RefusedError when the model runs another program at
        these shapes than the one that was planned."""
        wanted: dict[int, list[int]] = {}
        for number, stage in self._stages.items():
            for own in code_sizes(stage, self._rank, rows):
                wanted.setdefault(own, []).append(number)
        if not wanted:  # a rank without stages needs the shapes of what the model returns
            wanted = {own: [] for own in code_sizes(self._decision.stages[0], self._first_rank, rows)}
        for own in sorted(wanted, reverse=True):
            if not self._code.has(own, wanted[own]):
                self._code.add(self.capture(batch, own), batch, wanted[own], self.rule)
        if not set(self.rule.reduction.counted()) <= set(self._graph.inputs):
            for own in sorted(set(self._own_sizes(tuple(rows), sharded=sharded)), reverse=True):
                self._counts.add(self.capture(batch, own), self.rule.reduction)
        self._code.checks.check_constants()

    def capture(self, batch: Batch, rows: int) -> Captured:
        """Return the capture of a batch at this number of rows.  Raises RefusedError for another program."""
        captured = self._context.captures(batch, Size(rows), self._mode)
        require_same_program(captured.graph, self._graph)
        return captured

    def _own_sizes(self, rows: tuple[int, ...], *, sharded: bool) -> list[int]:
        ranks = counting_ranks(rows, self._divisions, self._decision.stages[0].ranks, sharded=sharded)
        pieces = zip(ranks, pieces_of(rows, self._divisions), strict=True)
        return [end - first for rank, (_, first, end) in pieces if rank == self._rank]

    def _counted(self, batch: Batch, rows: tuple[int, ...], *, sharded: bool) -> list[float]:
        """Return a digest of what replicas of the first stage share, then the counts of this rank's pieces."""
        seen = 0.0
        if 0 in self._stages and len(self._stages[0].ranks) > 1:
            seen = digest(t for t, split in batch.plain.tensors_and_splits() if not (split and sharded))
        sizes = self._own_sizes(rows, sharded=sharded)
        if sizes:
            self._code.checks.check_masks(batch, self._graph.inputs)
        if not count_width(self.rule.reduction):
            return [seen]
        inputs = inputs_of(batch, self._graph.inputs, sizes, self._world.device, range(len(sizes)))
        alone = len(pieces_of(rows, self._divisions)) == 1
        return [seen, *self._counts.measured(self.rule.reduction, sizes, list(inputs.values()), alone=alone)]

    def _shares(self, rows: tuple[int, ...], counts: Sequence[float], *, sharded: bool) -> Shares:
        """Return the shares of replicas in the loss of a batch.  counts: of all pieces."""
        if not sharded and (known := self._agreed.get(rows)) is not None:
            return known
        return loss_shares(self.rule.reduction, rows, self._divisions, counts)

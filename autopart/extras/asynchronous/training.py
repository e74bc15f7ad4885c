"""Asynchronous training on one rank: batch after batch enters the pipeline, which stays full until a flush.

Every rank takes batches from its own iterable, a few ahead (`_Fetched`), and tells the others with an exchange that
nobody waits for before that batch enters: so ranks may be as many batches apart as the pipeline is deep.  The exchange
also carries the loss of a batch that is through.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopart.batch.batch import Batch
from autopart.batch.stand_in import with_rows
from autopart.ir.errors import UsageError
from autopart.ir.plan import Plan
from autopart.passes.program.stream import streaming_of
from autopart.runtime.activity import set_activity
from autopart.runtime.player import BatchPlan
from autopart.runtime.stream import StreamEngine
from autopart.session.executors.executor import Executor
from autopart.session.ranks.agreement import FAILURES
from autopart.session.ranks.call_sync import END, Given
from autopart.session.ranks.listener import Listener
from autopart.session.step.batch_counts import weighted_loss
from autopart.state.core import Core

_LEFT = "Stages may be some updates apart, and buffers as they were at the last flush"


@dataclass
class _Fetched:
    """A batch that was taken from this rank's iterable.

    settle: waits for what all ranks were given.  about: number of the batch whose loss came with it, -1 if none did.
    taken: whether there is one, good or not.
    """

    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    batch: Batch | None
    signature: str
    ended: bool
    about: int
    settle: Callable[[], Given]
    taken: bool


@dataclass
class _Live:
    """The batches that entered since the last flush.  kind: what all of them have in common.  first: number of the
    first.  shares: of this rank's micro-batches in the losses that are not taken yet, by batch."""

    executor: Executor
    engine: StreamEngine
    kind: tuple[float, int, str]
    first: int
    shares: dict[int, Sequence[float]]


class Training(Listener):
    """One call of `pipe.train`; other calls wait until what is in flight has come back.

    stepping: the optimizers and schedulers of this rank, in the order of their steps.
    """

    def __init__(self, core: Core, stepping: Sequence[Any]) -> None:
        self._core, self._session, self._stepping = core, core.session, stepping
        session = self._session
        self._ahead = len(session.plan.stages) + 1
        self._home = session.standing.executor.home(session.graph.outputs[0])
        rhythm = streaming_of(session.plan.decision)
        self._behind = -(-rhythm.lags[self._home] // rhythm.micros)  # batches until the loss of one is complete
        self._fetched: deque[_Fetched] = deque()
        self._engines: dict[tuple[Executor, int], StreamEngine] = {}
        self._live: _Live | None = None
        self._entered = self._known = 0  # batches, and those of which all ranks know the loss
        self._ready: deque[float] = deque()
        self._own: dict[int, float] = {}
        self._over = ""

    # -- for the user's loop ---------------------------------------------------------------------------------------

    def losses(self, batches: Iterable[Any]) -> Iterator[torch.Tensor]:
        """Yield the loss of each batch, in order, when all ranks know it.  Collective."""
        try:
            yield from self._losses(batches)
        finally:
            if not self._over:  # the loop was left: batches that were taken ahead come again
                for part in self._core.parts.values():
                    part.batches_dropped()

    def _losses(self, batches: Iterable[Any]) -> Iterator[torch.Tensor]:
        source, more = iter(batches), True
        while more:
            if self._over:
                raise UsageError(
                    f"pipe.train was ended by {self._over}",
                    why="its optimizers update the parameters that this rank had before",
                    fix="call pipe.train again, with the batches that are left",
                )
            with self._session.calls.collective("training failed"), self._session.calls.running("training failed"):
                try:
                    more = self._advance(source)
                except FAILURES as error:
                    if not self._session.world.is_known(error):
                        raise
                    self._drop_fetched()  # no rank takes another batch
                    raise self._session.world.known(error) from error.__cause__
            while self._ready:
                graph = self._session.graph
                output = graph.value_map()[graph.outputs[0]]
                yield torch.tensor(self._ready.popleft(), dtype=getattr(torch, output.dtype))

    def before_call(self, name: str) -> None:
        """Let what is in flight come back before any other call."""
        if name not in ("train", "flush"):
            self.flush()

    def brought_up(self, plan: Plan) -> None:
        """End: the optimizers update the parameters of another plan."""
        self.end("another plan")

    def flush(self) -> None:
        """Let all batches that have entered come back: all stages have then made the same updates.  Collective."""
        if self._live is None:
            return
        with self._session.calls.running("a flush failed"):
            self._session.calls.enter("flush")()
            self._empty()

    def end(self, reason: str) -> None:
        """Flush, and let no further batch enter.  Collective."""
        with self._session.calls.collective("a flush failed"):
            self.flush()
            self._drop_fetched()
        self._over = self._over or reason

    # -- one round -------------------------------------------------------------------------------------------------

    def _advance(self, source: Iterator[Any]) -> bool:
        """Let one batch enter; return False when they have ended, and all that entered have come back.

        Ahead of the first batch of a training nothing is fetched: only then every rank can count what is in them."""
        wanted = self._ahead if self._entered else 1
        while len(self._fetched) < wanted:
            self._fetched.append(self._fetch(source))
            self.late = wanted > 1
        given = self._fetched.popleft()
        if given.taken:
            for part in self._core.parts.values():  # also over one that is refused: `train` goes on with the next
                part.batch_given()
        found = given.settle()
        if given.about == self._known:  # all ranks have told of the loss of this batch
            self._take(found.loss)
        if found.ended:
            if self._live is not None:
                self._empty()
            self._drop_fetched()
            self._over = "the end of its batches"
            return False
        self._enter(given, found)
        return True

    def _fetch(self, source: Iterator[Any]) -> _Fetched:
        """Take a batch, and tell all ranks of it without waiting."""
        session, failure = self._session, None
        batch, signature, counts = None, "", None
        arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((None,), {})
        taken = False
        ended = bool(self._fetched) and self._fetched[-1].ended
        set_activity("taking a batch from the iterable of train")
        try:
            arguments = ((END if ended else next(source, END),), {})
            ended = arguments[0][0] is END
            if not ended:
                for part in self._core.parts.values():
                    part.batch_taken()
                taken = True
                batch, signature, counts, failure = session.road.own_batch("step", arguments, sharded=False)
        except FAILURES as error:
            failure = error
        about = self._entered - 1 - self._behind
        settle = session.calls.enter(
            "train", failure, needed=session.standing.needing, signature=END if ended else signature,
            version=session.captures.version, rows=(batch.rows or 0) if batch is not None else 0,
            counts=counts, ended=ended, loss=self._own_loss(about),
        )  # fmt: skip
        return _Fetched(arguments, batch, signature, ended, about, settle, taken)

    def _enter(self, given: _Fetched, found: Given) -> None:
        """Let a batch enter, behind those of its kind; others leave first."""
        kind = found.signature, found.rows, self._session.captures.version
        step = self._core.steps
        live = self._live
        if live is not None and (kind != live.kind or (found.missing and live.executor.stand_in is None)):
            self._empty()
            live = None
        if live is None:
            live, plan = self._start(given, kind, step)
            self._live, self.leaves = live, _LEFT
        else:
            plan = self._next_plan(live, given.batch, found, step)
        live.shares[self._entered] = [share[0] for share in plan.shares.get(self._home, ())][live.engine.turn :]
        live.engine.spans = self._session.spans
        self._core.count_step()
        live.engine.enter(plan)
        self._entered += 1

    def _start(self, given: _Fetched, kind: tuple[float, int, str], step: int) -> tuple[_Live, BatchPlan]:
        """Prepare for a kind of batch while nothing is in flight, as a step does.  Collective."""
        executor, _, plan = self._session.road.plan("step", given.arguments, step)
        if plan.agree is not None:
            plan.agree()
        key = executor, len(plan.rows)  # not its id, which another one may get
        if key not in self._engines:
            self._engines[key] = executor.stream(len(plan.rows), self._update)
        return _Live(executor, self._engines[key], kind, self._entered, {}), plan

    def _update(self) -> None:
        for one in self._stepping:
            one.step()

    def _next_plan(self, live: _Live, batch: Batch | None, found: Given, step: int) -> BatchPlan:
        """Return the plan of a batch that follows others of its kind."""
        if batch is None:
            assert live.executor.stand_in is not None
            batch = with_rows(live.executor.stand_in, live.kind[1])
        before, key = live.engine.turn, (self._session.options.seed, step)
        # not counted: those that were taken before the first of their kind
        live.executor.preparation.agree(batch, found.counts, before=before)
        return live.executor.plan(batch, key, before=before)

    # -- losses and the end ----------------------------------------------------------------------------------------

    def _own_loss(self, number: int) -> float:
        """Return this rank's part of the loss of a batch that has passed its last stage; 0 if it has none."""
        live = self._live
        if live is None or number < live.first:
            return self._own.get(number, 0.0)
        if number not in self._own:
            found = live.engine.losses.pop(number - live.first, {})
            self._own[number] = weighted_loss(found, live.shares.pop(number))
        return self._own[number]

    def _take(self, loss: float) -> None:
        self._ready.append(loss)
        self._own.pop(self._known, None)
        self._known += 1

    def _empty(self) -> None:
        """Play until nothing is in flight, and let all ranks know the losses."""
        live = self._live
        assert live is not None
        live.engine.spans = self._session.spans
        live.engine.flush()
        mine = [self._own_loss(number) for number in range(self._known, self._entered)]
        for loss in self._session.world.reduce_numbers((), mine) if mine else ():
            self._take(loss)
        live.engine.losses.clear()
        self._live, self.leaves = None, ""

    def _drop_fetched(self) -> None:
        """Forget the batches that were taken ahead, and what is wrong with them: all ranks have told of as many."""
        for part in self._core.parts.values():
            part.batches_dropped()
        while self._fetched:
            try:
                self._fetched.popleft().settle()
            except FAILURES as error:
                if not self._session.world.is_known(error):
                    raise
        self.late = False

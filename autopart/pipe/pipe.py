"""The running pipeline, one object on every rank.

Methods that move data between ranks are collective: call them on all ranks, in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autopart.capture import CaptureCache
from autopart.ir.cluster import Cluster
from autopart.ir.errors import UsageError
from autopart.ir.timeline import Span, Timeline
from autopart.options import Options
from autopart.pipe.facts import Facts
from autopart.pipe.forward import fact, verb
from autopart.pipe.rows import EXTRAS, OfExtras
from autopart.pipe.state import State
from autopart.report.page.page import plan_fragment
from autopart.runtime.group.world import World
from autopart.session.lists import Samples
from autopart.state.core import Core
from autopart.state.misuse_guards import (
    outside_inference_mode,
    refuse_in_training,
    refuse_without_gradients,
    short_tracebacks,
    without_backward,
)
from autopart.state.module_surface import ModuleSurface
from autopart.state.scaler import WARN_AFTER, checked_scale, not_finite, refuse_ambiguous, warn_loss, warn_skipped
from autopart.state.state_dict import empty_foreign, sync_state


@short_tracebacks
class Pipe(OfExtras, ModuleSurface):
    """A planned, running training pipeline; made by `autopart.compile`.

    With a sample it is planned at once, without one at the first `step`.  It is a context manager; `close` ends it.
    After a step that failed while ranks were running, every further call raises RunError.

    Each rank trains only the parameters of its stage (`named_parameters`).  In the model that was compiled
    (`pipe.model`), parameters that other ranks train keep their first values until `sync_model` or `close`: make
    averages, norms and copies from `pipe.named_parameters()`, or after `sync_model()`.
    """

    def __init__(self, captures: CaptureCache, cluster: Cluster, options: Options, sample: Any = None) -> None:
        self._core = core = Core(captures, cluster, options)
        self.companions = core.companions
        core.add((Facts, State, *EXTRAS))
        if sample is not None:
            core.bring_up(((sample,), {}))
        elif first := captures.trained.without_values:  # an optimizer made before the first step would drive it
            raise UsageError(
                f"{first} is on the meta device, and compile was given no sample",
                why="this rank's part of the model has to exist before an optimizer is made for it",
                fix="pass sample=batch to compile, and weights=",
            )

    # -- running -------------------------------------------------------------------------------------------------

    def step(
        self,
        *args: Any,
        sharded: bool = False,
        scale: float | None = None,
        samples: Samples | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run one training step: forward and backward of every micro-batch; gradients are added to `.grad`.

        Takes a batch (a mapping, a tuple, a pair of both, a tensor; with loss_fn a pair of inputs and target), or the
        model's own positional and keyword arguments; None on a rank that needs no data (`needs_data`).  Returns the
        loss of the whole batch (0-dim, its backward done) on every rank.  Raises BatchError before anything is sent,
        StageError and WorkerError while running.

        sharded: whether each rank that needs data passes its own rows (`data_shard`, `data_rows`).  The step then
        equals a step over the whole batch, in which each micro-batch holds the next rows of every shard.

        scale: factor of the loss in the backward, above 0: n steps with `scale=1 / n` add up to the mean of their
        gradients.  The returned loss is not multiplied.

        samples: the number or name of each row's sample in the data set, on ranks that need data.  Under a plan that
        begins behind frozen layers (`replan(cache=...)`) their activations are kept under these names; without names
        they are computed in every step.  Other plans do not look at them.

        In fp16 the loss is scaled for the backward (`scaler`), and gradients are unscaled afterwards.  If one is not
        finite, no gradient is added and `skipped` is True: skip `optimizer.step()` then.
        """
        core = self._core
        core.require_open()
        refuse_without_gradients()
        factor = checked_scale(scale, core.model, by_keywords=not args)
        refuse_ambiguous("samples", samples, core.model, by_keywords=not args)
        session = core.running or core.bring_up((args, kwargs), sharded=sharded)
        refuse_in_training(session.plan, "pipe.step(batch)")
        scaler, how = core.scaler, core.options.non_finite
        known = 1.0 if scaler is None else scaler.scale
        unscaled = known if scaler is not None or how != "auto" else None
        with core.around_step(session, (*args, *kwargs.values())):
            end = session.loss(
                "step", (args, kwargs), core.steps, sharded=sharded, scale=known * factor, unscaled=unscaled,
                samples=samples,
            )  # fmt: skip
        loss, overflow = end.loss, end.not_finite
        core.count_step()
        if how == "auto" and scaler is None and not (core.warned or end.finite):
            core.warned = True
            warn_loss(loss.item(), core.steps)
        core.skipped = core.skipped + 1 if overflow else 0
        if scaler is not None:
            scaler.update(finite=not overflow)
        if overflow and how == "raise":
            raise session.world.known(not_finite(overflow, known))
        if core.skipped == WARN_AFTER:
            warn_skipped(overflow)
        return without_backward(loss)

    def eval_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the loss of a batch with the model in eval mode, without gradients.  Only the first rank of the first
        stage needs the batch; others may pass None."""
        with outside_inference_mode():
            return without_backward(self._core.session.loss("loss", (args, kwargs)).loss)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns in eval mode for this batch, on every rank, on the CPU.

        The batch holds no target; only the first rank of the first stage needs it.  Caches and other objects that are
        not tensors are left out of the result.
        """
        with outside_inference_mode():
            return self._core.session.predict((args, kwargs))

    def timeline(self, *args: Any, sharded: bool = False, **kwargs: Any) -> Timeline:
        """Run a training step as `step` does, and return what every rank did in it, in nanoseconds, on every rank.

        Times count from the start of the step on each rank.  `autopart.save_trace` writes a timeline for a viewer, and
        `autopart.simulate` returns the predicted one.  Raises what `step` raises.
        """
        core = self._core
        core.require_open()
        if core.running is None:
            core.bring_up((args, kwargs), sharded=sharded)
        with self.traced() as spans:
            self.step(*args, sharded=sharded, **kwargs)
        with core.session.call("timeline") as session:
            found = gathered(session.world, spans)
        core.timeline = session.plan, found
        return found

    @contextmanager
    def traced(self) -> Iterator[list[Span]]:
        """Record what this rank does in the training steps of the body; in `train` micro-batches and times count on
        from one flush to the next."""
        session = self._core.session
        session.spans = []
        try:
            yield session.spans
        finally:
            session.spans = None

    @property
    def steps(self) -> int:
        """Training steps taken, part of the key of random numbers.  Set it to resume from a state without it."""
        return self._core.steps

    @steps.setter
    def steps(self, count: int) -> None:
        self._core.part(State).set_steps(count)

    gradients = verb(State, State.gradients)
    clip_grad_norm_ = verb(State, State.clip_grad_norm_)
    state_dict = verb(State, State.state_dict)
    local_state_dict = verb(State, State.local_state_dict)
    load_state_dict = verb(State, State.load_state_dict)
    sync_model = verb(State, State.sync_model)
    save_pretrained = verb(State, State.save_pretrained)
    full_parameters = verb(State, State.full_parameters)

    # -- what it is ----------------------------------------------------------------------------------------------

    session = fact(Facts, Facts.session)
    plan = fact(Facts, Facts.plan)
    cluster = fact(Facts, Facts.cluster)
    program = fact(Facts, Facts.program)
    explain = verb(Facts, Facts.explain)
    rank = fact(Facts, Facts.rank)
    is_main = fact(Facts, Facts.is_main)
    world_size = fact(Facts, Facts.world_size)
    needs_data = fact(Facts, Facts.needs_data)
    data_shard = verb(Facts, Facts.data_shard)
    data_rows = verb(Facts, Facts.data_rows)
    scaler = fact(Facts, Facts.scaler)
    skipped = fact(Facts, Facts.skipped)
    stop_requested = fact(Facts, Facts.stop_requested)

    def _repr_html_(self) -> str:
        """Return its plan as a table and a small picture, for notebooks."""
        core = self._core
        if core.running is None and not core.closed:
            return "<p>a pipe that is planned at its first step</p>"
        rank, plan, _ = core.facts
        state = "closed" if core.closed else "running"
        return plan_fragment(plan, f"{state}, rank {rank} of {core.cluster.world}, {core.steps} steps taken")

    # -- ending --------------------------------------------------------------------------------------------------

    def close(self, *, sync: bool = True) -> None:
        """Copy the trained values into the model (`sync_model`) and leave the process group.  Collective, unless the
        pipe is closed already or has failed.

        sync: False if a rank cannot hold the whole model.  Then, and after a failure, parameters and buffers that other
        ranks trained are emptied in the model, so that stale values are neither saved nor trained.
        """
        core = self._core
        session = core.end()
        if session is None:
            return
        try:
            failed = session.calls.closing()
            if core.superseded:
                pass  # the newer pipe has the trained values
            elif sync and session.calls.healthy:
                with session.call("close"):
                    sync_state(session, at_the_end=True)
            elif core.steps:
                empty_foreign(session)
            if failed is not None:
                raise failed
        finally:
            core.stopped = session.world.stop_requested
            session.close()

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(own := getattr(type(self), name, None), property) and own.fset is None:
            raise UsageError(f"pipe.{name} cannot be set", fix="docs/pipe.md lists what a pipe has, and how it changes")
        super().__setattr__(name, value)

    def __getitem__(self, place: object) -> Any:
        raise UsageError(
            "a pipe is indexed or iterated over",
            why="it is not the model, and ranks hold parts of that",
            fix="pipe.model is the model that was compiled; for its values call pipe.sync_model() before",
        )

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and self._core.running is not None:
            self._core.running.calls.abandon(error)
        self.close(sync=kind is None)


def gathered(world: World, mine: list[Span]) -> Timeline:
    """Return the spans of all ranks, in order of start.  Collective, O(spans).  Each rank counts from its own start of
    the step, right after the ranks have compared their batches, so times of ranks differ by at most one exchange."""
    spans = itertools.chain.from_iterable(world.gather_objects(mine))
    return Timeline(tuple(sorted(spans, key=lambda span: (span.start_ns, span.rank))))

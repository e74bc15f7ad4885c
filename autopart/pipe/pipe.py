"""The running pipeline, one object on every rank.

Methods that move data between ranks are collective: call them on all ranks, in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autopart.capture import CaptureCache
from autopart.extras.asynchronous.limits import refuse_in_training, require_stream
from autopart.extras.asynchronous.training import Training
from autopart.extras.checkpoints.rescue import Kept, Rescue
from autopart.extras.checkpoints.saver import Request, Saver, require_folder
from autopart.extras.sampler.sampler import DataPosition, PositionedSampler, sampler_of
from autopart.ir.cluster import Cluster
from autopart.ir.errors import UsageError
from autopart.ir.timeline import Timeline
from autopart.options import Options
from autopart.pipe.measured import PipeMeasured, gathered
from autopart.session.lists import Samples
from autopart.session.session import Session
from autopart.session.step.data import Arguments, own_rows
from autopart.session.step.parts import micro_cut
from autopart.state.around import Around
from autopart.state.misuse_guards import (
    outside_inference_mode,
    refuse_without_gradients,
    short_tracebacks,
    watch_optimizers,
    without_backward,
)
from autopart.state.optimizers import GivenOptimizer, given_as
from autopart.state.scaler import WARN_AFTER, checked_scale, not_finite, refuse_ambiguous, warn_skipped
from autopart.state.schedulers import GivenScheduler
from autopart.state.state_dict import empty_foreign, sync_state, take_masters


@short_tracebacks
class Pipe(PipeMeasured):
    """A planned, running training pipeline; made by `autopart.compile`.

    With a sample it is planned at once, without one at the first `step`.  It is a context manager; `close` ends it.
    After a step that failed while ranks were running, every further call raises RunError.

    Each rank trains only the parameters of its stage (`named_parameters`).  In the model that was compiled
    (`pipe.model`), parameters that other ranks train keep their first values until `sync_model` or `close`: make
    averages, norms and copies from `pipe.named_parameters()`, or after `sync_model()`.
    """

    def __init__(self, captures: CaptureCache, cluster: Cluster, options: Options, sample: Any = None) -> None:
        super().__init__(captures, cluster, options)
        self._unwatch: Callable[[], None] = lambda: None
        self._saver, self._rescue = Saver(), Rescue(self._around)
        self._position = DataPosition()
        self.companions["data"] = self._position
        if sample is not None:
            self._bring_up(((sample,), {}))
        elif first := captures.trained.without_values:  # an optimizer made before the first step would drive it
            raise UsageError(
                f"{first} is on the meta device, and compile was given no sample",
                why="this rank's part of the model has to exist before an optimizer is made for it",
                fix="pass sample=batch to compile, and weights=",
            )

    def _bring_up(self, arguments: Arguments, *, sharded: bool = False) -> Session:
        session = Session(self._captures, self._cluster, self._options)
        session.calls.listeners += [self._saver, self._rescue, self._speeds]
        session.bring_up(arguments, sharded=sharded)
        self._session = session
        take_masters(session, self._restored)
        self._unwatch = watch_optimizers(
            session.world.size, lambda: session.tensors, lambda: {id(p) for _, p in self.named_parameters()}
        )
        return session

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
        self._require_open()
        refuse_without_gradients()
        factor = checked_scale(scale, self._captures.model, by_keywords=not args)
        refuse_ambiguous("samples", samples, self._captures.model, by_keywords=not args)
        session = self._session or self._bring_up((args, kwargs), sharded=sharded)
        refuse_in_training(session.plan, "pipe.step(batch)")
        scaler, how = self.scaler, self._options.non_finite
        known = 1.0 if scaler is None else scaler.scale
        unscaled = known if scaler is not None or how != "auto" else None
        with self._meter.step(session), self._position.counting(*args, *kwargs.values()):
            end = session.loss(
                "step", (args, kwargs), self._steps, sharded=sharded, scale=known * factor, unscaled=unscaled,
                samples=samples,
            )  # fmt: skip
        loss, overflow = end.loss, end.not_finite
        self._meter.loss = loss
        self._steps += 1
        self._mark_trained()
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if overflow else 0
        if scaler is not None:
            scaler.update(finite=not overflow)
        if overflow and how == "raise":
            raise session.world.known(not_finite(overflow, known))
        if self._skipped_in_a_row == WARN_AFTER:
            warn_skipped(overflow)
        return without_backward(loss)

    def train(self, mode: Any = True, *, optimizer: Any = None, scheduler: Any = None) -> Any:
        """Train asynchronously on the batches of an iterable; or set training flags, as a module does.

        `train(batches, optimizer=lambda params: AdamW(params, ...))` returns an iterator of the losses of the batches,
        in order, for plans with schedule="pipedream" or "pipedream-2bw".  Batches follow each other without a flush, so
        the pipeline stays full: each stage steps its optimizer as soon as a batch has come back to it, and each batch
        uses one version of a stage's weights in its forward and its backward.  Losses therefore come some batches late.
        The loop over the losses is collective, and each rank passes the same number of batches; they may be None where
        `needs_data` is False.  A few batches are taken ahead.

        optimizer: called on every rank with the list of its parameters; it may return an existing one, or a list.
        scheduler: called with that optimizer; its result is stepped after every step of the optimizer.  Clipping by a
        norm over all stages is refused, since all gradients never exist at one time; a rank's optimizer may clip its
        own.

        Batches in flight come back at the end of the batches, at `flush`, and before every other collective call.  All
        stages have then made the updates of all batches.

        With r replicas in turn a stage makes one update for r batches, with the mean of their gradients.
        docs/asynchronous_training.md states which version of the weights a batch uses.  Raises UsageError and
        RefusedError before the first batch for a plan or model that cannot be trained like this, and what `step` raises
        while running.

        `train()` and `train(mode)` with a bool set the training flags of the model on this rank.
        """
        if optimizer is None and isinstance(mode, bool):
            return super().train(mode)
        if not callable(optimizer) or isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                "pipe.train(batches) was given no function that makes an optimizer",
                why="the optimizer of each rank is stepped while batches are in flight",
                fix="pipe.train(batches, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3))",
            )
        session = self.session
        require_stream(session.plan, session.graph, self._options, blocking=session.world.carrier is not None)
        if self._training is not None:
            self._training.end("another call of pipe.train")
            session.calls.listeners.remove(self._training)
        made = optimizer([parameter for _, parameter in self.named_parameters()])
        following = scheduler(made) if scheduler is not None else None
        paced = following if isinstance(following, list | tuple) else [] if following is None else [following]
        update = partial(_stepped, [*given_as("optimizer", made), *paced])
        self._training = Training(session, self._position, lambda: self._steps, self._count_step, update)
        session.calls.listeners.append(self._training)
        return (without_backward(loss) for loss in self._training.losses(mode))

    def flush(self) -> None:
        """Wait until all batches that entered in `train` have come back and all stages have made their updates.
        Collective; does nothing if no batch is in flight."""
        session = self.session
        with session.calls.collective("a flush failed"):
            if self._training is not None:
                self._training.flush()

    def _count_step(self) -> None:
        self._steps += 1
        self._mark_trained()

    def eval_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the loss of a batch with the model in eval mode, without gradients.  Only the first rank of the first
        stage needs the batch; others may pass None."""
        with outside_inference_mode():
            return without_backward(self.session.loss("loss", (args, kwargs)).loss)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns in eval mode for this batch, on every rank, on the CPU.

        The batch holds no target; only the first rank of the first stage needs it.  Caches and other objects that are
        not tensors are left out of the result.
        """
        with outside_inference_mode():
            return self.session.predict((args, kwargs))

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def save(
        self,
        folder: str | os.PathLike[str],
        optimizer: GivenOptimizer = None,
        scheduler: GivenScheduler = None,
        extra: Any = None,
        *,
        keep: int | None = None,
        wait: bool = True,
    ) -> Path:
        """Save a checkpoint from all ranks, and return its folder, `folder/step-00000010` after ten steps.  Collective.

        Every rank writes its own part to a folder that all ranks see; no rank gathers the model.  The folder has the
        weights in safetensors by their original names, with the index of Hugging Face's loaders, and
        `checkpoint.json`.  It appears under its name only when it is complete; a crash at any time leaves the previous
        one.  Gradients are not saved: call it after `optimizer.step()`.

        optimizer: this rank's, or a list of them; the state is saved under the parameters' names.  scheduler: a
        learning rate scheduler, or a list of them, alike on every rank.  extra: numbers, texts, lists and dicts; those
        of rank 0 are saved.  keep: delete all but the newest `keep` checkpoints afterwards.  wait: False copies the
        state to host memory and writes it in the background; a failure there is raised by the next call on all ranks,
        and `close` waits.

        Raises CheckpointError on all ranks; the pipe and earlier checkpoints are then as before.
        """
        require_folder(folder, keep)
        self._follow(kept := Kept(folder, given_as("optimizer", optimizer), given_as("scheduler", scheduler), extra))
        with self.session.call("save") as session:
            request = Request(Path(folder), extra, keep, wait)
            return self._saver.save(session, self._around(kept), request)

    def load(
        self,
        folder: str | os.PathLike[str],
        optimizer: GivenOptimizer = None,
        scheduler: GivenScheduler = None,
        *,
        missing_ok: bool = False,
    ) -> Any:
        """Load the newest checkpoint of a folder, or the one whose folder this is, and return its `extra`.  Collective.

        The plan may differ from the one that was saved: stages, replicas, ranks, slices, ZeRO, precision.  Each rank
        reads its own part.  Weights, buffers, masters, `steps`, the loss scale, and the state of the optimizer and the
        scheduler become those of the checkpoint; gradients become None.  Everything is read and compared with its hash
        on all ranks first: after a CheckpointError nothing has changed.

        missing_ok: True to change nothing and return None, instead of raising, if rank 0 finds no checkpoint there.
        """
        require_folder(folder, None)
        kept = Kept(folder, given_as("optimizer", optimizer), given_as("scheduler", scheduler))
        with self.session.call("load") as session:
            document, extra = self._saver.load(session, folder, self._around(kept), missing_ok=missing_ok)
        if document is not None:
            self._steps = document.step
            if document.scaler is not None:
                self._scaler.load_state_dict(document.scaler)
        self._follow(replace(kept, extra=extra))
        return extra

    def _around(self, kept: Kept) -> Around:
        scaler = self.scaler.state_dict() if self.scaler is not None else None
        return Around(self._steps, scaler, kept.optimizers, kept.schedulers, self.companions, self._placeholder)

    def _follow(self, kept: Kept) -> None:
        self._rescue.follow(kept, self.session)

    # -- what it is ----------------------------------------------------------------------------------------------

    def timeline(self, *args: Any, sharded: bool = False, **kwargs: Any) -> Timeline:
        """Run a training step as `step` does, and return what every rank did in it, in nanoseconds, on every rank.

        Times count from the start of the step on each rank.  `autopart.save_trace` writes a timeline for a viewer, and
        `autopart.simulate` returns the predicted one.  Raises what `step` raises.
        """
        self._require_open()
        if self._session is None:
            self._bring_up((args, kwargs), sharded=sharded)
        with self.traced() as spans:
            self.step(*args, sharded=sharded, **kwargs)
        with self.session.call("timeline") as session:
            found = gathered(session.world, spans)
        self._meter.timeline = session.plan, found
        return found

    @property
    def needs_data(self) -> bool:
        """Whether this rank needs the batch of a step; others may pass None."""
        return self.rank in self.plan.stages[0].ranks

    def data_shard(self) -> tuple[int, int]:
        """Return (number, of) for a sampler that gives each replica of the first stage the same number of rows:
        `DistributedSampler(dataset, num_replicas=of, rank=number)`.  A rank that needs no data has the number 0."""
        ranks = self.plan.stages[0].ranks
        return (ranks.index(self.rank) if self.needs_data else 0), len(ranks)

    def data_rows(self, rows: int) -> tuple[int, ...]:
        """Return the places of this rank's rows in a batch of `rows` rows, in the order of its shard.  A step over all
        shards equals the step over the whole batch."""
        if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
            raise UsageError(f"a batch of {rows!r} rows", fix="pass the number of rows of the whole batch")
        number, _ = self.data_shard()
        planned = micro_cut(rows, self.plan.micro_rows)
        return own_rows(planned, self.plan.stages[0].division, number) if self.needs_data else ()

    def sampler(
        self, dataset: Any, rows: int, *, seed: int = 0, shuffle: bool = True, drop_last: bool = False
    ) -> PositionedSampler:
        """Return a batch sampler for `DataLoader(dataset, batch_sampler=...)`, alike on every rank.

        The order of samples depends only on (seed, epoch).  `save` saves the position, counted in the samples of steps,
        and after `load` the iteration continues there: each sample comes once in an epoch, even if the plan, the ranks
        or `rows` change.  During an iteration every `step` counts as one batch.  Raises UsageError for a dataset
        without a length, and if dataset size, seed or shuffle differ from those of the position.
        """
        return sampler_of(self._position, dataset, rows, seed, shuffle=shuffle, drop_last=drop_last)

    @property
    def rank(self) -> int:
        """This process's rank; also after `close`."""
        return self._facts[0]

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, for what should be printed or written once; also after `close`."""
        return self.rank == 0

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._cluster.world

    # -- ending --------------------------------------------------------------------------------------------------

    def close(self, *, sync: bool = True) -> None:
        """Copy the trained values into the model (`sync_model`) and leave the process group.  Collective, unless the
        pipe is closed already or has failed.

        sync: False if a rank cannot hold the whole model.  Then, and after a failure, parameters and buffers that other
        ranks trained are emptied in the model, so that stale values are neither saved nor trained.
        """
        self._unwatch()
        session, self._closed = self._session, True
        if session is None:
            return
        self._at_close, self._session = self._facts, None
        try:
            failed = session.calls.closing()
            if self._superseded:
                pass  # the newer pipe has the trained values
            elif sync and session.calls.healthy:
                with session.call("close"):
                    sync_state(session, at_the_end=True)
            elif self._steps:
                empty_foreign(session)
            if failed is not None:
                raise failed
        finally:
            self._stopped = session.world.stop_requested
            for each in session.calls.listeners:
                each.closed()
            session.close()

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and self._session is not None:
            self._session.calls.abandon(error)
        self.close(sync=kind is None)


def _stepped(each: Sequence[Any]) -> None:
    for one in each:
        one.step()

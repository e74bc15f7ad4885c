"""The running pipeline as the user holds it, one object on every rank.

Every method that moves data between ranks is collective: call it on all ranks, in the same order.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from autopart.capture import CaptureCache
from autopart.capture.batch import Batch, flatten, split_rows
from autopart.capture.export import rebuild_outputs
from autopart.capture.guards import check_autocast
from autopart.ir.cluster import Cluster
from autopart.ir.errors import BatchError, UsageError
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.options import Options
from autopart.report.plan_table import stage_table
from autopart.runtime.activity import set_rank_label
from autopart.runtime.tensors import gather_tensors
from autopart.runtime.trace import Trace
from autopart.runtime.world import World
from autopart.session.bring_up import Started, evaluation_lane, start
from autopart.session.executor import Executor


class Pipe:
    """A planned, running training pipeline; made by `autopart.compile`.

    With a sample it is ready at once, without one at the first `step`.  It is a context manager; `close` ends it.
    """

    def __init__(self, capturer: CaptureCache, cluster: Cluster, options: Options, sample: Any = None) -> None:
        self._capturer, self._cluster, self._options = capturer, cluster, options
        self._model = capturer.model
        self._world: World | None = None
        self._started: Started | None = None
        self._nothing = nn.Parameter(torch.empty(0))
        self._lanes: dict[str, Executor] = {}
        self._step = 0
        if sample is not None:
            self._start(self._take_apart(sample))

    # -- running -------------------------------------------------------------------------------------------------

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One training step: every micro-batch, forward and backward; gradients are added to `.grad`.

        Takes a batch as described in `capture.batch`, or the model's own positional and keyword arguments.  Returns
        the loss of the whole batch (0-dim, detached) on every rank.  Raises BatchError before anything is sent,
        StageError and WorkerError while running.
        """
        batch = self._take_apart(_one_batch(args, kwargs))
        if self._started is None:
            self._start(batch)
        loss = self._run_loss(self._lane("step", batch), batch, self._step)
        self._step += 1
        return loss

    def eval_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The loss of a batch with the model in eval mode, through the same stages, without gradients."""
        batch = self._take_apart(_one_batch(args, kwargs))
        return self._run_loss(self._lane("loss", batch), batch, 0)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns in eval mode for this batch, on every rank, on the CPU, through the same stages.

        The batch holds no target.  Caches and other objects that are no tensors are left out of the result.
        """
        batch = flatten(_one_batch(args, kwargs))
        lane = self._lane("predict", batch)
        micro_rows = (batch.rows or 1,)
        self._prepare(lane, batch, micro_rows)
        found = lane.run(batch, micro_rows, [1.0], (self._options.seed, 0)).results
        tensors = self._collect(lane, found.get(0, {}), batch.rows or 1)
        spec = lane.outputs(batch)
        return rebuild_outputs(spec, tensors)

    def _run_loss(self, lane: Executor, batch: Batch, step: int) -> torch.Tensor:
        plan = self.plan
        micros = len(plan.micro_rows) if lane.micro_batched else 1
        micro_rows = split_rows(batch.rows, micros) if batch.rows is not None else (1,)
        shares = self._prepare(lane, batch, micro_rows)
        result = lane.run(batch, micro_rows, shares, (self._options.seed, step))
        owner = lane.rank_of_output(lane.graph.outputs[0])
        total = sum(
            (
                result.losses[i].double().cpu() * gather_tensors
                for i, gather_tensors in enumerate(shares)
                if gather_tensors != 0.0 and result.losses
            ),
            torch.zeros((), dtype=torch.float64),
        )
        dtype = getattr(torch, lane.graph.value_map()[lane.graph.outputs[0]].dtype)
        return self._here.broadcast(total, owner).to(dtype)

    def _prepare(self, lane: Executor, batch: Batch, micro_rows: tuple[int, ...]) -> list[float]:
        """Make the code for this batch, and agree with the other ranks on its shape before anything is sent.

        Returns the share of each micro-batch in the loss, as the first stage's rank counts it.
        """
        check_autocast(self._here.device.type)
        lane.prepare(batch, micro_rows)
        mark = float(zlib.crc32(repr((batch.signature(), micro_rows)).encode()))
        rows = self._here.gather_numbers([mark, float(batch.rows or 0), *lane.shares(batch, micro_rows)])
        for rank, row in enumerate(rows):
            if row[:2] != rows[0][:2]:
                raise BatchError(
                    f"ranks 0 and {rank} were given batches of different shapes",
                    why=f"{int(rows[0][1])} and {int(row[1])} rows, or other inputs",
                    fix="give every rank the same batch; rank 0's data is what is used",
                )
        return rows[self.plan.stages[0].ranks[0]][2:]

    def _collect(self, lane: Executor, mine: Mapping[str, torch.Tensor], rows: int) -> tuple[torch.Tensor, ...]:
        specs = lane.specs(rows)
        collected = []
        for name in lane.graph.outputs:
            owner, spec = lane.rank_of_output(name), specs[name]
            data = torch.empty(spec.shape, dtype=spec.dtype)
            if owner == self._here.rank:
                data = mine[name].detach().cpu().contiguous()
            collected.append(self._here.broadcast(data, owner))
        return tuple(collected)

    # -- starting ------------------------------------------------------------------------------------------------

    def _take_apart(self, batch: Any) -> Batch:
        return flatten(batch, with_target=self._options.loss_fn is not None)

    def _start(self, batch: Batch) -> None:
        self._started = start(self._capturer, batch, self._cluster, self._options)
        self._world = self._started.world
        self._lanes["step"] = self._started.lane
        stage = self.plan.decision.stage_of_rank(self._here.rank)
        set_rank_label(f"stage {stage}" if stage is not None else "idle")

    def _lane(self, mode: str, batch: Batch) -> Executor:
        started = self._require()
        if mode not in self._lanes:
            self._lanes[mode] = evaluation_lane(started, mode, batch)
        return self._lanes[mode]

    def _require(self) -> Started:
        if self._started is None:
            raise UsageError(
                "the pipeline has not been planned yet",
                why="compile was called without a sample, and no step has run",
                fix="pass sample=batch to compile, or call step(batch) first",
            )
        return self._started

    @property
    def _here(self) -> World:
        return self._require().world

    # -- what it is ----------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan that runs."""
        return self._require().plan

    @property
    def cluster(self) -> Cluster:
        """The cluster that was planned for."""
        return self._cluster

    @property
    def program(self) -> Program:
        """What every rank does in one training step, action by action."""
        return self._require().lane.program(len(self.plan.micro_rows))

    @contextlib.contextmanager
    def traced(self) -> Iterator[Trace]:
        """Record what this rank does in the training steps run inside."""
        lane = self._require().lane
        lane.trace = trace = Trace(self.rank)
        try:
            yield trace
        finally:
            lane.trace = None

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._here.rank

    @property
    def started(self) -> Started:
        """The parts it runs on, for checks and tools."""
        return self._require()

    def explain(self) -> str:
        """The stage table: what runs where, with simulated times and memory."""
        return stage_table(self.plan, self._require().lane.graph)

    # -- parameters ----------------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under their original names, tied ones under the first.  Before the first step of a
        pipe without a sample: all of the model's."""
        if self._started is None:
            yield from self._model.named_parameters()
            return
        for name, tensor in self._started.tensors.held.items():
            if isinstance(tensor, nn.Parameter):
                yield name, tensor

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters: what its optimizer drives.

        A rank that holds none (it idles, or its stage has only the loss) yields an empty one, which no name stands
        for: torch's optimizers refuse an empty list, and the same script has to run on every rank.
        """
        held = [parameter for _, parameter in self.named_parameters()]
        yield from held or [self._nothing]

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """The gradient of every trainable parameter by original name (tied ones once), on every rank, on the CPU;
        None where there is none.  Sends the size of the model: meant for checks."""
        owners = self._owners()
        held = dict(self.named_parameters())
        names = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        return gather_tensors(
            self._here,
            {name: owners.get(name, 0) for name in names},
            names,
            lambda name: held[name].grad if name in held else names[name].grad,
        )

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their global norm over all stages is at most max_norm; tied parameters count
        once.  Returns the norm before, on every rank, as torch.nn.utils.clip_grad_norm_ does."""
        if norm_type <= 0:
            raise UsageError(f"norm_type is {norm_type}", fix="use a positive number or float('inf')")
        owners, rank = self._owners(), self._here.rank
        named = [(name, p.grad) for name, p in self.named_parameters() if p.grad is not None]
        norms = [torch.linalg.vector_norm(g.double(), norm_type).item() for n, g in named if owners.get(n) == rank]
        if math.isinf(norm_type):
            total = max(row[0] for row in self._here.gather_numbers([max(norms, default=0.0)]))
        else:
            total = self._here.sum_numbers([sum(x**norm_type for x in norms)])[0] ** (1 / norm_type)
        scale = max_norm / (total + 1e-6)
        if scale < 1.0:
            for _, grad in named:
                grad.mul_(scale)
        return torch.tensor(total)

    def _owners(self) -> dict[str, int]:
        """For each parameter and buffer of the plan, the rank that answers for it."""
        return self._require().owners

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's state under its original names, buffers included, on every rank, on the CPU; the plain
        model's load_state_dict takes it."""
        owners, held, tied = self._owners(), self._require().tensors.held, self._require().tied
        whole = self._model.state_dict(keep_vars=True)
        first = {tied.get(name, name): name for name in reversed(whole)}
        shared = gather_tensors(
            self._here,
            {name: owners.get(name, 0) for name in first},
            {name: whole[original] for name, original in first.items()},
            lambda name: held.get(name, whole[first[name]]),
        )
        state = {}
        for name in whole:
            tensor = shared[tied.get(name, name)]
            assert tensor is not None
            state[name] = tensor
        return state

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over a state of the plain model, given alike on every rank.  Nothing changes when a name or a shape
        does not fit (UsageError)."""
        own = self._model.state_dict(keep_vars=True)
        _check_state(own, state)
        self._model.load_state_dict(dict(state))
        if self._started is not None:
            held, tied = self._started.tensors.held, self._started.tied
            with torch.no_grad():
                for name in own:
                    target = held.get(tied.get(name, name))
                    if target is not None:
                        target.copy_(state[name])

    # -- ending --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the process group, when this pipe opened it.  The model keeps its weights."""
        if self._world is not None:
            self._world.close()
        self._started, self._world = None, None
        self._lanes.clear()

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _one_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs:
        return (args, kwargs) if args else kwargs
    if not args:
        raise BatchError("step was called without a batch", fix="pass the batch that the model takes")
    return args[0] if len(args) == 1 else args


def _check_state(own: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
    missing, extra = sorted(set(own) - set(state)), sorted(set(state) - set(own))
    if missing or extra:
        raise UsageError(
            "the state does not belong to this model",
            why="; ".join(
                f"{len(names)} {kind}, such as {names[0]}"
                for kind, names in (("missing", missing), ("unexpected", extra))
                if names
            ),
        )
    for name, tensor in own.items():
        if not isinstance(state[name], torch.Tensor):
            raise UsageError(f"{name} is a {type(state[name]).__name__} in the state", fix="pass tensors")
        if tuple(state[name].shape) != tuple(tensor.shape):
            raise UsageError(
                f"{name} has shape {tuple(state[name].shape)} in the state and {tuple(tensor.shape)} in the model",
                fix="pass a state of this model, as its state_dict() returns it",
            )

"""A user-defined sharding: two linear layers in a row, the first cut by columns and the second by rows; importable on
the ranks of a pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import fx, nn

import autopart
from autopart.ir.graph import Graph
from autopart.ir.plan import Stage
from autopart.runtime.group.world import World
from autopart.runtime.stages.batch_statistics import PURPOSE
from autopart.runtime.stages.stage_module import StageModule
from autopart.session.lists import SHARDINGS

# -- code that a user writes ------------------------------------------------------------------------------------------

AXES = {"first.weight": 0, "first.bias": 0, "second.weight": 1}


class Mlp:
    """Each rank computes its columns of `first`, and from them its addend of `second`, for the rows of all ranks; every
    rank has equally many."""

    def axes(self, graph: Graph, stage: Stage) -> Mapping[str, int]:
        own, ops = AXES if len(stage.ranks) > 1 else {}, graph.op_map()
        used = {name for op in stage.ops for name in ops[op].params}
        return {name: axis for name, axis in own.items() if name in used}

    def rewrite(self, code: StageModule, world: World, ranks: Sequence[int]) -> None:
        graph = code.module.graph
        given = dict(zip(code.params, graph.find_nodes(op="placeholder"), strict=False))
        (first,), (second,) = given["first.weight"].users, given["second.weight"].users
        x, bias = first.args[0], second.args[2]
        rows = _Rows(world, ranks)
        with graph.inserting_before(first):
            first.update_arg(
                0, _call(code.module, "gathered", lambda t: _Exchanged.apply(rows.gather, rows.scatter, t), x)
            )
        second.update_arg(2, None)
        with graph.inserting_after(second):
            own = _call(code.module, "scattered", partial(_Exchanged.apply, rows.scatter, rows.gather), second)
        with graph.inserting_after(own):
            whole = graph.call_function(torch.add, (own, bias))
        second.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not own)
        code.module.recompile()


def _call(module: fx.GraphModule, name: str, function: Any, node: Any) -> fx.Node:
    made = nn.Module()
    made.forward = function
    module.add_submodule(name, made)
    return module.graph.call_module(name, (node,))


Exchange = Callable[[torch.Tensor], torch.Tensor]


class _Rows:
    """The rows of all ranks.  Two exchanges that are transposes of each other."""

    def __init__(self, world: World, ranks: Sequence[int]) -> None:
        self._world, self._count, self._place = world, len(ranks), sorted(ranks).index(world.rank)
        self._group = world.group(ranks, purpose=PURPOSE)

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        every = own.new_zeros((self._count, *own.shape))
        every[self._place] = own
        self._world.all_reduce(every, self._group)
        return every.flatten(0, 1)

    def scatter(self, addends: torch.Tensor) -> torch.Tensor:
        total = addends.contiguous().clone()
        self._world.all_reduce(total, self._group)
        return total.unflatten(0, (self._count, -1))[self._place].clone()


class _Exchanged(torch.autograd.Function):
    """One of the two exchanges; the other one is its backward."""

    @staticmethod
    def forward(ctx: Any, there: Exchange, back: Exchange, tensor: torch.Tensor) -> torch.Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, ctx.back(grads[0])


@contextmanager
def registered() -> Iterator[None]:
    SHARDINGS.append(Mlp())
    try:
        yield
    finally:
        SHARDINGS.pop()


# -- a model with both layers, and what runs it ---------------------------------------------------------------------


class Block(nn.Module):
    """The square of what a residual block makes of its input, as a loss."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(width), nn.Linear(width, 8), nn.Linear(8, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.second(torch.tanh(self.first(self.norm(x))))).square().mean()


def block() -> Block:
    torch.manual_seed(0)
    return Block().double()


def batch(seed: int) -> torch.Tensor:
    return torch.randn(8, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def steps(run: Any, clip: Any, optimizer: torch.optim.Optimizer, gradients: Any, seeds: Sequence[int]) -> list[Any]:
    """Return the loss, the norm before clipping and the clipped gradients of some steps."""
    found = []
    for seed in seeds:
        optimizer.zero_grad()
        loss = run(batch(seed))
        norm = clip(0.1)
        found.append((float(loss), float(norm), gradients()))
        optimizer.step()
    return found


def plain(seeds: Sequence[int], model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    def run(x: torch.Tensor) -> torch.Tensor:
        loss = model(x)
        loss.backward()
        return loss.detach()

    def gradients() -> dict[str, torch.Tensor]:
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    return steps(run, lambda most: nn.utils.clip_grad_norm_(model.parameters(), most), optimizer, gradients, seeds)


def compiled(stages: int = 1, replicas: int = 2) -> autopart.Pipe:
    torch.set_num_threads(1)
    options = {"stages": stages, "replicas": replicas, "micro_batches": 2, "costs": "analytic"}
    return autopart.compile(block(), cluster="cpu:2", sample=batch(0), **options)


def trained(folder: str, seeds: Sequence[int], load: bool, sharded: bool = True) -> dict[str, Any]:
    """Train the block over two ranks, from a checkpoint or its first values, save it, and return what was found."""
    with registered() if sharded else nullcontext(), compiled() as pipe:
        optimizer = optimizer_of(pipe.parameters())
        if load:
            pipe.load(folder, optimizer)
        own = {name: tuple(p.shape) for name, p in pipe.named_parameters()}
        found = steps(pipe.step, pipe.clip_grad_norm_, optimizer, pipe.gradients, seeds)
        path = pipe.save(folder, optimizer)
        state = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
        return {"own": own, "steps": found, "path": str(path), "state": state}


def adopted(optimized: bool) -> list[Any]:
    """Return the state and gradients of a block that was loaded and trained in pieces, before and after it moved to two
    stages, then the losses of the next step and of an evaluation there, and the shapes that this rank has."""
    with registered(), compiled() as pipe:
        pipe.load_state_dict({name: tensor + 1 for name, tensor in block().state_dict().items()})
        pipe.step(batch(1))
        before = pipe.state_dict(), pipe.gradients()
        plan = autopart.plan(block(), "cpu:2", sample=batch(0), stages=2, micro_batches=2, costs="analytic")
        optimizer = optimizer_of(pipe.parameters())
        pipe.adopt(plan, *[optimizer] * optimized)
        after = pipe.state_dict(), pipe.gradients()
        own = {name: tuple(p.shape) for name, p in pipe.named_parameters()}
        return [before, after, float(pipe.eval_loss(batch(9))), own]


def evaluated() -> float:
    with registered(), compiled() as pipe:
        return float(pipe.eval_loss(batch(9)))


def verified() -> bool:
    """Return whether `verify` finds the loss and all gradients of a step in pieces equal to one process's."""
    torch.set_num_threads(1)
    with registered():
        given = {"stages": 1, "replicas": 2, "micro_batches": 2, "costs": "analytic"}
        return bool(autopart.verify(block(), "cpu:2", sample=batch(0), **given).ok)

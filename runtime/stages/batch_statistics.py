"""Batch statistics of a whole micro-batch, whose rows the replicas of a stage divide (`sync_batchnorm`).

In the forward the replicas sum how many numbers each channel has, and exchange means and sums of squared deviations;
in the backward they sum what reaches the statistics, as torch.nn.SyncBatchNorm does.  These sums stand inside of a
compute, which all replicas of a stage run at the same place of the program's one order, and autograd runs the backwards
of ops in the reverse order of their forwards, so all replicas make the same sums in the same order.  They have a group
of their own: gradients may be on their way in that of the reducer.  A replica without rows runs the code on stand-ins
and counts none of them (`absent`).

Chan, Golub, LeVeque, "Algorithms for Computing the Sample Variance" (1983), for putting means and deviations together.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from autopart.runtime.activity import waiting
from autopart.runtime.group.world import World

_aten = torch.ops.aten
_PLACES: dict[Any, tuple[int, int, int]] = {
    _aten._native_batch_norm_legit_functional.default: (5, 6, 7),
    _aten._native_batch_norm_legit.no_stats: (3, 4, 5),
    _aten.batch_norm.default: (5, 6, 7),
}
"""Of ops that take batch statistics, where (training, momentum, eps) stand among their arguments."""
KNOWN = frozenset(map(str, _PLACES))
"""Their targets, as a graph names them."""


class BatchStatistics(nn.Module):
    """Runs the batch norms of one stage of this rank with the statistics of all its replicas.  Of use after `open`."""

    def __init__(self) -> None:
        super().__init__()
        self._world: World | None = None
        self._group: Any = None
        self._ranks: tuple[int, ...] = ()
        self._absent = False

    def open(self, world: World, ranks: Sequence[int], group: dist.ProcessGroup) -> None:
        """The replicas that sum, and where."""
        self._world, self._ranks, self._group = world, tuple(ranks), group

    @contextmanager
    def absent(self) -> Iterator[None]:
        """Inside, what this rank computes counts for nothing."""
        self._absent = True
        try:
            yield
        finally:
            self._absent = False

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor | None,
        var: torch.Tensor | None,
        momentum: float,
        eps: float,
    ) -> tuple[torch.Tensor, ...]:
        """(result, mean, 1 / deviation, new running mean, new running variance), the last two where there are running
        ones."""
        return _Normalized.apply(self, self._absent, x, weight, bias, mean, var, momentum, eps)  # type: ignore[no-any-return, no-untyped-call]

    def gathered(self, mine: torch.Tensor) -> torch.Tensor:
        """A row of every replica."""
        assert self._world is not None
        rows = mine.new_zeros((len(self._ranks), mine.numel()))
        rows[self._ranks.index(self._world.rank)] = mine
        with waiting():
            self._world.all_reduce(rows, self._group)
        return rows


class _Normalized(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        statistics: BatchStatistics,
        absent: bool,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        momentum: float,
        eps: float,
    ) -> tuple[torch.Tensor, ...]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        channels = x.shape[1]
        axes = [axis for axis in range(x.dim()) if axis != 1]
        count = 0 if absent else x.numel() // channels
        mine = wide.new_zeros(1 + 2 * channels)
        if count:
            own = wide.mean(axes)
            mine[0] = count
            mine[1 : channels + 1] = own
            mine[channels + 1 :] = (wide - _spread(own, x)).square().sum(axes)
        rows = statistics.gathered(mine)
        counts, means, squares = rows[:, :1], rows[:, 1 : channels + 1], rows[:, channels + 1 :]
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        deviations = squares.sum(0) + (counts * (means - mean).square()).sum(0)
        inverse = torch.rsqrt(deviations / total + eps)
        result = (wide - _spread(mean, x)) * _spread(inverse, x)
        if weight is not None:
            result = result * _spread(weight.to(wide.dtype), x)
        if bias is not None:
            result = result + _spread(bias.to(wide.dtype), x)
        ctx.save_for_backward(x, weight, mean, inverse, total)
        ctx.statistics, ctx.absent, ctx.has_bias = statistics, absent, bias is not None
        found = [result.to(x.dtype), mean, inverse]
        if running_mean is not None and running_var is not None:
            fresh = deviations / (total - 1)
            found.append(torch.lerp(running_mean, mean.to(running_mean.dtype), momentum))
            found.append(torch.lerp(running_var, fresh.to(running_var.dtype), momentum))
        ctx.mark_non_differentiable(*found[1:])
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight, mean, inverse, total = ctx.saved_tensors
        axes = [axis for axis in range(x.dim()) if axis != 1]
        wide = grads[0].to(mean.dtype)
        scaled = (x.to(mean.dtype) - _spread(mean, x)) * _spread(inverse, x)
        of_bias, of_weight = wide.sum(axes), (wide * scaled).sum(axes)
        mine = torch.cat((of_bias, of_weight))
        first, second = ctx.statistics.gathered(torch.zeros_like(mine) if ctx.absent else mine).sum(0).chunk(2)
        back = wide - _spread(first / total, x) - scaled * _spread(second / total, x)
        factor = inverse if weight is None else inverse * weight.to(inverse.dtype)
        return (
            None,
            None,
            (back * _spread(factor, x)).to(x.dtype),
            None if weight is None else of_weight.to(weight.dtype),
            of_bias.to(mean.dtype if weight is None else weight.dtype) if ctx.has_bias else None,
            None,
            None,
            None,
            None,
        )


def _spread(channels: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Numbers of channels along the axes of `x`."""
    return channels.view(1, -1, *[1] * (x.dim() - 2))


def _takes_statistics(node: fx.Node) -> bool:
    places = _PLACES.get(node.target)
    return places is not None and bool(node.args[places[0]])


def share_statistics(code: nn.Module, statistics: BatchStatistics) -> None:
    """Let all batch norms in the code, in its recomputed groups too, take the statistics of all replicas.  O(nodes)."""
    for module in list(code.modules()):
        if not isinstance(module, fx.GraphModule):
            continue
        for node in [node for node in module.graph.nodes if _takes_statistics(node)]:
            _share(module, node, statistics)
        module.recompile()


def _share(module: fx.GraphModule, node: fx.Node, statistics: BatchStatistics) -> None:
    _, momentum, eps = (node.args[place] for place in _PLACES[node.target])
    running = (None, None) if node.target is _aten._native_batch_norm_legit.no_stats else node.args[3:5]
    module.add_submodule("batch_statistics", statistics)
    with module.graph.inserting_before(node):
        call = module.graph.call_module("batch_statistics", (*node.args[:3], *running, momentum, eps))
        if node.target is _aten.batch_norm.default:
            call = module.graph.call_function(operator.getitem, (call, 0))
    node.replace_all_uses_with(call)
    module.graph.erase_node(node)

"""Batch norms that take the statistics of a whole micro-batch, whose rows the replicas of a stage divide.

In the forward the replicas sum counts, means and squared deviations of each channel; in the backward they sum what
reaches the statistics, as torch.nn.SyncBatchNorm does.  These sums stand inside a compute.  All replicas run the
computes of a stage in the same order, and autograd runs backwards in the reverse order of the forwards, so all make the
same sums in the same order, in a group of their own, apart from the sums of gradients.

Chan, Golub, LeVeque, "Algorithms for Computing the Sample Variance" (1983), for merging means and deviations.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from autopart.runtime.activity import waiting
from autopart.runtime.group.world import World
from autopart.runtime.stages.stage_module import StageModule

_aten = torch.ops.aten
_PLACES: dict[Any, tuple[int, int, int]] = {
    _aten._native_batch_norm_legit_functional.default: (5, 6, 7),
    _aten._native_batch_norm_legit.no_stats: (3, 4, 5),
    _aten.batch_norm.default: (5, 6, 7),
}
"""By op that takes batch statistics, the places of (training, momentum, eps) among its arguments."""
KNOWN = frozenset(map(str, _PLACES))
"""The targets of these ops, as a graph names them."""
PURPOSE = "batch statistics"
"""Of the groups in which replicas sum (`World.group`)."""

_has_rows = True


@contextmanager
def without_rows() -> Iterator[None]:
    """Let what is computed inside take part in the sums and contribute nothing."""
    global _has_rows
    _has_rows = False
    try:
        yield
    finally:
        _has_rows = True


class BatchStatistics(nn.Module):
    """A batch norm with the statistics of these ranks; their group was opened before (`PURPOSE`)."""

    def __init__(self, world: World, ranks: Sequence[int]) -> None:
        super().__init__()
        self._world, self._ranks = world, tuple(ranks)

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
        """Return (result, mean, 1 / deviation, new running mean, new running variance), the last two only if running
        ones are given."""
        return _Normalized.apply(self, _has_rows, x, weight, bias, mean, var, momentum, eps)  # type: ignore[no-any-return, no-untyped-call]

    def gathered(self, mine: torch.Tensor) -> torch.Tensor:
        """Return the vector of every replica, as the rows of a matrix."""
        rows = mine.new_zeros((len(self._ranks), mine.numel()))
        rows[self._ranks.index(self._world.rank)] = mine
        with waiting():
            self._world.all_reduce(rows, self._world.group(self._ranks, purpose=PURPOSE))
        return rows


class _Normalized(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        statistics: BatchStatistics,
        has_rows: bool,
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
        count = x.numel() // channels if has_rows else 0
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
        ctx.statistics, ctx.has_rows, ctx.has_bias = statistics, has_rows, bias is not None
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
        first, second = ctx.statistics.gathered(mine if ctx.has_rows else torch.zeros_like(mine)).sum(0).chunk(2)
        back = wide - _spread(first / total, x) - scaled * _spread(second / total, x)
        factor = inverse if weight is None else inverse * weight.to(inverse.dtype)
        of_x = (back * _spread(factor, x)).to(x.dtype)
        to_weight = None if weight is None else of_weight.to(weight.dtype)
        to_bias = of_bias.to(mean.dtype if weight is None else weight.dtype) if ctx.has_bias else None
        return None, None, of_x, to_weight, to_bias, None, None, None, None


def _spread(channels: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Shape one number per channel so that it broadcasts over `x`."""
    return channels.view(1, -1, *[1] * (x.dim() - 2))


def share_statistics(code: StageModule, statistics: nn.Module) -> None:
    """Replace all batch norms in the code, also in its recomputed groups, by a `BatchStatistics`.  O(nodes)."""
    for module in list(code.module.modules()):
        if not isinstance(module, fx.GraphModule):
            continue
        for node in list(module.graph.nodes):
            places = _PLACES.get(node.target)
            if places is not None and node.args[places[0]]:  # it takes the statistics of the batch
                _replace(module, node, statistics)
        module.recompile()


def _replace(module: fx.GraphModule, node: fx.Node, statistics: nn.Module) -> None:
    _, momentum, eps = (node.args[place] for place in _PLACES[node.target])
    running = (None, None) if node.target is _aten._native_batch_norm_legit.no_stats else node.args[3:5]
    module.add_submodule("batch_statistics", statistics)
    with module.graph.inserting_before(node):
        call = module.graph.call_module("batch_statistics", (*node.args[:3], *running, momentum, eps))
        if node.target is _aten.batch_norm.default:
            call = module.graph.call_function(operator.getitem, (call, 0))
    node.replace_all_uses_with(call)
    module.graph.erase_node(node)

"""Connectionist temporal classification as an op whose shapes are known before it runs.

torch's op keeps a table for its backward that is as wide as the longest target, which tracing cannot know.  Its targets
may also be concatenated (`masked_select`), so that they cannot be cut into rows.  Here the targets of each row are in a
row of a matrix, and the backward computes the table again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental import proxy_tensor

_aten = torch.ops.aten
_NONE, _MEAN = 0, 1


@torch.library.custom_op("autopart::ctc_losses", mutates_args=())
def ctc_losses(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> torch.Tensor:
    """Return the loss of each row: log_probs of shape (time, rows, classes), targets (rows, most), lengths (rows,)."""
    lengths = input_lengths.tolist(), target_lengths.tolist()
    losses: torch.Tensor = _aten._ctc_loss.default(log_probs, targets, *lengths, blank, zero_infinity)[0]
    return torch.where(losses.isinf(), torch.zeros_like(losses), losses) if zero_infinity else losses


@ctc_losses.register_fake
def _(log_probs: torch.Tensor, *_: Any) -> torch.Tensor:
    return log_probs.new_empty(log_probs.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    log_probs, targets, input_lengths, target_lengths = ctx.saved_tensors
    given = log_probs, targets, input_lengths.tolist(), target_lengths.tolist()
    with torch.no_grad():
        losses, table = _aten._ctc_loss.default(*given, *ctx.options)
        found = _aten._ctc_loss_backward.default(gradient, *given, losses, table, *ctx.options)
    return found, None, None, None, None, None


ctc_losses.register_autograd(_backward, setup_context=_keep)


class Selections:
    """Results of `masked_select` while a program is traced, and where their elements come from."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[torch.Tensor, ...]] = {}

    def note(self, made: torch.Tensor, args: Any) -> None:
        """Note a masked_select that was traced."""
        if len(args) == 2:
            self._made[id(made)] = (made, *args)

    def ctc_loss(self, mode: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        """Trace what replaces a ctc_loss; return None if the op stays, which tracing then refuses."""
        arguments = _aten.ctc_loss.Tensor._schema.arguments
        given: dict[str, Any] = {a.name: a.default_value for a in arguments if a.has_default_value()}
        given |= dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        targets = self._in_rows(mode, given["targets"], given["target_lengths"])
        log_probs = given["log_probs"]
        if log_probs.dim() != 3 or targets is None:
            return None
        lengths = given["input_lengths"], given["target_lengths"]
        if any(length.dim() != 1 for length in lengths):
            return None
        with mode:
            targets = targets.to(log_probs.device, torch.long)
            losses: torch.Tensor = ctc_losses(log_probs, targets, *lengths, given["blank"], given["zero_infinity"])
            if given["reduction"] == _NONE:
                return losses
            if given["reduction"] == _MEAN:
                losses = losses / given["target_lengths"].to(losses).clamp_min(1)
                return losses.mean()
            return losses.sum()

    def _in_rows(self, mode: Any, targets: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor | None:
        """Return the targets as a matrix, also if a mask whose counts are the lengths concatenated them."""
        if targets.dim() == 2:
            return targets
        if id(targets) not in self._made:
            return None
        _, labels, mask = self._made[id(targets)]
        counts, counted = (proxy_tensor.get_proxy_slot(tensor, mode.tracer, None) for tensor in (lengths, mask))
        if labels.dim() != 2 or labels.shape != mask.shape or counts is None or counted is None:
            return None
        if not _counts(counts.proxy.node, counted.proxy.node):
            return None
        with mode:
            order = mask.logical_not().to(torch.uint8).sort(dim=1, stable=True).indices
            return labels.gather(1, order)


def _counts(lengths: fx.Node, mask: fx.Node) -> bool:
    """Return whether `lengths` are the numbers of places in each row of a mask."""
    while lengths.target in (_aten.to.dtype, _aten._to_copy.default, _aten.alias.default, _aten.detach.default):
        lengths = lengths.all_input_nodes[0]
    if lengths.target is not _aten.sum.dim_IntList or lengths.args[0] is not mask:
        return False
    axes = lengths.args[1]
    return isinstance(axes, (list, tuple)) and list(axes) in ([1], [-1])

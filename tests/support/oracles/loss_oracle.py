"""The reference for the loss analysis: the loss of the whole batch beside the combined losses of its micro-batches.

Many small losses share one capture, because a capture takes a third of a second whatever its size: a `Bench` captures
their sum and then evaluates one loss at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from autopart.batch.batch import Batch, flatten
from autopart.capture import CaptureCache, Captured
from autopart.ir.graph import Graph, LossReduction, Size
from autopart.passes.loss.derive import UnprovenRows, derive_loss_weight
from autopart.planning.derive.family import mark_rows, require_same_program
from autopart.planning.derive.probe import prove_rows, run
from autopart.stagecode.split import ancestors, cut

MICRO_ROWS = (3, 2)
CPU = torch.device("cpu")
Term = Callable[..., torch.Tensor]


def derive(
    first: Captured, second: Captured, parts: Batch, loss: str | None = None, stated: str | None = None
) -> LossReduction:
    """Return the weight of a loss by rules or, where these do not decide, by the numeric test, as a pipeline does."""
    graph, other = mark_rows(first.graph, second.graph), second.graph
    if loss is not None:
        graph, other = (replace(g, outputs=(loss,)) for g in (graph, other))
    try:
        return derive_loss_weight(graph, other, stated=stated)
    except UnprovenRows as unproven:
        small, large = sorted((first, second), key=lambda c: c.graph.rows)
        proven = prove_rows(small, large, unproven.names, parts)
    try:
        return derive_loss_weight(graph, other, stated=stated, proven=proven)
    except UnprovenRows as unproven:
        raise unproven.refusal from None


class Terms(nn.Module):
    """The sum of several losses over the same inputs. w, k and v are parameters, c is a buffer."""

    def __init__(self, terms: Sequence[Term], modules: dict[str, nn.Module]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.w = nn.Parameter(torch.randn(4, generator=generator, dtype=torch.float64))
        self.k = nn.Parameter(torch.randn(4, 4, generator=generator, dtype=torch.float64))
        self.v = nn.Parameter(torch.randn((), generator=generator, dtype=torch.float64))
        self.register_buffer("c", torch.tensor([0.5, 1.0, 2.0, 0.25], dtype=torch.float64))
        for name, module in modules.items():
            setattr(self, name, module.double())
        self.terms = terms

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.one(i, inputs) for i in range(len(self.terms))]).sum()

    def one(self, index: int, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return one of the losses."""
        return self.terms[index](self, *inputs).double().reshape(())


@dataclass
class Outcome:
    """A loss and its gradients by parameter name."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]

    def error(self, other: Outcome) -> float:
        """Return the largest difference of loss or gradients, relative to the largest gradient; NaN if not finite."""
        size = torch.stack([g.abs().max() for g in self.gradients.values()]).max() + self.loss.abs() + 1e-3
        errors = [float((self.loss - other.loss).abs() / size)]
        errors += [float((g - other.gradients[n]).abs().max() / size) for n, g in self.gradients.items()]
        return max(errors, key=lambda e: float("inf") if e != e else e)


class Bench:
    """Losses captured at the sizes of the micro-batches."""

    def __init__(self, terms: Sequence[Term], inputs: Sequence[torch.Tensor], **modules: nn.Module) -> None:
        self.model, self.inputs = Terms(terms, modules), tuple(inputs)
        self.parts = flatten(self.inputs)
        captures = CaptureCache(self.model)  # which captures the whole batch once, for what terms ask of it
        self.captures = [captures(self.parts, Size(rows)) for rows in MICRO_ROWS]
        for captured in self.captures:
            require_same_program(captured.graph, self.captures[0].graph)

    @cached_property
    def names(self) -> list[str]:
        """The name of each loss in the captured graph."""
        graph: Graph = self.captures[0].graph
        stack = next(op for op in reversed(graph.ops) if op.target.startswith("aten.stack"))
        refs = dict(stack.attrs)["tensors"]
        assert isinstance(refs, tuple)
        return [str(ref)[1:] for ref in refs]

    def weight(self, index: int, *, stated: str | None = None) -> LossReduction:
        """Return the derived weight of one loss. Raises what a pipeline would raise."""
        return derive(self.captures[0], self.captures[1], self.parts, self.names[index], stated)

    def whole(self, index: int) -> Outcome:
        """Return one loss on the whole batch."""
        return _outcome(self.model, self.model.one(index, self.inputs))

    def combined(self, index: int, weight: LossReduction) -> Outcome:
        """Return one loss combined over the micro-batches; a micro-batch without weight is left out."""
        pieces = list(zip(self.captures, self.parts.micro(MICRO_ROWS), strict=True))
        numbers = [_shares(item.weight, pieces) for item in weight.adjusted]
        for place, item in enumerate(weight.adjusted):
            if item.reader is None:
                values = [float(run(c, list(piece), {item.value})[item.value]) for c, piece in pieces]
                numbers[place] = [sum(s * v for s, v in zip(numbers[place], values, strict=True) if s)] * len(pieces)
        with torch.enable_grad():
            losses = [
                self._loss(index, *pieces[micro], weight, [column[micro] for column in numbers])
                for micro in range(len(pieces))
            ]
        shares = _shares(weight, pieces)
        used = [(a, _outcome(self.model, x)) for a, x in zip(shares, losses, strict=True) if a]
        zero = torch.zeros((), dtype=torch.float64)
        return Outcome(
            sum((share * o.loss for share, o in used), zero),
            {n: sum((share * o.gradients[n] for share, o in used), zero) for n, _ in self.model.named_parameters()},
        )

    def _loss(
        self,
        index: int,
        captured: Captured,
        piece: Sequence[torch.Tensor],
        weight: LossReduction,
        numbers: Sequence[float],
    ) -> torch.Tensor:
        """Return one loss of a micro-batch, by the captured program or, where it reads adjusted values, by stage
        code.
        """
        name = self.names[index]
        if not weight.adjusted:
            return run(captured, list(piece), {name})[name]
        code = cut(captured, ancestors(captured.graph, [name]), [name], CPU, adjusted=weight.adjusted)
        inputs = dict(zip(captured.graph.inputs, piece, strict=True))
        arguments = [*code.arguments(captured.tensors), *(inputs[n] for n in code.inputs)]
        found: torch.Tensor = code.module(*arguments, *(numbers[place] for place in code.numbers))[0]
        return found


Pieces = Sequence[tuple[Captured, Sequence[torch.Tensor]]]


def _shares(weight: LossReduction, pieces: Pieces) -> list[float]:
    """Return the share of each micro-batch, equal shares where nothing counts in any of them."""
    amounts = [amount(captured, piece, weight) for captured, piece in pieces]
    total = 1.0 if weight.kind == "sum" else sum(amounts)
    return [a / total if total else 1 / len(amounts) for a in amounts]


def amount(captured: Captured, piece: Sequence[torch.Tensor], weight: LossReduction) -> float:
    """Return the weight of a micro-batch's loss."""
    if weight.kind == "sum":
        return 1.0
    if weight.value is None:
        return float(captured.graph.rows)
    value = run(captured, list(piece), {weight.value})[weight.value].double()
    if weight.classes is not None:
        classes = captured.tensors.get(weight.classes)
        classes = run(captured, list(piece), {weight.classes})[weight.classes] if classes is None else classes
        return float(sum(classes[int(t)] for t in value.flatten() if t != weight.ignore))
    return float(value.sum() if weight.ignore is None else (value != weight.ignore).sum())


def _outcome(model: nn.Module, loss: torch.Tensor) -> Outcome:
    named: dict[str, Any] = dict(model.named_parameters())
    zeros = {n: torch.zeros_like(p) for n, p in named.items()}
    if not loss.requires_grad:
        return Outcome(loss.detach(), zeros)
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return Outcome(loss.detach(), {n: zeros[n] if g is None else g for n, g in zip(named, found, strict=True)})

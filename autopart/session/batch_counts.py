"""What the rank of the first stage counts of a batch before a step: the weights of losses, and of their terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from autopart.capture import Captured
from autopart.ir.errors import BatchError
from autopart.ir.graph import Graph, LossReduction
from autopart.ir.shares import Division
from autopart.passes.loss.terms import without_weight
from autopart.runtime.activity import waiting
from autopart.runtime.stage_module import StageModule
from autopart.runtime.tensors import LocalTensors
from autopart.session.split import ancestors, cut

Inputs = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Weights:
    """By micro-batch: shares, of its loss in the whole loss; numbers, of the values that its program reads adjusted."""

    shares: list[float]
    numbers: list[list[float]]

    def flat(self) -> list[float]:
        """All of them, to be sent."""
        return [*self.shares, *(number for numbers in self.numbers for number in numbers)]

    @classmethod
    def read(cls, flat: Sequence[float], micros: int) -> Weights:
        """The inverse of `flat`."""
        each = len(flat) // micros - 1
        return cls(list(flat[:micros]), [list(flat[micros + each * m :][:each]) for m in range(micros)])

    def idle(self, graph: Graph, reduction: LossReduction) -> dict[int, frozenset[str]]:
        """The values that carry no weight, of micro-batches where there are any."""
        found = {}
        for micro, (share, numbers) in enumerate(zip(self.shares, self.numbers, strict=True)):
            terms = zip(reduction.adjusted, numbers, strict=False)
            dropped = frozenset((a.reader, a.value) for a, number in terms if a.reader is not None and number == 0.0)
            if share == 0.0:
                found[micro] = frozenset(graph.value_map())
            elif dropped:
                found[micro] = without_weight(graph, dropped)
        return found


@dataclass(frozen=True, slots=True)
class PartWeights:
    """The same of the parts that replicas have of the micro-batches: for each division, of each micro-batch in order
    that of each replica; 0 where a replica has no rows."""

    of: dict[Division, Weights]

    @classmethod
    def nothing(cls, divisions: Sequence[Division], micros: int, numbers: int) -> PartWeights:
        """As many, all of them 0."""
        sizes = {each: each.count * micros for each in divisions}
        return cls({each: Weights([0.0] * n, [[0.0] * numbers for _ in range(n)]) for each, n in sizes.items()})

    def flat(self) -> list[float]:
        """All of them, to be sent."""
        return [number for weights in self.of.values() for number in weights.flat()]

    def read(self, flat: Sequence[float]) -> PartWeights:
        """The inverse of `flat`, for as many as these."""
        found, start = {}, 0
        for each, weights in self.of.items():
            end = start + len(weights.flat())
            found[each] = Weights.read(flat[start:end], len(weights.shares))
            start = end
        return PartWeights(found)

    def own(self, division: Division, replica: int) -> Weights:
        """Of one replica, by micro-batch."""
        weights, count = self.of[division], division.count
        return Weights(weights.shares[replica::count], weights.numbers[replica::count])

    def whole(self) -> list[float] | None:
        """Shares of whole micro-batches in the loss, None where terms of the loss are weighed by themselves."""
        if any(row for weights in self.of.values() for row in weights.numbers):
            return None
        division, weights = min(self.of.items(), key=lambda item: item[0].splits)
        shares = weights.shares
        own = [shares[place : place + division.count] for place in range(0, len(shares), division.count)]
        # Shares of a mean add up to 1 over all parts; of a sum each is 1, also that of the whole.
        return [max(each) for each in own] if 1.0 in shares else [sum(each) for each in own]

    @property
    def uneven(self) -> bool:
        """Whether some part carries no weight: then a gradient may be missing on one replica and not on another."""
        return any(0.0 in w.shares or any(0.0 in row for row in w.numbers) for w in self.of.values())


def among(parts: Sequence[int], found: Weights, numbers: int) -> Weights:
    """Weights for all parts, from those of the parts that have rows."""
    shares, rows = iter(found.shares), iter(found.numbers)
    return Weights(
        [next(shares) if part else 0.0 for part in parts],
        [next(rows) if part else [0.0] * numbers for part in parts],
    )


def weighted_loss(losses: Mapping[int, torch.Tensor], shares: Sequence[float]) -> float:
    """The loss of the whole batch, where it is computed; elsewhere 0.  Waits for the device, once."""
    total = torch.zeros((), dtype=torch.float64)
    with waiting():
        for micro, share in enumerate(shares):
            if losses and share != 0.0:  # a micro-batch without a valid target may have a loss of 0/0
                total = total.to(losses[micro].device) + losses[micro].double() * share
        return total.item()


class BatchCounts:
    """Counts and sums that follow from the inputs alone, computed by ops cut out of the captured program.

    rows of a micro-batch and its inputs by value name are what every method takes of each micro-batch.
    """

    def __init__(self, tensors: LocalTensors, device: torch.device) -> None:
        self._tensors = tensors
        self._device = device
        self._sizes: set[int] = set()
        self._code: dict[tuple[int, str], StageModule] = {}
        self._constants: dict[tuple[int, str], torch.Tensor] = {}

    def clear(self) -> None:
        """Forget everything: a batch of another signature comes."""
        self._sizes.clear()
        self._code.clear()
        self._constants.clear()

    def has(self, rows: int) -> bool:
        """Whether parts of so many rows can be counted."""
        return rows in self._sizes

    def add(self, captured: Captured, reduction: LossReduction) -> None:
        """Cut out what computes the values that this reduction counts, at the rows of `captured`."""
        graph = captured.graph
        self._sizes.add(graph.rows)
        kinds = {param.name: param.kind for param in graph.params}
        for name in sorted(set(reduction.counted())):
            key = graph.rows, name
            if kinds.get(name) == "constant":
                self._constants[key] = captured.tensors[name].to(self._device)
            elif name in kinds:
                self._tensors.hold([name], captured.tensors)
            elif name not in graph.inputs:
                module = cut(captured, ancestors(graph, name), [name], self._device)
                self._tensors.hold(module.held, captured.tensors)
                self._code[key] = module

    def weights(self, reduction: LossReduction, micro_rows: Sequence[int], inputs: Sequence[Inputs]) -> Weights:
        """What weighs each micro-batch."""
        return Weights(self.shares(reduction, micro_rows, inputs), self.numbers(reduction, micro_rows, inputs))

    def measured(self, reduction: LossReduction, rows: Sequence[int], inputs: Sequence[Inputs]) -> list[list[float]]:
        """Of each piece of a batch, what the weights of its parts follow from: the count of `reduction` and of the
        weight of each adjusted value, 0 where nothing is counted; then each adjusted value that is a number of the
        whole batch, 0 in place of others."""
        weights = [reduction, *(item.weight for item in reduction.adjusted)]
        found = []
        for count, given in zip(rows, inputs, strict=True):
            counts = [0.0 if weight.value is None else self._count(weight, count, given) for weight in weights]
            whole = [
                0.0 if item.reader is not None else float(self._value(item.value, count, given))
                for item in reduction.adjusted
            ]
            found.append([*counts, *whole])
        return found

    def shares(self, reduction: LossReduction, micro_rows: Sequence[int], inputs: Sequence[Inputs]) -> list[float]:
        """The share of each micro-batch's value in that of the whole batch."""
        if len(micro_rows) == 1 or reduction.kind == "sum":
            return [1.0] * len(micro_rows)
        if reduction.value is None:
            return [rows / sum(micro_rows) for rows in micro_rows]
        counts = [self._count(reduction, rows, given) for rows, given in zip(micro_rows, inputs, strict=True)]
        total = sum(counts)
        # No counted token in the whole batch: equal shares give what one process gives, 0/0 or a floor's 0.
        return [count / total if total else 1 / len(counts) for count in counts]

    def numbers(
        self, reduction: LossReduction, micro_rows: Sequence[int], inputs: Sequence[Inputs]
    ) -> list[list[float]]:
        """For each micro-batch, the number of each value that is adjusted."""
        columns = []
        for item in reduction.adjusted:
            column = self.shares(item.weight, micro_rows, inputs)
            if item.reader is None:
                parts = zip(column, micro_rows, inputs, strict=True)
                values = [share * float(self._value(item.value, rows, one)) for share, rows, one in parts if share]
                column = [sum(values)] * len(micro_rows)
            columns.append(column)
        return [list(row) for row in zip(*columns, strict=True)] if columns else [[] for _ in micro_rows]

    def _value(self, name: str, rows: int, inputs: Inputs) -> torch.Tensor:
        """A value of one micro-batch."""
        if name in inputs:
            return inputs[name]
        module = self._code.get((rows, name))
        if module is None:
            constant = self._constants.get((rows, name))
            return self._tensors.held[name] if constant is None else constant
        arguments = module.arguments(self._tensors.held)
        with torch.no_grad():
            found: torch.Tensor = module.module(*arguments, *(inputs[value] for value in module.inputs))[0]
        return found

    def _count(self, weight: LossReduction, rows: int, inputs: Inputs) -> float:
        """What one micro-batch counts."""
        assert weight.value is not None
        result = self._value(weight.value, rows, inputs)
        if weight.ignore is not None:
            counted = result != weight.ignore
            if weight.classes is None:
                return float(counted.sum(dtype=torch.float64))
            result = self._value(weight.classes, rows, inputs).detach()[result[counted]]
            if weight.smoothed and result.numel() and not result.any():
                raise BatchError(
                    "all targets of a micro-batch are of classes that weigh 0",
                    why="with label smoothing the loss of such targets is not 0, and there is no mean of it",
                    fix="use fewer micro_batches, or ignore_index in place of a weight of 0",
                )
        return float(result.sum(dtype=torch.float64))

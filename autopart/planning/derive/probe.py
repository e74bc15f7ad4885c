"""A numeric test for values that the rules do not know: does a value of a micro-batch equal a slice of the batch's?

The captured program runs on `large` rows and, on the same data, on `small` rows at several offsets.  A value passes if
every slice matches and, if gradients flow through it, the gradients of a random function of it add up over the pieces.
This is done on the user's rows and weights, and on random data like them with random weights of their own, in which no
gate is closed; values of few elements, which agree by chance, are tried more often.  In later turns masks of rows are
turned over in places, so that rare conditions occur, and numbers are large, so that thresholds are crossed.

Never asked about values behind a comparison or a limit of places and counts of rows (an expert that overflows), which
numbers cannot settle (`passes.loss.analysis`).  Assumes that an op of your own, of which nothing is known, does not
couple rows for rare numbers alone.  Dropout is off, other random numbers are 0.5, and batch norm uses its running
statistics.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from autopart.batch.batch import Batch
from autopart.passes.ops.row import POINTWISE
from autopart.passes.ops.table import row_of
from autopart.planning.derive.family import differing_axis
from autopart.planning.derive.trial_data import SIZES, Weights, data_of_turn, rows_of, weights_of_turn
from autopart.rng import keyed

if TYPE_CHECKING:
    from autopart.capture import Captured

Tensors = dict[str, torch.Tensor]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 5e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Largest difference of an element, relative to the largest element of the value."""
_MOST_TURNS = 10
"""Batches that are tried at most."""
_LEAST_SHOWN = 2
"""Random batches with distinct rows in which a value has to match."""
_MOST_TRIALS = 24
"""Runs spent on finding the values whose gradients do not add up."""
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_GRADIENT_TURNS = 3
"""The first turns, in which gradients are compared too; the last of them turns masks over."""


def prove_rows(small: Captured, large: Captured, names: Iterable[str], batch: Batch) -> frozenset[str]:
    """Return those of `names` whose rows are independent, and those that are constants equal in both captures.

    small, large: one model captured at two numbers of rows; without weights only constants are compared.  batch: the
    user's data.  The model is not changed.  Costs a few forward and backward passes.
    """
    asked = set(names)
    held = [(n, small.tensors[n], large.tensors[n]) for n in asked if n in large.tensors]
    constants = {n for n, a, b in held if not a.is_meta and not b.is_meta and torch.equal(a, b)}
    axes = _row_axes(small, large)
    if any(t.is_meta for t in large.tensors.values()):
        return frozenset(constants)
    seen = dict.fromkeys([n for n in axes if n in asked], 0)  # value: random batches that show something about it
    elements = {value.name: math.prod(value.shape) for value in large.graph.values}
    for turn in range(_MOST_TURNS):
        fewest = min((elements[name] for name in seen), default=0)
        enough = max(_LEAST_SHOWN, min(_MOST_TURNS - 2, 1024 // max(1, fewest)))  # more for a value of few elements
        if not seen or (turn > len(SIZES) and min(seen.values()) >= enough):
            break
        found = _Trial(small, large, axes, batch, turn).passing(list(seen), gradients=turn < _GRADIENT_TURNS)
        if not found and turn == 0:
            return frozenset(constants)
        for name, verdict in found.items():
            if verdict is False:
                del seen[name]
            else:
                seen[name] += bool(verdict) and turn > 0
    return frozenset(constants | {name for name, count in seen.items() if count >= _LEAST_SHOWN})


def _row_axes(small: Captured, large: Captured) -> dict[str, tuple[int, int]]:
    """Return by value (axis, entries along it for each row) where only one axis grows, in proportion to the rows."""
    found, others = {}, small.graph.value_map()
    for value in large.graph.values:
        shape = others[value.name].shape
        axis = differing_axis(shape, value.shape)
        if axis is not None:
            block, rest = divmod(shape[axis], small.graph.rows)
            if not rest and block * large.graph.rows == value.shape[axis]:
                found[value.name] = axis, block
    return found


class _Trial:
    """Both programs on one batch of `large` rows.  axes: see `_row_axes`."""

    def __init__(
        self, small: Captured, large: Captured, axes: dict[str, tuple[int, int]], batch: Batch, turn: int
    ) -> None:
        self._small, self._large, self._batch = small, large, data_of_turn(large, batch, turn)
        self._axes, self._weights = axes, weights_of_turn(large, turn)
        self._turned = _Turned(large, axes, turn) if turn > 1 else None
        self._values = large.graph.value_map()
        rows, self._piece = large.graph.rows, small.graph.rows
        self._places = [*range(0, rows - self._piece, self._piece), rows - self._piece]

    def passing(self, names: list[str], *, gradients: bool) -> dict[str, bool | None]:
        """Return for each value whether it matches; None if this data cannot show it (NaN, two equal rows).

        Empty if the program fails on this data, also where masks that choose among integers are not turned over.
        """
        try:
            found = self._matching(names)
            if gradients:
                floating = {v.name for v in self._large.graph.values if v.grad}
                flowing = [n for n in names if found[n] and n in floating]
                self._trials = _MOST_TRIALS
                found |= dict.fromkeys(set(flowing) - set(self._adding_up(flowing)), False)
            return found
        except (RuntimeError, IndexError):
            if self._turned is None or self._turned.guards:
                return {}
            self._turned.guards = True
            return self.passing(names, gradients=gradients)

    def _matching(self, names: list[str]) -> dict[str, bool | None]:
        found: dict[str, bool | None] = {}
        with torch.no_grad():
            whole = self._run(self._large, 0, set(names))
            for name in names:
                found[name] = self._distinct(name, whole[name]) if name in whole else False
            for place in self._places:
                piece = self._run(self._small, place, set(names))
                for name in names:
                    told = found[name] is not False and name in piece
                    if not told or not _close(self._slice(name, whole[name], place), piece[name]):
                        found[name] = None if name in whole and bool(whole[name].isnan().any()) else False
        return found

    def _run(self, captured: Captured, place: int, keep: set[str]) -> Tensors:
        if self._turned is not None:
            self._turned.place = place
        inputs = rows_of(self._batch, place, captured.graph.rows)
        return run(captured, inputs, keep, self._weights, self._turned)

    def _distinct(self, name: str, value: torch.Tensor) -> bool | None:
        """Return True if no two rows are equal, else None: an exchange of equal rows would not show."""
        rows = value.movedim(self._axes[name][0], 0).reshape(self._large.graph.rows, -1)
        rows = (torch.view_as_real(rows.resolve_conj()).flatten(1) if rows.is_complex() else rows).double()
        mix = torch.linspace(1, 2, rows.shape[1], dtype=torch.float64, device=rows.device).sin()
        rows = torch.where(rows.isinf(), torch.zeros_like(rows), rows)
        return True if len({round(x, 9) for x in (rows @ mix).tolist()}) == len(rows) else None

    def _adding_up(self, names: list[str]) -> list[str]:
        """Return the values through which gradients add up over the pieces: all are tried at once, then halves."""
        if not names or self._trials <= 0:
            return []
        self._trials -= 1
        if self._gradients_agree(names):
            return names
        middle = len(names) // 2
        return [] if middle == 0 else self._adding_up(names[:middle]) + self._adding_up(names[middle:])

    def _gradients_agree(self, names: list[str]) -> bool:
        factors = self._factors(names)
        whole = self._gradients(self._large, 0, factors)
        total = [torch.zeros_like(g) for g in whole]
        done = 0
        for place in self._places:
            part = {n: self._slice(n, f, place).clone() for n, f in factors.items()}
            for name, factor in part.items():  # rows that an earlier piece has counted
                axis, block = self._axes[name]
                factor.narrow(axis, 0, (done - place) * block).zero_()
            pieces = self._gradients(self._small, place, part)
            total = [t + g for t, g in zip(total, pieces, strict=True)]
            done = place + self._piece
        return all(near(t, g, whole) for t, g in zip(total, whole, strict=True))

    def _factors(self, names: list[str]) -> Tensors:
        generator = torch.Generator().manual_seed(1)
        made = {}
        for name in names:
            value = self._values[name]
            factor = torch.randn(value.shape, generator=generator) / max(1, math.prod(value.shape)) ** 0.5
            made[name] = factor.to(getattr(torch, value.dtype))
        return made

    def _gradients(self, captured: Captured, place: int, factors: Tensors) -> list[torch.Tensor]:
        names = [name for name, tensor in self._large.tensors.items() if tensor.requires_grad]
        with torch.enable_grad():
            found = self._run(captured, place, set(factors))
        seeds = [factors[name].to(found[name].device) for name in factors]
        return gradients(captured, names, [found[name] for name in factors], seeds, self._weights)

    def _slice(self, name: str, value: torch.Tensor, place: int) -> torch.Tensor:
        axis, block = self._axes[name]
        return value.narrow(axis, place * block, self._piece * block)


class _Turned:
    """Turns the results of comparisons over in three of ten places, alike in the whole batch and in its pieces, if they
    have one axis of rows.  place: of the piece that runs.  guards: whether a mask that chooses among integers is left
    as it is, since it may keep an index in its range."""

    def __init__(self, large: Captured, axes: dict[str, tuple[int, int]], turn: int) -> None:
        self._large, self._axes, self._turn, self.place, self.guards = large, axes, turn, 0, False
        self._drawn: Tensors = {}

    def __call__(self, name: str, result: torch.Tensor) -> torch.Tensor:
        if name not in self._axes:
            return result
        axis, block = self._axes[name]
        if name not in self._drawn:
            shape = self._large.graph.value_map()[name].shape
            generator = torch.Generator().manual_seed(self._turn + 1000 * len(self._drawn))
            self._drawn[name] = torch.rand(shape, generator=generator) < 0.3
        turned = self._drawn[name].narrow(axis, self.place * block, result.shape[axis])
        return result ^ turned.to(result.device)


def run(
    captured: Captured,
    inputs: list[torch.Tensor],
    keep: set[str],
    weights: Weights | None = None,
    turned: _Turned | None = None,
) -> Tensors:
    """Run a captured program without randomness; return the values in `keep` that do not depend on random numbers."""
    queue = iter(inputs)
    params = captured.names.params
    program, given = _WithoutRandomness(captured, keep, turned), []
    for place in captured.module.graph.find_nodes(op="placeholder"):
        if place.name not in params:
            given.append(next(queue))
            continue
        name = params[place.name]
        tensor = captured.names.tensors[name]
        tensor = (weights or {}).get(id(tensor), tensor)
        # a parameter itself, and a copy of a buffer, since some ops write to it
        given.append(tensor if captured.names.kinds[name] == "param" else tensor.detach().clone())
    program.run(*given)
    return program.kept


class _WithoutRandomness(fx.Interpreter):
    """Runs a captured program; keeps wanted values that do not depend on random numbers."""

    def __init__(self, captured: Captured, keep: set[str], turned: _Turned | None) -> None:
        super().__init__(captured.module)
        self._turned = turned
        self.kept: Tensors = {}
        self._names, self._keep = captured.names, keep
        self._unknown: set[fx.Node] = set()
        self._real: dict[fx.Node, torch.Tensor] = {}  # what was turned over

    def _real_args(self, n: fx.Node) -> Any:
        return fx.node.map_arg((n.args, n.kwargs), lambda node: self._real.get(node, self.env[node]))

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function":
            made = n.meta.get("val")
            of_integers = isinstance(made, torch.Tensor) and made.dtype in _INTEGERS
            args = self._real_args(n) if of_integers else self.fetch_args_kwargs_from_env(n)
            result, told = _call(n.target, *args)
        else:
            result, told = super().run_node(n), True
        name = self._names.value(n)
        compared = isinstance(result, torch.Tensor) and result.dtype == torch.bool and n.op == "call_function"
        if self._turned is not None and compared and row_of(str(n.target)).family == POINTWISE:
            if self._turned.guards:
                self._real[n] = _call(n.target, *self._real_args(n))[0]
            result = self._turned(name, result)
        if not told or not self._unknown.isdisjoint(n.all_input_nodes):
            self._unknown.add(n)
        elif name in self._keep and isinstance(result, torch.Tensor):
            self.kept[name] = result
        return result


def _call(target: Any, args: Any, kwargs: Any) -> tuple[Any, bool]:
    """Return the result of an op without randomness, and whether its random numbers could be removed."""
    random = target is keyed
    if random:
        target, args = args[0], args[2:]
    if not isinstance(target, torch._ops.OpOverload):
        return target(*args, **kwargs), not random
    row = row_of(str(target))
    bound = {a.name: value for a, value in zip(target._schema.arguments, args, strict=False)} | kwargs
    off = {k: v for k, v in row.off if k in {a.name for a in target._schema.arguments}}
    result = target(**bound | off)
    if random and row.stand_in is not None:
        return torch.full_like(result, row.stand_in), True
    return result, not random or bool(off)


def gradients(
    captured: Captured,
    names: Iterable[str],
    outputs: Iterable[torch.Tensor],
    seeds: Iterable[torch.Tensor],
    weights: Weights | None = None,
) -> list[torch.Tensor]:
    """Return the gradients of these parameters for gradients of outputs, which keep their graph."""
    own, given = [captured.tensors[name] for name in names], weights or {}
    tensors = [given.get(id(tensor), tensor) for tensor in own]
    pairs = [(output, seed) for output, seed in zip(outputs, seeds, strict=True) if output.requires_grad]
    if not pairs or not tensors:
        return [torch.zeros_like(tensor) for tensor in tensors]
    reached, flowing = zip(*pairs, strict=True)
    found = torch.autograd.grad(reached, tensors, flowing, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(tensors, found, strict=True)]


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether values are equal up to rounding; NaN equals nothing."""
    if not a.is_floating_point():
        return bool(torch.equal(a, b))
    if a.numel() == 0:
        return True
    scale = torch.maximum(a.abs().amax(), b.abs().amax()).double()
    finite = bool(torch.isfinite(a).logical_or(a == b).all())
    difference = torch.where(a == b, torch.zeros_like(a), a - b).abs().amax().double()
    return finite and bool(difference <= TOLERANCE.get(a.dtype, 3e-2) * scale)


def near(a: torch.Tensor, b: torch.Tensor, everything: list[torch.Tensor]) -> bool:
    """Return whether gradients are equal up to rounding, relative to their norm or 1 % of the whole gradient's."""
    tolerance = 20 * TOLERANCE.get(b.dtype, 3e-2)
    whole = torch.stack([_wide(g).norm() for g in everything]).norm()
    difference = (_wide(a) - _wide(b)).norm()
    return bool(difference <= tolerance * torch.maximum(_wide(b).norm(), 1e-2 * whole))


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)

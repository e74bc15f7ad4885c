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
_GRADIENT_TURNS = 3
"""The first turns, in which gradients are compared too; the last of them turns masks over."""


def prove_rows(small: Captured, large: Captured, names: Iterable[str], batch: Batch) -> frozenset[str]:
    """Return those of `names` whose rows are independent, and those that are constants equal in both captures.

    small, large: one model captured at two numbers of rows; without weights only constants are compared.  batch: the
    user's data.  The model is
    not changed.  Costs a few forward and backward passes.
    """
    asked = set(names)
    constants = {n for n in asked if n in large.tensors and _same(small.tensors[n], large.tensors[n])}
    values = [v.name for v in large.graph.values if v.name in asked and _rows_axis(v.name, small, large) is not None]
    if any(t.is_meta for t in large.tensors.values()):
        return frozenset(constants)
    seen = dict.fromkeys(values, 0)  # value: random batches that show something about it
    for turn in range(_MOST_TURNS):
        if not seen or (turn > len(SIZES) and min(seen.values()) >= _enough(seen, large)):
            break
        found = _Trial(small, large, batch, turn).passing(list(seen), gradients=turn < _GRADIENT_TURNS)
        if not found and turn == 0:
            return frozenset(constants)
        for name, verdict in found.items():
            if verdict is False:
                del seen[name]
            else:
                seen[name] += bool(verdict) and turn > 0
    return frozenset(constants | {name for name, count in seen.items() if count >= _LEAST_SHOWN})


def _enough(names: Iterable[str], large: Captured) -> int:
    """Return how many random batches to try: more for a value of few elements."""
    sizes = large.graph.value_map()
    fewest = min(math.prod(sizes[name].shape) for name in names)
    return max(_LEAST_SHOWN, min(_MOST_TURNS - 2, 1024 // max(1, fewest)))


class _Trial:
    """Both programs on one batch of `large` rows."""

    def __init__(self, small: Captured, large: Captured, batch: Batch, turn: int) -> None:
        self._small, self._large, self._batch = small, large, data_of_turn(large, batch, turn)
        self._weights = weights_of_turn(large, turn)
        self._turned = _Turned(small, large, turn) if turn > 1 else None
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
        axis, _ = self._axis_and_block(name)
        rows = value.movedim(axis, 0).reshape(self._large.graph.rows, -1)
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
                axis, block = self._axis_and_block(name)
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
        axis, block = self._axis_and_block(name)
        return value.narrow(axis, place * block, self._piece * block)

    def _axis_and_block(self, name: str) -> tuple[int, int]:
        axis = _rows_axis(name, self._small, self._large)
        assert axis is not None
        return axis, self._values[name].shape[axis] // self._large.graph.rows


def _rows_axis(name: str, small: Captured, large: Captured) -> int | None:
    """Return the only axis whose size is proportional to the rows, or None."""
    a, b = (next((v.shape for v in c.graph.values if v.name == name), ()) for c in (small, large))
    differing = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
    if len(differing) != 1:
        return None
    axis = differing[0]
    proportional = a[axis] * large.graph.rows == b[axis] * small.graph.rows and a[axis] % small.graph.rows == 0
    return axis if proportional else None


class _Turned:
    """Turns the results of comparisons over in three of ten places, alike in the whole batch and in its pieces, if they
    have one axis of rows.  place: of the piece that runs.  guards: whether a mask that chooses among integers is left
    as it is, since it may keep an index in its range."""

    def __init__(self, small: Captured, large: Captured, turn: int) -> None:
        self._both, self._turn, self.place, self.guards = (small, large), turn, 0, False
        self._drawn: Tensors = {}

    def __call__(self, captured: Captured, name: str, result: torch.Tensor) -> torch.Tensor:
        small, large = self._both
        axis = _rows_axis(name, small, large)
        if axis is None:
            return result
        if name not in self._drawn:
            shape = large.graph.value_map()[name].shape
            generator = torch.Generator().manual_seed(self._turn + 1000 * len(self._drawn))
            self._drawn[name] = torch.rand(shape, generator=generator) < 0.3
        block = result.shape[axis] // captured.graph.rows
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
    places = captured.module.graph.find_nodes(op="placeholder")
    program = _WithoutRandomness(captured, keep, turned)
    given = weights or {}
    program.run(
        *(_own(captured, params[place.name], given) if place.name in params else next(queue) for place in places)
    )
    return program.kept


def _own(captured: Captured, name: str, given: Weights) -> torch.Tensor:
    """Return a parameter itself, and a copy of a buffer, since some ops write to it; or what is given for it."""
    tensor = captured.names.tensors[name]
    tensor = given.get(id(tensor), tensor)
    return tensor if captured.names.kinds[name] == "param" else tensor.detach().clone()


class _WithoutRandomness(fx.Interpreter):
    """Runs a captured program; keeps wanted values that do not depend on random numbers."""

    def __init__(self, captured: Captured, keep: set[str], turned: _Turned | None) -> None:
        super().__init__(captured.module)
        self._captured, self._turned = captured, turned
        self.kept: Tensors = {}
        self._names, self._keep = captured.names, keep
        self._unknown: set[fx.Node] = set()
        self._real: dict[fx.Node, torch.Tensor] = {}  # what was turned over

    def _real_args(self, n: fx.Node) -> Any:
        return fx.node.map_arg((n.args, n.kwargs), lambda node: self._real.get(node, self.env[node]))

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function":
            result, told = _call(
                n.target, *(self._real_args(n) if _is_of_integers(n) else self.fetch_args_kwargs_from_env(n))
            )
        else:
            result, told = super().run_node(n), True
        name = self._names.value(n)
        compared = isinstance(result, torch.Tensor) and result.dtype == torch.bool and n.op == "call_function"
        if self._turned is not None and compared and row_of(str(n.target)).family == POINTWISE:
            if self._turned.guards:
                self._real[n] = _call(n.target, *self._real_args(n))[0]
            result = self._turned(self._captured, name, result)
        if not told or not self._unknown.isdisjoint(n.all_input_nodes):
            self._unknown.add(n)
        elif name in self._keep and isinstance(result, torch.Tensor):
            self.kept[name] = result
        return result


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _is_of_integers(n: fx.Node) -> bool:
    made = n.meta.get("val")
    return isinstance(made, torch.Tensor) and made.dtype in _INTEGERS


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


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not a.is_meta and not b.is_meta and a.shape == b.shape and bool(torch.equal(a, b))


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

"""What a slice of a sequence costs: a measured table of first slices, and a line for what comes before it.

    t(b, l, c) = layers * (t0[b, l] + a0 + a1 b l + a2 b c + a3 b l c) + 2 * (latency + bytes per token * b l / rate)

as TeraPipe has it (ICML 2021, section 3.3 and its latency_model.py): t0 is measured at every number of rows and length,
forward and backward in one; the line in a0..a3 is fitted where a context c is there, since attention of l tokens looks
at l (c + l) of them; a message goes forward and its gradient back.  Stated error of the line: below 2%.

Assumed, and wrong where: between measured lengths the table is linear (kernels work in tiles); messages are not hidden
behind computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopart.ir.errors import UsageError
from autopart.passes.tokens.lengths import Ints

Floats = npt.NDArray[np.float64]
Sample = tuple[int, int, int, float]
"""(rows, length, context, nanoseconds) of one layer's slice."""


@dataclass(frozen=True, slots=True)
class LinearContext:
    """A `passes.tokens.lengths.SliceCost`.

    alone: for each number of rows, lengths (ascending) and the nanoseconds of a layer's first slice of them.  line: a0
    to a3, in ns.  layers: of the slowest stage.  message: ns of one message that are always there, and of each token of
    a row.
    """

    alone: Mapping[int, tuple[tuple[int, ...], tuple[float, ...]]]
    line: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    layers: int = 1
    message: tuple[float, float] = (0.0, 0.0)

    def __call__(self, rows: int, lengths: Ints, contexts: Ints) -> Floats:
        """Nanoseconds of these slices.  Raises UsageError for a number of rows that was not measured.  O(slices)."""
        if rows not in self.alone:
            raise UsageError(f"no slice of {rows} rows was measured", fix=f"measure it, or use one of {[*self.alone]}")
        known, ns = self.alone[rows]
        behind = np.where(contexts > 0, _terms(rows, lengths, contexts) @ np.array(self.line), 0.0)
        fixed, each = self.message
        return self.layers * (np.interp(lengths, known, ns) + behind) + 2 * (fixed + each * rows * lengths)

    def error(self, samples: Sequence[Sample]) -> float:
        """Mean relative error on one layer's slices, without messages: its honest error where those were held out."""
        layer = LinearContext(self.alone, self.line)
        return float(np.mean([abs(_one(layer, sample) / sample[3] - 1) for sample in samples]))


def fit(
    alone: Mapping[int, tuple[tuple[int, ...], tuple[float, ...]]],
    samples: Sequence[Sample],
    *,
    layers: int = 1,
    message: tuple[float, float] = (0.0, 0.0),
) -> LinearContext:
    """The line through these samples by least squares.  samples: with a context; others say nothing.

    Raises UsageError for fewer samples than the line has terms.  O(samples).
    """
    behind = [sample for sample in samples if sample[2] > 0]
    if len(behind) < 4:
        raise UsageError(f"{len(behind)} slices with a context were measured", why="the line has four terms")
    base = LinearContext(alone)  # its line is flat
    terms = np.concatenate([_terms(rows, np.array([n]), np.array([c])) for rows, n, c, _ in behind])
    missing = [sample[3] - _one(base, sample) for sample in behind]
    # Columns of one size, since tokens times contexts are a million times a constant.
    scale = np.abs(terms).max(axis=0)
    a0, a1, a2, a3 = np.linalg.lstsq(terms / scale, np.array(missing), rcond=None)[0] / scale
    return LinearContext(alone, (float(a0), float(a1), float(a2), float(a3)), layers, message)


def _one(cost: LinearContext, sample: Sample) -> float:
    rows, length, context, _ = sample
    return float(cost(rows, np.array([length]), np.array([context]))[0])


def _terms(rows: int, lengths: Ints, contexts: Ints) -> Floats:
    """What a0 to a3 are factors of, in the last axis."""
    terms = (np.ones(lengths.shape), rows * lengths, rows * contexts, rows * lengths * contexts)
    return np.stack(terms, axis=-1).astype(np.float64)

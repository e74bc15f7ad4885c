"""The cost of a token slice: a measured table of first slices plus a linear fit in the context before the slice.

    t(b, l, c) = layers * (t0[b, l] + a0 + a1 b l + a2 b c + a3 b l c) + 2 * (latency + bytes per token * b l / rate)

as in TeraPipe (ICML 2021, section 3.3 and its latency_model.py): t0 is measured at every number of rows and length,
forward and backward together; the coefficients a0..a3 are fitted to slices with a context c, because attention of l
tokens reads l (c + l) of them; a message goes forward and its gradient back. Stated error of the fit: below 2%.

Assumptions and their limits: the table is linear between measured lengths (kernels work in tiles); messages do not
overlap with computation.
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
    """A `passes.tokens.lengths.SliceCost` for any number of rows.

    alone: for each number of rows, lengths (ascending) and the nanoseconds of a layer's first slice. line: a0 to a3 in
    ns. layers: of the slowest stage. message: fixed ns of one message, and ns per token of a row.
    """

    alone: Mapping[int, tuple[tuple[int, ...], tuple[float, ...]]]
    line: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    layers: int = 1
    message: tuple[float, float] = (0.0, 0.0)

    def __call__(self, rows: int, lengths: Ints, contexts: Ints) -> Floats:
        """Return the nanoseconds of these slices. Raises UsageError for an unmeasured number of rows. O(slices)."""
        if rows not in self.alone:
            raise UsageError(f"no slice of {rows} rows was measured", fix=f"measure it, or use one of {[*self.alone]}")
        known, ns = self.alone[rows]
        behind = np.where(contexts > 0, _terms(rows, lengths, contexts) @ np.array(self.line), 0.0)
        fixed, each = self.message
        return self.layers * (np.interp(lengths, known, ns) + behind) + 2 * (fixed + each * rows * lengths)

    def error(self, samples: Sequence[Sample]) -> float:
        """Return the mean relative error on slices of one layer without messages. Use held-out samples."""
        layer = LinearContext(self.alone, self.line)
        return float(np.mean([abs(_one(layer, sample) / sample[3] - 1) for sample in samples]))


def fit(
    alone: Mapping[int, tuple[tuple[int, ...], tuple[float, ...]]],
    samples: Sequence[Sample],
    *,
    layers: int = 1,
    message: tuple[float, float] = (0.0, 0.0),
) -> LinearContext:
    """Fit the line to these samples by least squares. Samples without a context are ignored.

    Raises UsageError for fewer samples than the line has terms. O(samples).
    """
    behind = [sample for sample in samples if sample[2] > 0]
    if len(behind) < 4:
        raise UsageError(f"{len(behind)} slices with a context were measured", why="the line has four terms")
    base = LinearContext(alone)  # without context terms
    terms = np.concatenate([_terms(rows, np.array([n]), np.array([c])) for rows, n, c, _ in behind])
    missing = [sample[3] - _one(base, sample) for sample in behind]
    # Scale the columns, because tokens times contexts are a million times a constant.
    scale = np.abs(terms).max(axis=0)
    a0, a1, a2, a3 = np.linalg.lstsq(terms / scale, np.array(missing), rcond=None)[0] / scale
    return LinearContext(alone, (float(a0), float(a1), float(a2), float(a3)), layers, message)


def _one(cost: LinearContext, sample: Sample) -> float:
    rows, length, context, _ = sample
    return float(cost(rows, np.array([length]), np.array([context]))[0])


def _terms(rows: int, lengths: Ints, contexts: Ints) -> Floats:
    """Return the factors of a0 to a3, in the last axis."""
    terms = (np.ones(lengths.shape), rows * lengths, rows * contexts, rows * lengths * contexts)
    return np.stack(terms, axis=-1).astype(np.float64)

"""Models whose loss sums terms with different counts, and batches in which some micro-batches count nothing.

All use double precision and three micro-batches of 3, 2 and 2 rows; the second batch leaves a term of some micro-batch
empty.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from support.models.misleading_models import Net, Script, X, Y

ROWS, LENGTH, WIDTH = 7, 4, 8


class Deep(Net):
    """`Net` in double precision, with a class weight for each output."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("balance", torch.linspace(0.5, 2.0, WIDTH))
        self.double()


class Spans(Deep):
    """Question answering: start and end of a span; labels outside the text are ignored."""

    def forward(self, x: torch.Tensor, start: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        hidden = self.run(x)
        first, last = hidden[..., 0], hidden[..., 1]
        ignored = first.size(1)
        start, end = start.clamp(0, ignored), end.clamp(0, ignored)
        return (
            F.cross_entropy(first, start, ignore_index=ignored) + F.cross_entropy(last, end, ignore_index=ignored)
        ) / 2


class Auxiliary(Deep):
    """A classification loss and a masked mean over an early layer, which is computed in the first stage."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.l[0](x))
        aside = (hidden.square().mean(-1) * mask).sum() / mask.sum()
        for layer in list(self.l)[1:]:
            hidden = torch.tanh(layer(hidden))
        return F.cross_entropy(hidden[:, 0], y, ignore_index=0) + 0.3 * aside + 0.01 * self.l[3].weight.square().sum()


class Detector(Deep):
    """A focal loss over all places divided by the positive ones, and a box loss of the positive ones."""

    def forward(self, x: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
        hidden = self.run(x)
        count = positive.sum()
        each = F.binary_cross_entropy_with_logits(hidden[..., 0], positive.double(), reduction="none")
        boxes = F.smooth_l1_loss(hidden[..., 1:5], x[..., 1:5], reduction="none").sum(-1)
        return each.sum() / count + 2 * (boxes * positive).sum() / count.clamp(min=1) + hidden.mean()


class Weighed(Deep):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.run(x), y, weight=self.balance, ignore_index=3, label_smoothing=0.1)


class MaskedMean(Deep):
    """A masked mean whose division is in the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Linear(WIDTH, WIDTH, bias=False).double()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.tail(self.run(x) * mask[..., None] / mask.sum()).sum()


def places(seed: int) -> torch.Tensor:
    return torch.randint(LENGTH, (ROWS,), generator=torch.Generator().manual_seed(seed))


def words(seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed)).double()


def without(labels: torch.Tensor, rows: slice, value: int) -> torch.Tensor:
    """Return the labels with another value in some rows."""
    labels = labels.clone()
    labels[rows] = value
    return labels


MASK = torch.rand(ROWS, LENGTH, generator=torch.Generator().manual_seed(3)) > 0.4
FIRST, SECOND, THIRD = slice(0, 3), slice(3, 5), slice(5, 7)
LOSSES = {
    "spans": Script(
        Spans,
        (
            (words(), places(1), places(2)),
            (words(1), without(places(1), FIRST, 9), without(places(2), THIRD, 9)),
            (words(2), without(places(1), SECOND, 9), without(places(2), SECOND, 9)),
        ),
        micros=3,
    ),
    "a term of an early layer": Script(
        Auxiliary,
        (
            (words(), Y(ROWS), MASK),
            (words(1), without(Y(ROWS), FIRST, 0), without(MASK, SECOND, 0)),
            (words(2), without(Y(ROWS), THIRD, 0), without(MASK, THIRD, 0)),
        ),
        micros=3,
        options={"cuts": ("l.1",)},
    ),
    "a detector": Script(Detector, ((words(), MASK), (words(1), without(MASK, SECOND, 0))), micros=3),
    "class weights": Script(
        Weighed, ((X(ROWS).double(), Y(ROWS)), (X(ROWS, 1).double(), without(Y(ROWS, 1), SECOND, 3))), micros=3
    ),
    "divided in the first stage": Script(
        MaskedMean,
        ((words(), MASK), (words(1), without(MASK, SECOND, 0))),
        micros=3,
        options={"cuts": ("tail",)},
    ),
}

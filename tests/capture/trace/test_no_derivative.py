"""An op without a derivative on the way to a parameter is refused: the gradient would be wrong in silence."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopart.batch.batch import flatten
from autopart.capture import capture
from autopart.ir.errors import RefusedError

_library = torch.library.Library("autopart_tests", "FRAGMENT")
_library.define("opaque(Tensor x) -> Tensor")
_library.impl("opaque", lambda x: x.sin(), "CompositeExplicitAutograd")
_library.impl("opaque", lambda x: torch.empty_like(x), "Meta")


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.ops.autopart_tests.opaque(self.first(x))).sum()


def test_an_op_without_a_derivative_is_refused() -> None:
    with pytest.raises(RefusedError, match="no derivative"):
        capture(Opaque(), flatten(torch.randn(3, 4)))

"""The rule of PipeTransformer (He et al., ICML 2021, section 3.1).

    L_frozen(T) = min( L_frozen(T-1) + alpha (L - L_frozen(T-1)),  argmin of ||g_l|| over the active layers l )

Layers count from 1, so the second term freezes up to and including the layer with the smallest gradient norm.  The
first alone has the closed form L (1 - (1 - alpha)^T), which is what the published code uses, without gradients.  A
number of layers is rounded up, as there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from autopart.extras.freezing.policies.policy import Policy
from autopart.ir.errors import UsageError

_ROUNDING = 1e-9


def closed_form(layers: int, alpha: float, epoch: int) -> int:
    """Return how many of the layers are frozen in an epoch (from 0) if gradients do not count."""
    return math.ceil(layers * (1 - (1 - alpha) ** epoch) - _ROUNDING)


class PipeTransformer(Policy):
    """Freezes a part `alpha` of the layers that still learn before every epoch but the first, and no layer behind the
    one with the smallest gradient norm.

    The embeddings freeze with the first layer, and what comes behind the last layer never does.
    """

    def __init__(self, alpha: float = 1 / 3, *, gradients: bool = True, layers: str | Iterable[str] = ()) -> None:
        """alpha: between 0 and 1.  gradients: whether norms of gradients count; else the closed form is used.  layers:
        as for `Policy`."""
        if not 0 < alpha < 1:
            raise UsageError(f"alpha is {alpha!r}", fix="use a number between 0 and 1, such as 1/3")
        super().__init__(self._frozen, layers=layers)
        self.alpha, self.gradients = alpha, gradients
        self._bound, self._epoch = 0.0, 0

    def _frozen(self, epoch: int, norms: Mapping[str, float]) -> int:
        """Return how many layers are frozen in an epoch: none in epoch 0, and as many as before in one that was asked
        for."""
        if not self.gradients:
            return closed_form(len(norms), self.alpha, epoch)
        if epoch > self._epoch:
            active = list(norms.values())[self._rounded :]
            calmest = self._rounded + _smallest(active) if active else len(norms)
            self._bound = min(self._bound + self.alpha * (len(norms) - self._bound), calmest)
            self._epoch = epoch
        return self._rounded

    @property
    def _rounded(self) -> int:
        return math.ceil(self._bound - _ROUNDING)

    def state_dict(self) -> dict[str, float]:
        """Return the bound on the number of layers, and its epoch."""
        return {"bound": self._bound, "epoch": self._epoch}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a state; `apply` then freezes as many layers again."""
        self._bound, self._epoch = float(state["bound"]), int(state["epoch"])


def _smallest(norms: Sequence[float]) -> int:
    """Return the place, from 1, of the smallest norm, the first of equal ones, where there is a gradient.

    Raises UsageError if there is none.
    """
    known = [(norm, place) for place, norm in enumerate(norms, 1) if norm and math.isfinite(norm)]
    if not known:
        raise UsageError(
            "no layer has a gradient whose norm could be compared",
            fix="call apply() after pipe.step() and before zero_grad(), or use PipeTransformer(gradients=False)",
        )
    return min(known)[1]

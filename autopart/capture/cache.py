"""One model's captures, each made once: by mode, shape of the batch and size."""

from __future__ import annotations

from torch import nn

from autopart.capture.batch import Batch
from autopart.capture.capture import Captured, capture
from autopart.capture.export import LossFn
from autopart.capture.guards import check_model
from autopart.ir.size import Size

_KEEP = 32  # captures; a batch of a new shape every step must not fill the memory


class CaptureCache:
    """Captures of `model` with the training flags that it has now, whatever they are set to later."""

    def __init__(self, model: nn.Module, loss_fn: LossFn | None = None) -> None:
        self.model = check_model(model)
        self._loss_fn = loss_fn
        self._flags = [(module, module.training) for module in model.modules()]
        self._made: dict[tuple[object, ...], Captured] = {}

    def __call__(self, batch: Batch, size: Size, mode: str = "step") -> Captured:
        """The capture for micro-batches of `size` shaped like `batch`; modes as in `capture`."""
        key = (mode, size, batch.signature())
        if key not in self._made:
            now = [(module, module.training) for module in self.model.modules()]
            _set(self._flags)
            try:
                self._made[key] = capture(self.model, batch, size=size, loss_fn=self._loss_fn, mode=mode)
            finally:
                _set(now)
            if len(self._made) > _KEEP:
                del self._made[next(iter(self._made))]
        return self._made[key]


def _set(flags: list[tuple[nn.Module, bool]]) -> None:
    for module, flag in flags:
        module.training = flag

"""What forward() assigns to attributes is not kept, and a warning says so, but for what torch's own modules do."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopart.batch.batch import flatten
from autopart.capture import capture
from autopart.capture.python.guards import CaptureWarning

BATCH = torch.arange(24.0).sin().reshape(4, 6), torch.arange(4.0)


class Net(nn.Module):
    def __init__(self, counts: str, keeps: str) -> None:
        super().__init__()
        self.counts, self.keeps, self.net, self.last = counts, keeps, nn.Linear(6, 1), None
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.counts == "+=":
            self.seen += 1
        elif self.counts == "add_":
            self.seen.add_(1)
        elif self.counts == "assigned":
            self.seen = self.seen + 1
        loss = F.mse_loss(self.net(x).squeeze(1), y)
        kept = {"item": loss.item, "shape": lambda: x.shape, "detach": loss.detach, "same": lambda: None}
        if self.keeps:
            self.last = kept[self.keeps]()
        return loss


@pytest.mark.parametrize(
    ("counts", "keeps"),
    [("", ""), ("", "item"), ("+=", "shape"), ("add_", "detach"), ("assigned", "same"), ("assigned", "detach")],
)
def test_a_buffer_is_updated_and_an_assigned_attribute_is_warned_of(counts: str, keeps: str) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        captured = capture(Net(counts, keeps), flatten(BATCH))
    assert [name for name, _ in captured.graph.updates] == (["seen"] if counts else [])
    told = [str(warning.message) for warning in said if issubclass(warning.category, CaptureWarning)]
    assert len(told) == (keeps not in ("", "same")) and all("attribute last" in text for text in told)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_what_modules_of_torch_assign_is_not_warned_of() -> None:
    old, new = nn.utils.weight_norm(nn.Linear(6, 6)), nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
    spectral = nn.utils.spectral_norm(nn.Linear(6, 1))
    model = nn.Sequential(old, new, spectral, nn.Flatten(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(model, flatten(BATCH, with_target=True), loss_fn=F.mse_loss)

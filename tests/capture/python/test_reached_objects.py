"""Objects of other libraries that stand around a model: no capture breaks, and what nobody read may change."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.constant_values import AttrDict
from torch import nn

from autopart.batch.batch import flatten
from autopart.capture import CaptureCache
from autopart.capture.python.guards import CaptureWarning
from autopart.ir.graph import Size

ROWS = torch.arange(12.0).sin().reshape(2, 6)


class Cached:
    """Has the methods of a cache of functools, and is none, as psutil's functions."""

    def cache_clear(self) -> None:
        raise AssertionError("cleared")

    def cache_info(self) -> None:
        return None


class Config:
    def __init__(self) -> None:
        self.alpha, self.saved, self.epoch = 0.5, "", 0


CACHED, SETTINGS, GENERATOR = Cached(), AttrDict(alpha=0.5), torch.Generator().manual_seed(0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.config = nn.Linear(6, 6), Config()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert CACHED is not None and GENERATOR.device.type == "cpu"
        return self.linear(x).square().mean() * SETTINGS["alpha"] * self.config.alpha


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(3, 3, num_layers=2, batch_first=True), nn.GRU(3, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.lstm(x)[0] + self.gru(x)[0]).square().mean()


def captured(model: nn.Module, batch: Any) -> CaptureCache:
    cache = CaptureCache(model)
    cache(flatten(batch), Size(2))
    return cache


@functools.cache
def model_captured() -> tuple[Model, CaptureCache]:
    model = Model()
    return model, captured(model, ROWS)


def test_objects_that_look_like_caches_dictionaries_and_generators_do_not_break_a_capture() -> None:
    _, cache = model_captured()
    assert cache.refresh(training=True) == []


@pytest.mark.parametrize("name", ["saved", "epoch", "late"])
def test_attributes_of_an_object_that_forward_did_not_read_may_change(name: str) -> None:
    model, cache = model_captured()
    setattr(model.config, name, "changed")
    assert cache.refresh(training=True) == []


def test_recurrent_layers_give_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        assert captured(Recurrent(), ROWS.reshape(2, 2, 3)).refresh(training=True) == []


def test_packages_in_a_folder_that_the_path_adds_are_libraries(tmp_path: Path) -> None:
    on_path, below = tmp_path / "a" / "dist-packages", tmp_path / "b" / "dist-packages"  # of b, what is above it
    asked = [f"is_library_file({str(folder / 'x.py')!r})" for folder in (on_path, below)]
    code = f"from autopart.capture.source_location import is_library_file; print({', '.join(asked)})"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(on_path), str(below.parent)])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True", "False"]

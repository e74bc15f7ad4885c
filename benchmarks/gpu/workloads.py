"""Models of known shapes with random weights, at full width and the requested depth.

`scale` is the share of the layers that is built: widths stay, so that kernels are those of the whole model. `tiny` uses
sizes that a CPU trains in a moment, for the dry run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional

from benchmarks.shared import shapes
from benchmarks.shared.torch_pipeline import logits_of

Loss = Callable[[Any, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Workload:
    """A model and its batches.

    unit: name of the items of which a row has `per_row`; argument: name of the model's only input; layers: module path
    of its list of `count` layers; rows: rows of the batch per device; statistics: whether the model has batch
    statistics, which depend on the micro-batches.
    """

    name: str
    unit: str
    per_row: int
    argument: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], torch.Tensor]
    targets: Callable[[torch.Tensor, torch.Generator], torch.Tensor]
    loss: Loss
    layers: str
    count: int
    rows: int
    statistics: bool = False

    def model(self, device: torch.device) -> nn.Module:
        """Return the model on the CPU, with the same weights on every rank and in every run, in training mode.

        Dropout is off, because plans draw different masks. The device initializes the weights, which is fast on a GPU.
        """
        transformers.logging.set_verbosity_error()
        torch.manual_seed(0)
        with device:
            model = self.build().train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model.cpu()

    def batch(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets on the CPU, the same on every rank."""
        source = torch.Generator().manual_seed(1)
        inputs = self.inputs(rows, source)
        return inputs, self.targets(inputs, source)

    def cuts(self, stages: int) -> tuple[str, ...]:
        """Return the layers at which the second and later stages begin, with layers divided as evenly as possible."""
        return tuple(f"{self.layers}.{stage * self.count // stages}" for stage in range(1, stages))


@dataclass(frozen=True)
class Shape:
    """The shape of a transformer.

    inside: width of the feed-forward layer; groups: heads of keys and values; words: vocabulary size or classes;
    length: tokens of a row, or pixels along an image.
    """

    layers: int
    hidden: int
    heads: int
    length: int
    words: int
    inside: int = 0
    groups: int = 0


def next_token(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Return the loss of a causal language model, in single precision as in transformers."""
    logits = logits_of(output)[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1).float(), target[:, 1:].flatten())


def every_token(output: Any, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits_of(output).flatten(0, 1).float(), target.flatten())


def one_class(output: Any, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits_of(output).float(), target)


def _gpt2(name: str, s: Shape, rows: int) -> Workload:
    return _tokens(name, s, rows, lambda: shapes.gpt2(s.layers, s.hidden, s.heads, s.length, s.words), "transformer.h")


def _llama(name: str, s: Shape, rows: int) -> Workload:
    def build() -> nn.Module:
        return shapes.llama(s.layers, s.hidden, s.inside, s.heads, s.groups, s.words)

    return _tokens(name, s, rows, build, "model.layers")


def _bert(name: str, s: Shape, rows: int) -> Workload:
    def build() -> nn.Module:
        options = {"heads": s.heads, "attention": "sdpa", "kind": transformers.BertForMaskedLM}
        return shapes.bert(s.hidden, s.layers, s.words, s.length, **options)

    return replace(_tokens(name, s, rows, build, "bert.encoder.layer"), loss=every_token)


def _vit(name: str, s: Shape, rows: int) -> Workload:
    def build() -> nn.Module:
        return shapes.vit(s.layers, s.hidden, s.heads, s.length, s.length // 14, s.words)

    return _images(name, s.length, s.words, rows, build, "pixel_values", "vit.layers", s.layers)


def _resnet(name: str, s: Shape, rows: int) -> Workload:
    """Return a ResNet of four groups of blocks. layers: a known depth or fewer; hidden: filters of the first group."""
    known = [depth for depth in shapes.DEPTHS if depth <= s.layers]
    blocks = shapes.DEPTHS[max(known)] if known else (1, 1, 1, 1)

    def build() -> nn.Module:
        return shapes.ResNet(blocks, width=s.hidden)

    images = _images(name, s.length, 1000, rows, build, "x", "blocks", sum(blocks))
    return replace(images, statistics=True)


def _tokens(name: str, s: Shape, rows: int, build: Callable[[], nn.Module], layers: str) -> Workload:
    def inputs(count: int, source: torch.Generator) -> torch.Tensor:
        return torch.randint(4, s.words, (count, s.length), generator=source)

    return Workload(
        name, "tokens", s.length, "input_ids", build, inputs, lambda ids, _: ids.clone(), next_token, layers, s.layers,
        rows,
    )  # fmt: skip


def _images(
    name: str, size: int, classes: int, rows: int, build: Callable[[], nn.Module], argument: str, layers: str,
    count: int,
) -> Workload:  # fmt: skip
    def inputs(wanted: int, source: torch.Generator) -> torch.Tensor:
        return torch.randn(wanted, 3, size, size, generator=source)

    def targets(images: torch.Tensor, source: torch.Generator) -> torch.Tensor:
        return torch.randint(0, classes, (len(images),), generator=source)

    return Workload(name, "images", 1, argument, build, inputs, targets, one_class, layers, count, rows)


@dataclass(frozen=True)
class Known:
    """The shape of a model and its rows per device, and a tiny shape."""

    make: Callable[[str, Shape, int], Workload]
    whole: Shape
    rows: int
    tiny: Shape


_TINY = Shape(4, 32, 2, 16, 64, inside=64, groups=2)
_TINY_IMAGES = replace(_TINY, length=28)

MODELS = {
    "gpt2-xl": Known(_gpt2, Shape(48, 1600, 25, 1024, 50257), 8, _TINY),
    "llama-1b": Known(_llama, Shape(16, 2048, 32, 2048, 128256, inside=8192, groups=8), 4, _TINY),
    "llama-3b": Known(_llama, Shape(28, 3072, 24, 2048, 128256, inside=8192, groups=8), 4, _TINY),
    "llama-8b": Known(_llama, Shape(32, 4096, 32, 2048, 128256, inside=14336, groups=8), 4, _TINY),
    "bert-large": Known(_bert, Shape(24, 1024, 16, 512, 30528), 16, _TINY),
    "vit-large": Known(_vit, Shape(24, 1024, 16, 224, 1000), 64, _TINY_IMAGES),
    "resnet-152": Known(_resnet, Shape(152, 64, 0, 224, 1000), 64, replace(_TINY_IMAGES, hidden=8)),
}


def workload(name: str, scale: float = 1.0, *, tiny: bool = False, rows: int | None = None) -> Workload:
    """Return a workload by name. scale: share of the layers, at least two of which are built; rows: per device."""
    known = MODELS[name]
    if tiny:
        return known.make(name, known.tiny, rows or 4)
    layers = max(2, round(known.whole.layers * scale))
    return known.make(name, replace(known.whole, layers=layers), rows or known.rows)

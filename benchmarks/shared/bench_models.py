"""Models small enough for two processes of one core each, and large enough that computation dominates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from benchmarks.shared.architectures import DenoisingUNet, RecurrentModel, Sizes, built, seeded, sizes

Batch = dict[str, torch.Tensor]
Result = TypeVar("Result")


@dataclass(frozen=True)
class BenchModel:
    """A model to train. make: builds it; batch: builds its batch; layers: module path of its list of `count` layers."""

    make: Callable[[], torch.nn.Module]
    batch: Callable[[], Batch]
    layers: str
    count: int

    def model(self) -> torch.nn.Module:
        """Return the model with the same weights every time, in training mode."""
        return seeded(self.make, seed=0)


def tokens(vocab: int, rows: int, length: int) -> Callable[[], Batch]:
    def make() -> Batch:
        ids = torch.randint(4, vocab, (rows, length), generator=torch.Generator().manual_seed(1))
        return {"input_ids": ids, "labels": ids}

    return make


def _images(rows: int, size: int) -> Callable[[], Batch]:
    def make() -> Batch:
        source = torch.Generator().manual_seed(1)
        labels = torch.randint(0, 10, (rows,), generator=source)
        return {"pixel_values": torch.randn(rows, 3, size, size, generator=source), "labels": labels}

    return make


def _noisy_images(rows: int, size: int) -> Callable[[], Batch]:
    def make() -> Batch:
        source = torch.Generator().manual_seed(1)
        images, noise = (torch.randn(rows, 3, size, size, generator=source) for _ in range(2))
        return {"pixel_values": images, "level": torch.randint(1000, (rows,), generator=source), "noise": noise}

    return make


def _sizes(hidden: int, layers: int, vocab: int = 2048, **roles: int) -> Sizes:
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    common = {"inside": 4 * hidden, "heads": 4, "groups": 2, "head": hidden // 4, "experts": 4, "chosen": 2}
    return sizes(**{"hidden": hidden, "layers": layers, "vocab": vocab, "tokens": 128, **common, **roles}) | special


def gpt2(vocab: int, hidden: int, layers: int) -> Callable[[], nn.Module]:
    return lambda: built("GPT2LMHeadModel", _sizes(hidden, layers, vocab))


def _llama(vocab: int, hidden: int, layers: int) -> Callable[[], nn.Module]:
    return lambda: built("LlamaForCausalLM", _sizes(hidden, layers, vocab, inside=3 * hidden))


def _vision(model: str, **own: Any) -> Callable[[], nn.Module]:
    return lambda: built(model, _sizes(192, 8, classes=10), {"image_size": 96, **own})


def _translation(model: str) -> BenchModel:
    """Return an encoder-decoder of 4 and 4 layers."""

    def make() -> nn.Module:
        return built(model, _sizes(256, 4), {"decoder_start_token_id": 0})

    return BenchModel(make, tokens(2048, 16, 64), {"T5": "decoder.block"}.get(model[:2], "model.decoder.layers"), 4)


MODELS: dict[str, BenchModel] = {
    "gpt2": BenchModel(gpt2(2048, 256, 8), tokens(2048, 16, 96), "transformer.h", 8),
    "gpt2, vocabulary 50257": BenchModel(gpt2(50257, 192, 8), tokens(50257, 16, 48), "transformer.h", 8),
    "tiny": BenchModel(gpt2(256, 32, 4), tokens(256, 8, 16), "transformer.h", 4),
    "llama, vocabulary 32000": BenchModel(_llama(32000, 256, 6), tokens(32000, 16, 48), "model.layers", 6),
    "llama": BenchModel(_llama(2048, 256, 9), tokens(2048, 16, 96), "model.layers", 9),
    "mistral": BenchModel(
        lambda: built("MistralForCausalLM", _sizes(256, 6), {"sliding_window": 32}),
        tokens(2048, 16, 96), "model.layers", 6,
    ),
    "mixtral": BenchModel(
        lambda: built("MixtralForCausalLM", _sizes(256, 4, inside=512)), tokens(2048, 16, 64), "model.layers", 4
    ),
    "bert": BenchModel(
        lambda: built("BertForMaskedLM", _sizes(256, 8, 8192)), tokens(8192, 16, 96), "bert.encoder.layer", 8
    ),
    "opt": BenchModel(
        lambda: built("OPTForCausalLM", _sizes(256, 7, 16384), {"word_embed_proj_dim": 256}),
        tokens(16384, 16, 64), "model.decoder.layers", 7,
    ),
    "t5": _translation("T5ForConditionalGeneration"),
    "bart": _translation("BartForConditionalGeneration"),
    "lstm": BenchModel(lambda: RecurrentModel(2048, 384, 6), tokens(2048, 16, 64), "layers", 6),
    "gru": BenchModel(lambda: RecurrentModel(2048, 384, 6, nn.GRU), tokens(2048, 16, 32), "layers", 6),
    "mamba": BenchModel(
        lambda: built("MambaForCausalLM", _sizes(192, 4), {"state_size": 8}), tokens(2048, 16, 24), "backbone.layers", 4
    ),
    "unet": BenchModel(lambda: DenoisingUNet(32, 3), _noisy_images(16, 48), "down", 3),
    "vit": BenchModel(_vision("ViTForImageClassification", patch_size=8), _images(16, 96), "vit.layers", 8),
    "convnext": BenchModel(
        _vision("ConvNextForImageClassification", hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 6, 2]),
        _images(16, 96), "convnext.encoder.stages", 4,
    ),
    "resnet": BenchModel(
        _vision("ResNetForImageClassification", embedding_size=32, hidden_sizes=[64, 128, 256, 512],
                depths=[2, 2, 2, 2]),
        _images(16, 96), "resnet.encoder.stages", 4,
    ),
}  # fmt: skip


def training_step(compute: Callable[[], Result], parameters: Iterable[torch.nn.Parameter]) -> Callable[[], Result]:
    """Return a step that computes gradients, updates the parameters with AdamW and returns what `compute` returns."""
    optimizer = adamw(parameters)

    def step() -> Result:
        result = compute()
        optimizer.step()
        optimizer.zero_grad()
        return result

    return step


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of every benchmark."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)

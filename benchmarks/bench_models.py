"""Models small enough for two processes of one core each, and large enough that computation dominates."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers as hf

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
        hf.logging.set_verbosity_error()
        torch.manual_seed(0)
        return self.make().train()


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


def gpt2(vocab: int, hidden: int, layers: int) -> Callable[[], torch.nn.Module]:
    config = hf.GPT2Config(
        vocab_size=vocab, n_positions=128, n_embd=hidden, n_layer=layers, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return lambda: hf.GPT2LMHeadModel(config)


def _llama(vocab: int, hidden: int, layers: int) -> Callable[[], torch.nn.Module]:
    config = hf.LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    return lambda: hf.LlamaForCausalLM(config)


def _bert() -> torch.nn.Module:
    config = hf.BertConfig(
        vocab_size=8192, hidden_size=256, num_hidden_layers=8, num_attention_heads=4, intermediate_size=1024,
        max_position_embeddings=128, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return hf.BertForMaskedLM(config)


def _vit() -> torch.nn.Module:
    config = hf.ViTConfig(
        image_size=96, patch_size=8, num_labels=10, hidden_size=192, intermediate_size=768, num_hidden_layers=8,
        num_attention_heads=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return hf.ViTForImageClassification(config)


def _opt() -> torch.nn.Module:
    config = hf.OPTConfig(
        vocab_size=16384, hidden_size=256, ffn_dim=1024, num_hidden_layers=7, num_attention_heads=4, dropout=0.0,
        attention_dropout=0.0, max_position_embeddings=128, word_embed_proj_dim=256,
    )  # fmt: skip
    return hf.OPTForCausalLM(config)


def _convnext() -> torch.nn.Module:
    return hf.ConvNextForImageClassification(
        hf.ConvNextConfig(hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 6, 2], num_labels=10, drop_path_rate=0.0)
    )


MODELS: dict[str, BenchModel] = {
    "gpt2": BenchModel(gpt2(2048, 256, 8), tokens(2048, 16, 96), "transformer.h", 8),
    "gpt2, vocabulary 50257": BenchModel(gpt2(50257, 192, 8), tokens(50257, 16, 48), "transformer.h", 8),
    "llama, vocabulary 32000": BenchModel(_llama(32000, 256, 6), tokens(32000, 16, 48), "model.layers", 6),
    "llama": BenchModel(_llama(2048, 256, 9), tokens(2048, 16, 96), "model.layers", 9),
    "bert": BenchModel(_bert, tokens(8192, 16, 96), "bert.encoder.layer", 8),
    "opt": BenchModel(_opt, tokens(16384, 16, 64), "model.decoder.layers", 7),
    "vit": BenchModel(_vit, _images(16, 96), "vit.layers", 8),
    "convnext": BenchModel(_convnext, _images(16, 96), "convnext.encoder.stages", 4),
}


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

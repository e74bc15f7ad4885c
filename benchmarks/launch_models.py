"""Fourteen small models of different kinds for counting kernels: hidden size 64, two layers, 32 tokens, four rows."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers as hf
from torch import nn

Batch = dict[str, torch.Tensor]
ROWS, TOKENS, HIDDEN, LAYERS, HEADS, VOCAB, CLASSES, IMAGE = 4, 32, 64, 2, 4, 128, 8, 32
MASKS = ("none", "ones", "padding")
_DECODER: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "max_position_embeddings": 2 * TOKENS, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
_GROUPED = {**_DECODER, "num_key_value_heads": 2}
_TRANSLATION: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": HIDDEN, "decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class LaunchModel:
    """A model and its batch. make: builds it; image: whether it reads images; masked: whether it takes a mask."""

    make: Callable[[], nn.Module]
    image: bool = False
    masked: bool = True

    def model(self) -> nn.Module:
        """Return the model with the same weights every time, in training mode, without dropout."""
        hf.logging.set_verbosity_error()
        torch.manual_seed(0)
        return self.make().train()

    def batch(self, mask: str) -> Batch:
        """Return its batch with a mask of this kind. Rows have different numbers of tokens if it is "padding"."""
        source = torch.Generator().manual_seed(1)
        if self.image:
            labels = torch.randint(0, CLASSES, (ROWS,), generator=source)
            return {"pixel_values": torch.randn(ROWS, 3, IMAGE, IMAGE, generator=source), "labels": labels}
        ids = torch.randint(4, VOCAB, (ROWS, TOKENS), generator=source)
        if mask == "none":
            return {"input_ids": ids, "labels": ids}
        shown = torch.ones_like(ids)
        for row in range(ROWS if mask == "padding" else 0):
            shown[row, TOKENS - 5 * row :] = 0
        return {"input_ids": ids, "attention_mask": shown, "labels": ids.masked_fill(shown == 0, -100)}

    @property
    def masks(self) -> tuple[str, ...]:
        """The kinds of mask that it takes."""
        return MASKS if self.masked else MASKS[:1]


class AttentionModel(nn.Module):
    """A causal language model of nn.MultiheadAttention, normalised before each block."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(TOKENS, HIDDEN)
        self.attention = nn.ModuleList(nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2 * LAYERS))
        self.dense = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        length = input_ids.shape[1]
        x = self.tokens(input_ids) + self.places(torch.arange(length, device=input_ids.device))
        later = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).triu(1)
        hidden = None if attention_mask is None else attention_mask == 0
        for number, (attention, dense) in enumerate(zip(self.attention, self.dense, strict=True)):
            y = self.norms[2 * number](x)
            x = x + attention(y, y, y, attn_mask=later, key_padding_mask=hidden, need_weights=False)[0]
            x = x + dense(self.norms[2 * number + 1](x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class RecurrentModel(nn.Module):
    """A language model of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.layers = nn.LSTM(HIDDEN, HIDDEN, LAYERS, batch_first=True)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, _ = self.layers(self.tokens(input_ids))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def _gpt2() -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=VOCAB, n_positions=2 * TOKENS, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config)


def _bert() -> nn.Module:
    config = hf.BertConfig(**_DECODER, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return hf.BertForMaskedLM(config)


def _mixtral() -> nn.Module:
    config = hf.MixtralConfig(**_GROUPED, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    return hf.MixtralForCausalLM(config)


def _qwen3() -> nn.Module:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**_GROUPED, head_dim=HIDDEN // HEADS))


def _t5() -> nn.Module:
    config = hf.T5Config(
        **_TRANSLATION, d_kv=HIDDEN // HEADS, d_ff=2 * HIDDEN, num_layers=LAYERS, num_heads=HEADS, dropout_rate=0.0
    )
    return hf.T5ForConditionalGeneration(config)


def _bart() -> nn.Module:
    config = hf.BartConfig(
        **_TRANSLATION, max_position_embeddings=2 * TOKENS, encoder_layers=LAYERS, decoder_layers=LAYERS,
        encoder_ffn_dim=2 * HIDDEN, decoder_ffn_dim=2 * HIDDEN, encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
    )  # fmt: skip
    return hf.BartForConditionalGeneration(config)


def _vit() -> nn.Module:
    config = hf.ViTConfig(
        image_size=IMAGE, patch_size=8, num_labels=CLASSES, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return hf.ViTForImageClassification(config)


def _resnet() -> nn.Module:
    config = hf.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], num_labels=CLASSES)
    return hf.ResNetForImageClassification(config)


def _convnext() -> nn.Module:
    config = hf.ConvNextConfig(hidden_sizes=[32, HIDDEN], depths=[1, 1], num_stages=2, num_labels=CLASSES)
    return hf.ConvNextForImageClassification(config)


def _mamba() -> nn.Module:
    config = hf.MambaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, state_size=8, num_hidden_layers=LAYERS, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, use_cache=False,
    )  # fmt: skip
    return hf.MambaForCausalLM(config)


MODELS: dict[str, LaunchModel] = {
    "gpt2": LaunchModel(_gpt2),
    "llama": LaunchModel(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_GROUPED))),
    "mistral": LaunchModel(lambda: hf.MistralForCausalLM(hf.MistralConfig(**_GROUPED))),
    "mixtral": LaunchModel(_mixtral),
    "qwen3": LaunchModel(_qwen3),
    "bert": LaunchModel(_bert),
    "t5": LaunchModel(_t5),
    "bart": LaunchModel(_bart),
    "attention": LaunchModel(AttentionModel),
    "mamba": LaunchModel(_mamba),
    "vit": LaunchModel(_vit, image=True, masked=False),
    "resnet": LaunchModel(_resnet, image=True, masked=False),
    "convnext": LaunchModel(_convnext, image=True, masked=False),
    "lstm": LaunchModel(RecurrentModel, masked=False),
}

"""Fourteen small models of different kinds for counting kernels: hidden size 64, two layers, 32 tokens, four rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.shared.architectures import RecurrentModel, built, seeded, sizes

Batch = dict[str, torch.Tensor]
ROWS, TOKENS, HIDDEN, LAYERS, HEADS, VOCAB, CLASSES, IMAGE = 4, 32, 64, 2, 4, 128, 8, 32
MASKS = ("none", "ones", "padding")
_SIZES = {
    **sizes(hidden=HIDDEN, inside=2 * HIDDEN, layers=LAYERS, heads=HEADS, groups=2, head=HIDDEN // HEADS, experts=4),
    **sizes(chosen=2, tokens=2 * TOKENS, vocab=VOCAB, classes=CLASSES),
    **{"decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "sliding_window": None},
    **{"image_size": IMAGE, "patch_size": 8},
}


@dataclass(frozen=True)
class LaunchModel:
    """A model and its batch. make: builds it; image: whether it reads images; masked: whether it takes a mask."""

    make: Callable[[], nn.Module]
    image: bool = False
    masked: bool = True

    def model(self) -> nn.Module:
        """Return the model with the same weights every time, in training mode, without dropout."""
        return seeded(self.make, seed=0)

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


def _of(model: str, **own: Any) -> LaunchModel:
    return LaunchModel(lambda: built(model, _SIZES, own))


def _vision(model: str, **own: Any) -> LaunchModel:
    return LaunchModel(lambda: built(model, _SIZES, own), image=True, masked=False)


MODELS: dict[str, LaunchModel] = {
    "gpt2": _of("GPT2LMHeadModel", n_inner=None),
    "llama": _of("LlamaForCausalLM"),
    "mistral": _of("MistralForCausalLM", sliding_window=4096),
    "mixtral": _of("MixtralForCausalLM"),
    "qwen3": _of("Qwen3ForCausalLM"),
    "bert": _of("BertForMaskedLM"),
    "t5": _of("T5ForConditionalGeneration", decoder_start_token_id=1),
    "bart": _of("BartForConditionalGeneration"),
    "attention": LaunchModel(AttentionModel),
    "mamba": _of("MambaForCausalLM", state_size=8, use_cache=False),
    "vit": _vision("ViTForImageClassification"),
    "resnet": _vision("ResNetForImageClassification", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1]),
    "convnext": _vision(
        "ConvNextForImageClassification", hidden_sizes=[32, HIDDEN], depths=[1, 1], num_stages=2, patch_size=4
    ),
    "lstm": LaunchModel(lambda: RecurrentModel(VOCAB, HIDDEN, LAYERS), masked=False),
}

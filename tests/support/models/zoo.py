"""The model zoo: small random-weight models of real architectures, and a batch for each. Nothing is downloaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers as hf
from torch import nn

hf.logging.set_verbosity_error()

VOCAB, SEQ, HIDDEN = 96, 16, 32
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_KV = {**_TEXT, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Case:
    """One architecture.

    make: builds the model; batch: returns the arguments of forward() for a number of rows; coupled: batch statistics
    couple the rows, so the reference must run the same micro-batches; double: nothing is rounded to fp32 when weights
    are fp64 (causal language models of transformers compute their loss in fp32).
    """

    name: str
    make: Callable[..., nn.Module]
    batch: Callable[[int], dict[str, torch.Tensor]]
    coupled: bool = False
    double: bool = False

    def model(self, *, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Return the model with the same weights at every call, in training mode."""
        torch.manual_seed(7)
        model = self.make(dropout).to(dtype).train()
        return model

    def data(self, rows: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        """Return a batch with its floating tensors in dtype."""
        return {k: v.to(dtype) if v.is_floating_point() else v for k, v in self.batch(rows).items()}

    @property
    def loss_fn(self) -> None:
        """None, because the model returns its loss."""
        return None


def tokens(rows: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, SEQ), generator=torch.Generator().manual_seed(seed))


def language_batch(rows: int) -> dict[str, torch.Tensor]:
    """Return token ids with right padding in some rows and labels that ignore a different number of tokens per row."""
    ids, mask = tokens(rows), torch.ones(rows, SEQ, dtype=torch.long)
    labels = ids.clone()
    for row in range(rows):
        length = SEQ - (5 * row) % (SEQ // 2)
        mask[row, length:] = 0
        labels[row, length:] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def masked_batch(rows: int) -> dict[str, torch.Tensor]:
    """Return a batch as `language_batch` with labels only at every third token, as in masked language modelling."""
    batch = language_batch(rows)
    keep = (torch.arange(SEQ)[None, :] + torch.arange(rows)[:, None]) % 3 == 0
    batch["labels"] = batch["labels"].where(keep, -100)
    return batch


def image_batch(size: int) -> Callable[[int], dict[str, torch.Tensor]]:
    def make(rows: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        labels = torch.randint(0, 5, (rows,), generator=generator)
        return {"pixel_values": torch.randn(rows, 3, size, size, generator=generator), "labels": labels}

    return make


def _gpt2(p: float) -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=VOCAB, n_positions=64, n_embd=HIDDEN, n_layer=3, n_head=4, resid_pdrop=p, embd_pdrop=p,
        attn_pdrop=p, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config)


def _llama(p: float) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_KV, attention_dropout=p))


def _llama_tied(p: float) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_KV, attention_dropout=p, tie_word_embeddings=True))


def _mistral(p: float) -> nn.Module:
    return hf.MistralForCausalLM(hf.MistralConfig(**_KV, sliding_window=8, attention_dropout=p))


def _qwen3(p: float) -> nn.Module:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**_KV, head_dim=8, attention_dropout=p))


def _gemma2(p: float) -> nn.Module:
    config = hf.Gemma2Config(
        **_KV, head_dim=8, sliding_window=8, query_pre_attn_scalar=8, attention_dropout=p, attn_implementation="eager"
    )
    return hf.Gemma2ForCausalLM(config)


def _gpt_neox(p: float) -> nn.Module:
    return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**_TEXT, hidden_dropout=p, attention_dropout=p))


def _opt(p: float) -> nn.Module:
    config = hf.OPTConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, dropout=p,
        attention_dropout=p, max_position_embeddings=64, word_embed_proj_dim=HIDDEN, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return hf.OPTForCausalLM(config)


def _bert(p: float) -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**_TEXT, hidden_dropout_prob=p, attention_probs_dropout_prob=p))


def _roberta(p: float) -> nn.Module:
    return hf.RobertaForMaskedLM(hf.RobertaConfig(**_TEXT, hidden_dropout_prob=p, attention_probs_dropout_prob=p))


def _t5(p: float) -> nn.Module:
    config = hf.T5Config(
        vocab_size=VOCAB, d_model=HIDDEN, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=p,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def _vit(p: float) -> nn.Module:
    config = hf.ViTConfig(
        image_size=16, patch_size=4, num_labels=5, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, hidden_dropout_prob=p, attention_probs_dropout_prob=p,
    )  # fmt: skip
    return hf.ViTForImageClassification(config)


def _convnext(p: float) -> nn.Module:
    return hf.ConvNextForImageClassification(
        hf.ConvNextConfig(hidden_sizes=[8, 16, 16, 24], depths=[1, 1, 2, 1], num_labels=5, drop_path_rate=p)
    )


def _resnet(p: float) -> nn.Module:
    return hf.ResNetForImageClassification(
        hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 16], depths=[1, 2, 1], num_labels=5)
    )


def _mixtral(p: float) -> nn.Module:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**_KV, num_local_experts=4, attention_dropout=p))


def _phi3(p: float) -> nn.Module:
    return hf.Phi3ForCausalLM(hf.Phi3Config(**_KV, resid_pdrop=p, embd_pdrop=p, attention_dropout=p))


CASES = {
    case.name: case
    for case in (
        Case("gpt2", _gpt2, language_batch),
        Case("llama", _llama, language_batch),
        Case("llama_tied", _llama_tied, language_batch),
        Case("mistral", _mistral, language_batch),
        Case("qwen3", _qwen3, language_batch),
        Case("gemma2", _gemma2, language_batch),
        Case("gpt_neox", _gpt_neox, language_batch),
        Case("opt", _opt, language_batch),
        Case("bert", _bert, masked_batch, double=True),
        Case("roberta", _roberta, masked_batch, double=True),
        Case("t5", _t5, language_batch, double=True),
        Case("vit", _vit, image_batch(16), double=True),
        Case("convnext", _convnext, image_batch(32), double=True),
        Case("resnet", _resnet, image_batch(32), coupled=True, double=True),
        Case("mixtral", _mixtral, language_batch),
    )
}
PHI3 = Case("phi3", _phi3, language_batch)
"""Queries, keys and values are parts of unlike size of one product."""

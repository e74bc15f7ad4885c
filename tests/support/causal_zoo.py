"""More causal language models of transformers, small, with random weights: those that only slices of tokens ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as hf
from torch import nn

from support.zoo import HIDDEN, VOCAB, Case, language_batch

_ENDS: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_TEXT = {
    **_ENDS, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip


def _phi(p: float) -> nn.Module:
    return hf.PhiForCausalLM(hf.PhiConfig(**_TEXT, resid_pdrop=p, embd_pdrop=p, attention_dropout=p))


def _falcon(p: float) -> nn.Module:
    config = hf.FalconConfig(
        **_ENDS, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4, hidden_dropout=p, attention_dropout=p
    )
    return hf.FalconForCausalLM(config)


def _olmo2(p: float) -> nn.Module:
    return hf.Olmo2ForCausalLM(hf.Olmo2Config(**_TEXT, num_key_value_heads=2, attention_dropout=p))


def _bloom(p: float) -> nn.Module:
    config = hf.BloomConfig(
        **_ENDS, hidden_size=HIDDEN, n_layer=2, n_head=4, hidden_dropout=p, attention_dropout=p
    )  # fmt: skip
    return hf.BloomForCausalLM(config)


def _gptj(p: float) -> nn.Module:
    config = hf.GPTJConfig(
        **_ENDS, n_embd=HIDDEN, n_layer=2, n_head=4, rotary_dim=4, n_positions=64, resid_pdrop=p, embd_pdrop=p,
        attn_pdrop=p,
    )  # fmt: skip
    return hf.GPTJForCausalLM(config)


def _gpt_neo(p: float) -> nn.Module:
    """A layer that sees all tokens before, and one that sees 8."""
    config = hf.GPTNeoConfig(
        **_ENDS, hidden_size=HIDDEN, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
        window_size=8, max_position_embeddings=64, resid_dropout=p, embed_dropout=p, attention_dropout=p,
    )  # fmt: skip
    return hf.GPTNeoForCausalLM(config)


def _qwen3_moe(p: float) -> nn.Module:
    config = hf.Qwen3MoeConfig(
        **_TEXT, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        attention_dropout=p,
    )  # fmt: skip
    return hf.Qwen3MoeForCausalLM(config)


_MAKE: dict[str, Callable[[float], nn.Module]] = {
    "phi": _phi, "falcon": _falcon, "olmo2": _olmo2, "bloom": _bloom, "gptj": _gptj, "gpt_neo": _gpt_neo,
    "qwen3_moe": _qwen3_moe,
}  # fmt: skip
CAUSAL = {name: Case(name, make, language_batch) for name, make in _MAKE.items()}

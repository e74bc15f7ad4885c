"""Small random-weight causal language models for tests of token slices, and models that cannot be sliced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import nn

from support.models.tokens import token_models as small
from support.models.tokens.unusual_token_models import EXACT
from support.models.zoo import CASES, HIDDEN, SEQ, VOCAB, Case, language_batch
from support.models.zoo import tokens as random_tokens

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
    """Return a model of one layer with global attention and one with a window of 8 tokens."""
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


def packed_batch(rows: int) -> dict[str, torch.Tensor]:
    """Return a batch of packed documents, marked by positions that restart at zero."""
    ids = random_tokens(rows)
    lengths = [(5, 1, SEQ - 6), (9, SEQ - 9)]
    places = [torch.cat([torch.arange(n) for n in lengths[row % 2]]) for row in range(rows)]
    labels = ids.clone()
    labels[:, :3] = -100
    return {"input_ids": ids, "position_ids": torch.stack(places), "labels": labels}


def long_batch(rows: int) -> dict[str, torch.Tensor]:
    """Return a batch with 128 tokens in each row."""
    ids = torch.randint(3, VOCAB, (rows, 128), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


def _written_out(case: Case) -> Case:
    """Return the same model with attention written as matrix products."""

    def make(p: float) -> nn.Module:
        model: Any = case.make(p)
        model.set_attn_implementation("eager")
        return model

    return Case(f"{case.name}_eager", make, case.batch)


def _by_hand(name: str, mixer: small.Mixer, mask: str = "", *, coupled: bool = False) -> Case:
    """Return a case of a model of `token_models` with two layers."""
    return Case(name, lambda p: small.Model(mixer, 2), partial(small.token_batch, mask=mask), coupled, double=True)


def convolved_and_shifted(x: torch.Tensor, model: small.Model) -> torch.Tensor:
    return small.shift_by_padding(small.causal_convolution(x, model), model)


BY_HAND = {
    case.name: case
    for case in (
        _by_hand("tril_softmax", small.tril_softmax),
        _by_hand("is_causal", small.is_causal),
        _by_hand("exp_of_scores", small.exp_of_scores),
        _by_hand("convolved_and_shifted", convolved_and_shifted),
        _by_hand("with_padding", small.with_padding, "padding"),
        _by_hand("documents", small.packed, "documents"),
        _by_hand("outer_products", EXACT["outer_products"]),
        _by_hand("relative_bias", EXACT["relative_bias"]),
        _by_hand("complex_rotation", EXACT["complex_rotation"]),
        Case("mask_buffer", lambda p: small.MaskBuffer(small.SEQ, 2), small.token_batch, double=True),
    )
}
CAUSAL = {name: Case(name, make, language_batch) for name, make in _MAKE.items()} | {
    case.name: case
    for case in (
        *(_written_out(CASES[name]) for name in ("gpt2", "llama", "mistral")),
        *(replace(CASES[name], name=f"{name}_packed", batch=packed_batch) for name in ("llama", "mistral")),
        replace(CASES["llama"], name="llama_long", batch=long_batch),
        *BY_HAND.values(),
    )
}


def _with_router_loss(p: float) -> nn.Module:
    model = CASES["mixtral"].make(p)
    model.config.output_router_logits = True
    return model


REFUSED = {
    case.name: case
    for case in (
        *(CASES[name] for name in ("bert", "t5", "vit")),
        Case("router_loss", _with_router_loss, language_batch),
        _by_hand("pooled", small.pooled),
        _by_hand("norm_of_tokens", small.norm_of_tokens, coupled=True),
        _by_hand("flipped", small.flipped),
        _by_hand("one_cell", small.one_cell),
        _by_hand("prefix_mask", small.prefix_mask, "documents"),
    )
}
"""Requesting token slices for these is an error that names the reason; with token_slices="auto" they train on whole
sequences. `prefix_mask` attends to later tokens only for some inputs."""

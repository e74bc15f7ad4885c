"""Built-in models of the command line: small, with random weights, nothing downloaded.

Each function returns (model, batch) or (model, batch, loss_fn).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autopart.extras.shelf.library import transformers

VOCAB, ROWS, SEQ = 256, 16, 64
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": SEQ, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip


def gpt2(layers: int = 4, width: int = 128, seq: int = SEQ) -> nn.Module:
    """Make a GPT-2 over bytes without dropout, in training mode."""
    hf = transformers()
    config = hf.GPT2Config(
        vocab_size=VOCAB, n_positions=seq, n_embd=width, n_layer=layers, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model: nn.Module = hf.GPT2LMHeadModel(config)
    return model.train()


def _tokens(seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(seed))


def _language_batch() -> dict[str, torch.Tensor]:
    ids = _tokens()
    return {"input_ids": ids, "labels": ids.clone()}


def gpt2_tiny() -> tuple[nn.Module, Any]:
    """Make a GPT-2 with 4 layers and a tied head."""
    return gpt2(), _language_batch()


def llama_tiny() -> tuple[nn.Module, Any]:
    """Make a Llama with 4 layers and grouped-query attention."""
    hf = transformers()
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_TEXT, num_key_value_heads=2)).train(), _language_batch()


def bert_tiny() -> tuple[nn.Module, Any]:
    """Make a BERT with a masked-language head and dropout; labels at every third token."""
    hf = transformers()
    batch = _language_batch()
    keep = (torch.arange(SEQ)[None, :] + torch.arange(ROWS)[:, None]) % 3 == 0
    return hf.BertForMaskedLM(hf.BertConfig(**_TEXT)).train(), {**batch, "labels": batch["labels"].where(keep, -100)}


def t5_tiny() -> tuple[nn.Module, Any]:
    """Make a T5: encoder and decoder with one embedding."""
    hf = transformers()
    config = hf.T5Config(
        vocab_size=VOCAB, d_model=128, d_kv=32, d_ff=344, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config).train(), {"input_ids": _tokens(), "labels": _tokens(2)}


def resnet_tiny() -> tuple[nn.Module, Any]:
    """Make a ResNet with BatchNorm, whose statistics couple the rows of a micro-batch."""
    hf = transformers()
    config = hf.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 64], depths=[1, 2, 1], num_labels=10)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(ROWS, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (ROWS,), generator=generator)
    return hf.ResNetForImageClassification(config).train(), {"pixel_values": images, "labels": labels}


def mlp() -> tuple[nn.Module, Any, Callable[[Any, Any], torch.Tensor]]:
    """Make six linear layers with a loss function; needs only torch."""
    layers = [layer for _ in range(5) for layer in (nn.Linear(64, 64), nn.Tanh())]
    generator = torch.Generator().manual_seed(1)
    inputs, target = torch.randn(ROWS, 64, generator=generator), torch.randn(ROWS, 10, generator=generator)
    return nn.Sequential(*layers, nn.Linear(64, 10)), (inputs, target), nn.functional.mse_loss


BUILTIN: dict[str, Callable[[], tuple[Any, ...]]] = {
    "gpt2-tiny": gpt2_tiny,
    "llama-tiny": llama_tiny,
    "bert-tiny": bert_tiny,
    "t5-tiny": t5_tiny,
    "resnet-tiny": resnet_tiny,
    "mlp": mlp,
}

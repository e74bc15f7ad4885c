"""Models on the meta device that get their values in parts, compared with the same models built whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import autopart

IDS = torch.randint(64, (8, 6), generator=torch.Generator().manual_seed(0))


def llama() -> tuple[nn.Module, dict[str, Any]]:
    """Return a small Llama with tied embeddings, and a batch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config), {"input_ids": IDS, "labels": IDS, "use_cache": False}


def on_meta(build: Callable[[], tuple[nn.Module, dict[str, Any]]]) -> tuple[nn.Module, dict[str, Any]]:
    """Return what `build` returns, the model without values."""
    with torch.device("meta"):
        model = build()[0]
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return model, build()[1]


def stepped(build: Callable[[], Any], weights: str, options: Mapping[str, Any], world: int) -> dict[str, Any]:
    """Take a training step of a model from the meta device; returns the loss, the gradients, the state before and after
    a step of the optimizer, and this rank's buffers."""
    model, batch = on_meta(build)
    with autopart.compile(model, f"cpu:{world}", sample=batch, weights=weights, cache=False, **options) as pipe:
        state, buffers = pipe.state_dict(), {name: buffer.clone() for name, buffer in pipe.named_buffers()}
        loss, gradients = float(pipe.step(batch)), pipe.gradients()
        torch.optim.SGD(pipe.parameters(), lr=0.1).step()
        after = pipe.state_dict()
    assert all(tensor.is_meta for tensor in model.parameters() if id(tensor))
    return {"loss": loss, "gradients": gradients, "state": state, "buffers": buffers, "after": after}


def plain(build: Callable[[], Any], state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Take the same step of the whole model with the values of a state, in one process."""
    model, batch = build()
    model.load_state_dict(dict(state))
    loss = model(**batch).loss
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return {
        "loss": loss.item(), "gradients": gradients, "after": model.state_dict(), "buffers": dict(model.named_buffers())
    }  # fmt: skip

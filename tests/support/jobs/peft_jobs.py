"""Jobs that train peft's adapters over ranks, compared with one process."""

from __future__ import annotations

from typing import Any

import peft
import torch
import transformers

import autopart
from support.jobs.step_jobs import refusal_of

LAYERS = 2
TWO_STAGES: Any = {"cuts": ["base_model.model.model.layers.1"], "micro_batches": 2, "costs": "analytic"}


def base() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=LAYERS, num_attention_heads=2,
        use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


def lora(**options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)


def adapted(kind: str) -> Any:
    model = base()
    if kind == "checkpointed":
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    config = {
        "dora": lambda: lora(use_dora=True, init_lora_weights=False),
        "ia3": lambda: peft.IA3Config(
            target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
        ),
        "last layer": lambda: lora(layers_to_transform=[LAYERS - 1]),
    }.get(kind, lora)()
    return peft.get_peft_model(model, config).double().train()


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def verified(kinds: list[str]) -> dict[str, bool]:
    return {
        kind: autopart.verify(adapted(kind), "cpu:2", sample=batch(), **TWO_STAGES).ok
        and adapted(kind).get_nb_trainable_parameters()[0] > 0
        for kind in kinds
    }


def _optimizer(of: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in of.parameters() if p.requires_grad], lr=0.01)


def switched() -> tuple[Any, str, dict[str, float]]:
    """Train one adapter, then another one; return the refusal before the new plan, its reason, and how far each tensor
    is from plain training after `close`."""
    models = [adapted("lora"), adapted("lora")]
    for model in models:
        torch.manual_seed(1)
        model.add_adapter("other", lora(init_lora_weights=False))
        model.double()
    plain, piped = models
    pipe = autopart.compile(piped, "cpu:2", sample=batch(), **TWO_STAGES)
    own, theirs = _optimizer(pipe), _optimizer(plain)

    def train(step: int) -> None:
        pipe.step(batch(step))
        plain(**batch(step)).loss.backward()
        for optimizer in (own, theirs):
            optimizer.step()
            optimizer.zero_grad()

    with pipe:
        for step in range(2):
            train(step)
        for model in models:
            model.set_adapter("other")
        refused = refusal_of(lambda: pipe.step(batch(2)))
        reason = pipe.replan().reason
        own, theirs = _optimizer(pipe), _optimizer(plain)
        for step in range(2, 4):
            train(step)
        state = pipe.state_dict()
        expected = plain.state_dict()
        saved = {f"saved {name}": (value - expected[name]).abs().max().item() for name, value in state.items()}
    return (
        refused,
        reason,
        saved | {name: (value - expected[name]).abs().max().item() for name, value in piped.state_dict().items()},
    )

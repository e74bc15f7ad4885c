"""peft's adapters train over two ranks as in one process: kinds of adapters, another adapter, quantized bases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.jobs.step_jobs import refusal_of
from support.workers import Workers

import autopart
from autopart.ir.errors import RefusedError

peft = pytest.importorskip("peft")
LAYERS = 2
TWO_STAGES: Any = {"cuts": ["base_model.model.model.layers.1"], "micro_batches": 2, "costs": "analytic"}


def base() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=LAYERS, num_attention_heads=2,
        use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


def lora(**options: Any) -> Any:
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


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "kinds", [["last layer"], pytest.param(["lora", "checkpointed", "dora", "ia3"], marks=pytest.mark.slow)]
)
def test_kinds_of_adapters_train_exactly(pair: Workers, kinds: list[str]) -> None:
    """Some ranks train nothing where the last layer alone has an adapter; adapters that start at zero hide nothing."""
    for ok in pair.run(verified, kinds):
        assert ok == dict.fromkeys(kinds, True)


@pytest.mark.timeout(300)
def test_another_adapter_is_trained_after_a_replan_and_the_first_keeps_what_it_learned(pair: Workers) -> None:
    for refused, reason, differences in pair.run(switched):
        assert "lora_A.other.weight" in refused.what and "pipe.replan(optimizer)" in refused.fix
        assert "no place for what learns now" in reason
        assert differences and max(differences.values()) < 1e-9, differences


def by_a_trainer(kind: type, folder: str, **options: Any) -> list[float]:
    """Train adapters with gradient checkpointing and save them alone; return the losses."""
    data = [{name: value[0] for name, value in batch(seed).items()} for seed in range(24)]
    args = transformers.TrainingArguments(
        folder, per_device_train_batch_size=4, max_steps=4, save_steps=2, logging_steps=1, learning_rate=1e-2,
        use_cpu=True, report_to=[], disable_tqdm=True, gradient_checkpointing=True,
    )  # fmt: skip
    torch.manual_seed(1)
    trainer = kind(model=adapted("lora"), args=args, train_dataset=data, **options)
    trainer.train()
    trainer.save_model(f"{folder}/final")
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def merged(folder: Path) -> dict[str, torch.Tensor]:
    return dict(peft.PeftModel.from_pretrained(base(), folder / "final").merge_and_unload().state_dict())


def by_a_pipeline_trainer(folder: str) -> list[float]:
    from autopart.integrations.trainer import PipelineMixin

    class PipelineTrainer(PipelineMixin, transformers.Trainer): ...

    return by_a_trainer(PipelineTrainer, folder, pipeline=TWO_STAGES)


@pytest.mark.timeout(300)
def test_adapters_of_a_trainer_are_saved_alone_merged_and_reloaded(pair: Workers, tmp_path: Path) -> None:
    losses = by_a_trainer(transformers.Trainer, str(tmp_path / "plain"))
    for found in pair.run(by_a_pipeline_trainer, str(tmp_path / "piped")):
        assert found == pytest.approx(losses, rel=1e-6)
    start, plain = base().state_dict(), merged(tmp_path / "plain")
    assert any(not torch.equal(value, start[name]) for name, value in plain.items())
    torch.testing.assert_close(merged(tmp_path / "piped"), plain, rtol=1e-6, atol=1e-9)
    assert sorted(path.name for path in (tmp_path / "piped/final").glob("*.safetensors")) == [
        "adapter_model.safetensors"
    ]


def test_neftune_is_refused_by_name() -> None:
    from transformers.integrations.neftune import neftune_post_forward_hook

    model = adapted("lora")
    model.get_input_embeddings().register_forward_hook(neftune_post_forward_hook)
    with pytest.raises(RefusedError, match="neftune_post_forward_hook") as caught:
        autopart.plan(model, "cpu:2", sample=batch(), costs="analytic")
    assert "in forward()" in caught.value.fix


class Params4bit(torch.nn.Parameter):
    """Stands for the class of bitsandbytes: codes, with what they mean attached."""

    quant_state: Any

    def __new__(cls, data: torch.Tensor) -> Params4bit:
        made = torch.Tensor._make_subclass(cls, data, False)
        made.quant_state = torch.ones(1)
        return made


class Quantized(torch.nn.Module):
    """A linear layer on a frozen quantized weight."""

    def __init__(self, codes: torch.Tensor, kind: type = Params4bit) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
        self.inner.weight = kind(codes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.inner.weight.float(), self.inner.bias).square().mean()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bfloat16])
def test_a_quantized_weight_is_refused_by_name(dtype: torch.dtype) -> None:
    codes = torch.ones(8, 8).to(dtype)
    with pytest.raises(RefusedError, match=r"inner\.weight is quantized: a .*\.Params4bit") as caught:
        autopart.plan(Quantized(codes), "cpu:2", sample=torch.randn(4, 8), costs="analytic")
    assert "torch.bfloat16" in caught.value.fix
    followed = Quantized(codes, lambda data: torch.nn.Parameter(data.bfloat16(), False))  # type: ignore[arg-type]
    assert autopart.plan(followed, "cpu:1", sample=torch.randn(4, 8), costs="analytic").stages

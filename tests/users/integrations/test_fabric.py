"""A script of Lightning Fabric on a pipeline trains, clips, accumulates, saves and loads as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.jobs.step_jobs import refusal_of
from support.workers import Workers
from torch import nn

import autopart

pytest.importorskip("lightning_fabric", reason="lightning-fabric is not installed")

CONFIG = transformers.GPT2Config(
    n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=8, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
)


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": ids, "labels": ids} for ids in torch.randint(32, (6, 4, 8), generator=generator)]


def script(strategy: Any, folder: str, resume: bool) -> dict[str, Any]:
    """Run the loop that docs/lightning.md shows, with accumulation; returns losses, norms and weights."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    torch.manual_seed(2 if resume else 1)
    model = net = transformers.GPT2LMHeadModel(CONFIG).double()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.SGD([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "at": 0}
    if resume:
        assert fabric.load(folder, state) == {} and state["at"] == 4
    losses, norms = [], []
    data = fabric.setup_dataloaders(torch.utils.data.DataLoader(batches(), batch_size=None))
    for number, batch in enumerate(data):
        if number < state["at"]:
            continue
        loss = model(**batch).loss
        if number % 2 == 0:
            optimizer.zero_grad()  # between the forward and the backward, as is allowed
        fabric.backward(loss / 2)
        losses.append(loss.item())
        if number % 2:
            norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.5)))
            optimizer.step()
            scheduler.step()
        if number == 3 and folder and not resume:
            fabric.save(folder, {**state, "at": 4})
    model.eval()
    with torch.no_grad():
        losses.append(float(model(**batches()[0]).loss))
        shape = tuple(model(input_ids=batches()[0]["input_ids"]).logits.shape)
    total = fabric.all_reduce(torch.tensor(float(fabric.global_rank)), reduce_op="sum")
    said = fabric.broadcast(fabric.global_rank, src=fabric.world_size - 1)
    fabric.strategy.teardown()
    weights = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    return {"losses": losses, "norms": norms, "weights": weights, "shape": shape, "ranks": (float(total), said)}


def piped(folder: str, resume: bool, options: dict[str, Any]) -> dict[str, Any]:
    from autopart.integrations.fabric import PipelineStrategy

    return script(PipelineStrategy(sample=batches()[0], costs="analytic", **options), folder, resume)


def refusals() -> list[str]:
    """Return what is refused, by name."""
    from lightning_fabric import Fabric

    from autopart.integrations.fabric import PipelineStrategy

    def run(precision: Any = "32-true", steps: int = 0, twice: bool = False, early: bool = False) -> None:
        fabric = Fabric(
            accelerator="cpu",
            precision=precision,
            strategy=PipelineStrategy((torch.ones(4, 2),) * 2, loss_fn=nn.MSELoss()),
        )
        fabric.launch()
        if early:
            fabric.strategy.clip_gradients_norm(None, None, 1.0)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
        try:
            model, optimizer = fabric.setup(model, optimizer)
            loss = model(torch.ones(4, 2), torch.ones(4, 2))
            fabric.backward(loss, retain_graph=True)
            if twice:
                fabric.backward(loss)
        finally:
            fabric.strategy.teardown()

    asked: list[dict[str, Any]] = [{"precision": "bf16-mixed"}, {"steps": 1}, {"twice": True}, {"early": True}]
    return [refusal_of(lambda options=options: run(**options)).what for options in asked]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "options",
    [{"stages": 2, "micro_batches": 2}, pytest.param({"stages": 1, "replicas": 2}, marks=pytest.mark.slow)],
    ids=["stages", "replicas"],
)
def test_a_script_of_fabric_is_exact_on_a_pipeline(pair: Workers, tmp_path: Path, options: dict[str, Any]) -> None:
    expected = script("auto", "", False)
    for found in pair.run(piped, str(tmp_path), False, options):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-6)
        assert found["shape"] == expected["shape"] and found["ranks"] == (1.0, 1)
        torch.testing.assert_close(found["weights"], expected["weights"], rtol=1e-6, atol=1e-7)
    for again in pair.run(piped, str(tmp_path), True, options):
        assert again["losses"] == found["losses"][4:] and again["norms"] == found["norms"][2:]
    loaded = transformers.GPT2LMHeadModel(CONFIG)
    autopart.load_into(loaded, tmp_path)


def test_what_fabric_cannot_do_on_a_pipeline_is_named() -> None:
    precision, steps, twice, early = refusals()
    assert "precision is MixedPrecision" in precision and "has made steps" in steps
    assert "goes backward twice" in twice and "no model is set up" in early

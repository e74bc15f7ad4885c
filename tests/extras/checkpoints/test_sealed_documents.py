"""A checkpoint.json with any values, sealed with a hash that fits: refused before anything changes, or of use."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopart
from autopart.files.checkpoints.document import hash_of

ODD = (None, True, -1, 7.5, "x", [], [1, "a"], {}, {"$tuple": [1]}, {"$tensor": ["float32", [1, 2]]}, {"$odd": 1})
NUMBERS = (0.25, 3, {"$tensor": ["float32", 0.5]})


def trained(kind: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Return a model, its optimizer and scheduler after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters()}]
    optimizer = torch.optim.AdamW(groups) if kind == "adamw" else torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return model, optimizer, scheduler


def all_of(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> str:
    """Return all state as text, to the bit."""
    groups = [[(key, value) for key, value in group.items() if key != "params"] for group in optimizer.param_groups]
    held = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    state = {name: optimizer.state.get(parameter) for name, parameter in model.named_parameters()}
    return repr((model.state_dict(), groups, held, state, scheduler.state_dict()))


def spoil(document: dict[str, Any], draw: random.Random) -> str:
    """Change one value around the optimizer of a document; returns what was done."""
    optimizer, value = document["optimizer"], draw.choice((*ODD, *NUMBERS))
    group, what = draw.choice(optimizer["groups"]), draw.choice(("option", "foreign", "state", "key", "scheduler"))
    name = draw.choice(group["names"])
    if what == "option":
        group["options"][key := draw.choice(sorted(group["options"]))] = value
    elif what == "foreign":
        group["options"][key := draw.choice(("params", "param_names", "foreach", "name"))] = value
    elif what == "state":
        optimizer["values"].setdefault(name, {})[key := draw.choice(("step", "exp_avg", "more"))] = value
    elif what == "key":
        optimizer["tensors"][name] = [*optimizer["tensors"][name], key := draw.choice(("a/b", "none", "", "../step"))]
    else:
        document["scheduler"], key = value, "scheduler"
    return f"{what} {key} of {name}: {value!r}"


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_sealed_document_with_odd_values_is_loaded_whole_or_changes_nothing(tmp_path: Path, count: int) -> None:
    refused = 0
    for seed in range(count):
        draw = random.Random(seed)
        kind = draw.choice(("adamw", "sgd"))
        model, optimizer, scheduler = trained(kind)
        page = autopart.save_from(model, tmp_path / str(seed), optimizer, scheduler) / "checkpoint.json"
        found = json.loads(page.read_text())
        del found["sha256"]
        what = spoil(found, draw)
        page.write_text(json.dumps(found | {"sha256": hash_of(found)}))
        model, optimizer, scheduler = trained(kind)
        for parameter in model.parameters():
            parameter.data.add_(1.0)
        before = all_of(model, optimizer, scheduler)
        try:
            autopart.load_into(model, page.parent, optimizer, scheduler)
        except autopart.CheckpointError:
            refused += 1
            assert all_of(model, optimizer, scheduler) == before, what
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        assert held == set(map(id, model.parameters())), what
    assert refused > 0.4 * count

"""What the pages on training and the page of `Pipe` say: every snippet runs, and the table lists what the class has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopart
from autopart.session.ranks.call_sync import NAMES

DOCS = Path(__file__).parents[2] / "docs"
SECTIONS = {
    "Saving and resuming": "state.md",
    "Accumulating gradients": "training_loop.md",
    "Parameter groups": "training_loop.md",
    "Averages of the weights (EMA)": "evaluation.md",
}


def rows() -> list[tuple[set[str], bool]]:
    """(names, whether they are collective) of each row of the table of methods."""
    found = re.findall(r"^\| (`[^|]*`) \| (yes|no) \|", (DOCS / "pipe.md").read_text(), re.MULTILINE)
    return [(set(re.findall(r"`(\w+)", names)), answer == "yes") for names, answer in found]


def test_the_page_of_the_pipe_lists_every_public_name_and_no_other() -> None:
    public = {name for name in dir(autopart.Pipe) if not name.startswith("_")}
    listed = [name for names, _ in rows() for name in names]
    assert sorted(listed) == sorted(public)


def test_the_page_of_the_pipe_calls_collective_what_the_ranks_agree_on() -> None:
    collective = {name for names, answer in rows() if answer for name in names}
    assert collective == {name for name in NAMES if hasattr(autopart.Pipe, name)}


def snippets(title: str) -> list[str]:
    text = (DOCS / SECTIONS[title]).read_text()
    section = re.split(r"^##", text.split(f"## {title}\n")[1], flags=re.MULTILINE)[0]
    return re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def test_the_snippets_of_the_pages_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, loss_fn = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), nn.functional.cross_entropy
    data = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(4)]
    pipe = autopart.compile(model, "cpu:1", sample=data[0], loss_fn=loss_fn, costs="analytic")
    names: dict[str, Any] = {
        "autopart": autopart, "torch": torch, "model": model, "loss_fn": loss_fn, "data": data, "batch": data[0],
        "pipe": pipe, "optimizer": torch.optim.AdamW(pipe.parameters()),
    }  # fmt: skip
    pipe.step(data[0])
    names["optimizer"].step()
    for title in SECTIONS:
        found = snippets(title)
        assert found, title
        for code in found:
            exec(code, names)
    again = names["pipe"]
    assert again is not pipe and again.steps == 1 + 4 + 4
    assert names["optimizer"].state_dict()["state"]
    with torch.no_grad():
        assert not any(torch.equal(names["averaged_state"][name], p) for name, p in again.named_parameters())
    again.close()

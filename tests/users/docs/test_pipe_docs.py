"""The pages on training and on `Pipe`: every snippet runs, and the page of `Pipe` is up to date."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.documents.pipe_page import PAGE, page
from torch import nn

import autopart

DOCS = Path(__file__).parents[3] / "docs"
SECTIONS = {
    "Saving and resuming": "state.md",
    "Accumulating gradients": "training_loop.md",
    "Parameter groups": "training_loop.md",
    "Averages of the weights (EMA)": "evaluation.md",
}


def test_the_page_of_the_pipe_is_made_from_the_docstrings() -> None:
    assert PAGE.read_text() == page(), "run `python tests/support/documents/pipe_page.py`"
    assert all(f"| `{name}" in page() for name in dir(autopart.Pipe) if not name.startswith("_"))


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

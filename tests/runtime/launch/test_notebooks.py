"""`autopart.launch` of functions that a notebook or a prompt defines: sent by value, or refused with a way out."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest

from autopart.ir.errors import UsageError
from autopart.runtime.launch.supervise import is_interactive, pickle_call

ROOT = Path(__file__).parents[3]
CELLS = (
    "import autopart, torch\nfrom torch import nn\nFACTOR = 2.0",
    "def scaled(x):\n    return x * FACTOR\n"
    "class Net(nn.Linear):\n    pass\n"
    "def train(rows):\n"
    "    torch.manual_seed(0)\n"
    "    model = nn.Sequential(Net(4, 4), nn.ReLU(), nn.Linear(4, 2))\n"
    "    batch = torch.randn(rows, 4), torch.randn(rows, 2)\n"
    "    plain = float(nn.functional.mse_loss(model(batch[0]), batch[1]))\n"
    "    with autopart.compile(model, 'cpu:2', sample=batch, loss_fn=nn.MSELoss(), stages=2) as pipe:\n"
    "        return scaled(float(pipe.step(batch))), scaled(plain)",
    "for mine, plain in autopart.launch(train, 'cpu:2', 8, timeout=60):\n    print(abs(mine - plain) < 1e-6)",
)


@pytest.fixture
def typed(monkeypatch):
    """A function as a cell defines it: its module is a __main__ without a file."""
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    home = sys.modules["__main__"].__dict__
    exec("def train():\n    return 1", home)
    return home["train"]


def test_what_has_no_file_is_refused_with_a_way_out_where_it_cannot_be_sent(typed, monkeypatch):
    assert is_interactive(typed) and not is_interactive(pickle_call)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(UsageError) as error:
        pickle_call(typed, ())
    assert "train is defined in a notebook" in str(error.value)
    assert "autopart[notebook]" in error.value.fix and "%%writefile train.py" in error.value.fix


@pytest.mark.slow
def test_a_notebook_trains_over_two_processes(monkeypatch):
    pytest.importorskip("cloudpickle")
    pytest.importorskip("ipykernel")
    client = pytest.importorskip("nbclient")
    import nbformat

    monkeypatch.setitem(os.environ, "PYTHONPATH", str(ROOT))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    client.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    assert [output.text for output in notebook.cells[-1].outputs if output.name == "stdout"] == ["True\nTrue\n"]

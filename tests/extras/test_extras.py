"""Each extra is deleted alone, its folder and its lines in `autopart/pipe/rows.py`: what is left compiles, plans and
trains, and the core's tests pass."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXTRAS = sorted(path.name for path in (ROOT / "autopart/extras").iterdir() if (path / "__init__.py").is_file())
CORE_TESTS = ("tests/session/test_road.py", "tests/passes/test_pipeline.py")
TRAINED = """
import torch
from torch import nn
import autopart

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
batch = torch.randn(8, 6), torch.randint(3, (8,))
options = dict(loss_fn=nn.functional.cross_entropy, costs="analytic", micro_batches=4)
loss = options["loss_fn"](model(batch[0]), batch[1])
loss.backward()
expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
model.zero_grad()
assert len(autopart.plan(model, "cpu:2", sample=batch, stages=2, **options).stages) == 2
with autopart.compile(model, "cpu:1", sample=batch, **options) as pipe:
    torch.testing.assert_close(pipe.step(batch).as_subclass(torch.Tensor), loss.detach())
    for name, gradient in pipe.gradients().items():
        torch.testing.assert_close(gradient, expected[name])
    torch.optim.SGD(pipe.parameters(), lr=0.1).step()
    assert pipe.eval_loss(batch) < loss and pipe.predict(batch[0]).shape == (8, 3)
    assert pipe.train().training and not pipe.eval().training
    assert pipe.state_dict().keys() == model.state_dict().keys() and "stage" in pipe.explain()
    gone = [name for name in VERBS if hasattr(type(pipe), name)]
    assert gone in ([], ["train"]), gone  # a module has train too
print(autopart.__file__)
"""


def without(extra: str, rows: str) -> tuple[str, set[str]]:
    """Return the rows without the lines that name something of an extra, and the verbs that a pipe had from it."""
    names = {
        alias.name
        for node in ast.parse(rows).body
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"autopart.extras.{extra}.")
        for alias in node.names
    }
    lines = {line: bool(names.intersection(re.findall(r"\w+", line))) for line in rows.splitlines()}
    verbs = [re.match(r"    (\w+) = ", line) for line, gone in lines.items() if gone]
    kept = [line for line in rows.splitlines() if not lines[line]]
    return "\n".join(kept) + "\n", {verb[1] for verb in verbs if verb}


def run(copy: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=copy, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("autopart", "tests"):  # links become folders
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("extra", EXTRAS)
def test_the_core_works_without(extra: str, copy: Path) -> None:
    rows = copy / "autopart/pipe/rows.py"
    text, verbs = without(extra, rows.read_text())
    rows.write_text(text)
    shutil.rmtree(copy / "autopart/extras" / extra)
    found = run(copy, "-c", TRAINED.replace("VERBS", repr(sorted(verbs))))
    assert Path(found.strip()).is_relative_to(copy)
    run(copy, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", *CORE_TESTS)


def test_only_rows_of_the_pipe_name_an_extra() -> None:
    for path in (ROOT / "autopart/pipe").glob("*.py"):
        assert path.name == "rows.py" or "autopart.extras" not in path.read_text(), path.name


def test_every_verb_of_an_extra_goes_with_it() -> None:
    rows = (ROOT / "autopart/pipe/rows.py").read_text()
    assert without("checkpoints", rows)[1] == {"save", "load"}
    assert without("shelf", rows) == (rows, set())
    for extra in EXTRAS:
        ast.parse(without(extra, rows)[0])

"""The README's example and commands do what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from support.zoo import CASES

from autopart.cli.main import app
from autopart.ir import errors

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_example_runs_and_prints_a_plan_and_a_loss(tmp_path):
    example = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert example
    script = tmp_path / "train.py"
    script.write_text(example[1])
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"HF_HUB_OFFLINE": "1"}
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env, timeout=240)
    assert result.returncode == 0, result.stderr
    assert "schedule 1f1b" in result.stdout or "schedule gpipe" in result.stdout
    shown = re.search(r"loss (\d\.\d+)\n```", README)
    loss = re.search(r"loss (\d\.\d+)", result.stdout)
    assert shown and loss and abs(float(shown[1]) - float(loss[1])) < 0.01


def test_the_commands_listed_are_the_commands_there_are():
    listed = set(re.findall(r"^autopart (\w+) ", README, re.MULTILINE)) | {"version"}
    names = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert listed == names | {group.typer_instance.info.name for group in app.registered_groups if group.typer_instance}


def test_every_architecture_of_the_grid_is_in_the_table():
    table = README[README.index("| model (transformers 5)") :].split("\n\n")[0].lower()
    for name in CASES:
        assert name.replace("_tied", " with tied head").replace("_", "-").replace("gpt2", "gpt-2") in table, name


def test_every_error_type_is_documented():
    page = (ROOT / "docs/errors.md").read_text()
    types = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, errors.AutopartError)]
    for kind in types:
        assert f"`{kind.__name__}`" in page or f"autopart.{kind.__name__}`" in page, kind.__name__

"""The README's example works, and the tables of the documents are complete."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from support.documents.docs import headings, shape
from support.models.zoo import CASES
from support.workers import Workers

from autopart.cli.flags import flag_of
from autopart.cli.main import app
from autopart.ir import errors
from autopart.options import OPTIONS

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()


EXAMPLE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
SHOWN = re.findall(r"It prints the plan and the loss:\n\n```text\n(.*?)```", README, re.DOTALL)[0].splitlines()


def trained(source: str) -> str:
    """Call `train` of the example on this rank; return what it printed."""
    out = io.StringIO()
    names: dict[str, Any] = {"__name__": "example"}
    exec(source, names)
    with redirect_stdout(out), torch.random.fork_rng():
        names["train"]()
    return out.getvalue()


def test_the_example_trains_a_smaller_model_and_prints_a_plan_and_a_loss(pair: Workers):
    source = EXAMPLE
    for text, smaller in (('hidden_size": 768', 'hidden_size": 48'), ("2048", "64"), ('layers": 6', 'layers": 2')):
        assert text in source
        source = source.replace(text, smaller)
    found, other = (text.splitlines() for text in pair.run(trained, source))
    assert other == [] and found[0].split() == SHOWN[0].split()
    assert kinds(found) >= kinds(SHOWN)


@pytest.mark.slow
def test_the_example_runs_as_a_script_and_prints_a_plan_and_a_loss(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(EXAMPLE)
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"HF_HUB_OFFLINE": "1"}
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env, timeout=240)
    assert result.returncode == 0, result.stderr
    found = result.stdout.splitlines()
    assert found[0].split() == SHOWN[0].split()
    assert kinds(found) >= kinds(SHOWN)
    losses = [re.search(r"loss (\d\.\d+)$", text) for text in (SHOWN[-1], found[-1])]
    assert losses[0] and losses[1] and abs(float(losses[0][1]) - float(losses[1][1])) < 0.01


def kinds(lines: list[str]) -> set[str]:
    """Return the lines below the table without numbers and without the planner's choices, which depend on the
    machine.
    """
    below = [line for line in lines if re.match(r"(schedule|simulated|at most|memory|op costs|note|loss)", line)]
    below = [shape(re.sub(r"schedule [\w-]+, .* rows?,", "schedule,", line)) for line in below]
    return {re.sub(r"\b(micro-batch|row|stage|rank)(es|s)?\b", r"\1", line).replace(" idle", "") for line in below}


def test_the_page_of_the_command_line_lists_every_command():
    page = (ROOT / "docs/command_line.md").read_text()
    listed = set(re.findall(r"^autopart (\w+) ", page, re.MULTILINE)) | {"version"}
    names = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert listed == names | {group.typer_instance.info.name for group in app.registered_groups if group.typer_instance}


def test_every_architecture_of_the_grid_is_in_the_table():
    page = (ROOT / "docs/models.md").read_text()
    table = page[page.index("| model (transformers 5)") :].split("\n\n")[0].lower()
    for name in CASES:
        assert name.replace("_tied", " with tied head").replace("_", "-").replace("gpt2", "gpt-2") in table, name


def test_the_message_of_every_error_ends_with_a_heading_that_exists():
    kinds: list[type[errors.AutopartError]] = [errors.AutopartError]
    for kind in kinds:  # it grows; types of other rooms have the heading of their base
        kinds += kind.__subclasses__()
    assert len(kinds) >= 17
    for kind in kinds:
        page, place = errors.page_of(kind).split("#")
        assert place in headings(ROOT / page), kind
        assert kind.__module__ != errors.__name__ or place == kind.__name__.lower()
    assert str(errors.PlanFileError("x", fix="y")) == "x\n  fix: y\n  see: docs/errors.md#planfileerror"


def test_every_option_is_in_its_group_of_the_page_with_its_flag():
    page = (ROOT / "docs/planning.md").read_text().split("\n## Options\n")[1]
    found = {}
    for group, rows in re.findall(r"^### ([^\n]*)\n(.*?)(?=^### |\Z)", page, re.MULTILINE | re.DOTALL):
        for name, flag in re.findall(r"^\| `(\w+)=[^|]*\| (?:`(--[\w-]+)[^|]*)?\|", rows, re.MULTILINE):
            found[name] = (group, flag)
    taken = {"plan": "--plan", "transport": "--transport"}  # only `verify` has these
    groups = accumulate((row.group for row in OPTIONS.values()), lambda before, own: own or before)
    wanted = {name: (group, flag_of(name) or taken.get(name, "")) for name, group in zip(OPTIONS, groups, strict=True)}
    assert {name: found[name] for name in found if name not in ("cluster", "sample")} == wanted
    assert [name for name in found if name in wanted] == list(OPTIONS)

"""The list of habits is complete, each entry names a test that exists, and every patch has a target in this torch."""

from __future__ import annotations

import ast
import builtins
import pkgutil
from pathlib import Path

import pytest

from autopart.capture.python.habits import habits
from autopart.capture.python.habits.habits import HABITS, PATCHES, Habit, patched

ROOT = Path(__file__).parents[3]


def test_every_file_has_an_entry() -> None:
    files = {path.stem for path in Path(habits.__file__).parent.glob("*.py")} - {"__init__", "habits"}
    acts = [act for habit in HABITS for act in (habit.around, *habit.patches.values()) if act]
    assert files <= {act.__module__.rpartition(".")[2] for act in acts}


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.sees)
def test_an_entry_says_what_it_is_for_and_names_a_test(habit: Habit) -> None:
    assert habit.sees and (habit.patches or habit.around)
    path, _, name = habit.test.partition("::")
    tree = ast.parse((ROOT / "tests" / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def _targets() -> list[tuple[object, str]]:
    known = [target.rpartition(".") for target, _ in PATCHES]
    return [(pkgutil.resolve_name(home), name) for home, _, name in known]


def test_every_patch_has_a_target_and_stands_in_the_list_once() -> None:
    assert all(hasattr(home, name) or hasattr(builtins, name) for home, name in _targets())
    assert len({target for target, _ in PATCHES}) == len(PATCHES)


def test_all_patches_are_taken_back() -> None:
    before = [vars(home).get(name) for home, name in _targets()]
    with patched():
        inside = [vars(home).get(name) for home, name in _targets()]
    for (target, here), one, other in zip(PATCHES, before, inside, strict=True):
        # torch.compile sets checks of distributions to the value that they have here
        assert one is not other if callable(here) else other is here, target
    assert [vars(home).get(name) for home, name in _targets()] == before

"""Rules of the code base: imports, lengths, documentation, and file names in documents."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support import slow

import autopart

ROOT = Path(__file__).parents[1]
SOURCES = sorted(p for room in ("autopart", "passes", "runtime") for p in (ROOT / room).glob("**/*.py"))
CODE = [p for p in SOURCES if not p.is_relative_to(ROOT / "autopart/passes")]
CODE = [p for p in CODE if not p.is_relative_to(ROOT / "autopart/runtime")]
EVERYTHING = [*CODE, *sorted((ROOT / "tests").glob("**/*.py")), *sorted((ROOT / "benchmarks").glob("**/*.py"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FILE_LINES, FUNCTION_LINES, EXPORTS = 400, 60, 35


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


ENTRIES = 14
AT_THE_TOP = 8
"""More entries of `autopart/`: two links, and the files and names that users import from."""


def test_a_folder_has_few_entries_and_a_docstring():
    hidden = {"__pycache__", "__init__.py", "py.typed", "conftest.py"}
    folders = {*(ROOT / "tests").glob("**/"), *(ROOT / "benchmarks").glob("**/")}
    folders.remove(ROOT / "benchmarks/results")  # a file for each benchmark
    for folder in (path for path in folders if path.name not in hidden):
        shown = [entry.name for entry in folder.iterdir() if entry.name not in hidden]
        assert len(shown) <= ENTRIES, f"{folder}: {sorted(shown)}"
    for folder in {path.parent for path in CODE}:
        shown = [entry.name for entry in folder.iterdir() if entry.name not in hidden]
        assert len(shown) <= ENTRIES + AT_THE_TOP * (folder == ROOT / "autopart"), f"{folder}: {sorted(shown)}"
        assert ast.get_docstring(_parsed(folder / "__init__.py")), folder


def test_the_import_contracts_are_kept():
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:]


@pytest.mark.parametrize("package", ["autopart", "autopart.capture", "autopart.passes"])
def test_every_module_is_in_the_layers_contract(package):
    contracts = PROJECT["tool"]["importlinter"]["contracts"]
    placed = {
        ".".join(name.strip().split(".")[: package.count(".") + 2])
        for contract in contracts
        if contract["type"] == "layers"
        for layer in contract["layers"]
        for name in re.split("[|:]", layer)
        if name.strip().startswith(f"{package}.")
    }
    folder = ROOT / package.replace(".", "/")
    rooms = {p.stem if p.suffix else p.name for p in folder.iterdir() if p.suffix == ".py" or p.is_dir()}
    assert placed == {f"{package}.{room}" for room in rooms - {"__init__", "__pycache__"}}


def test_internal_code_does_not_import_from_the_public_package():
    for path in CODE:
        for node in ast.walk(_parsed(path)):
            if isinstance(node, ast.Import):
                assert "autopart" not in [alias.name for alias in node.names], path
            if isinstance(node, ast.ImportFrom) and node.module == "autopart":
                rooms = [ROOT / "autopart" / alias.name for alias in node.names]
                assert all(room.is_dir() or room.with_suffix(".py").is_file() for room in rooms), path


def test_files_and_functions_are_short():
    for path in EVERYTHING:
        assert len(path.read_text().splitlines()) <= FILE_LINES, path
        for node in ast.walk(_parsed(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= FUNCTION_LINES, f"{path}: {node.name} has {length} lines"


ADAPTERS = (
    "integrations/fabric*.py", "extras/export/*.py", "extras/metrics/sinks/*.py", "extras/checkpoints/convert.py",
    "extras/checkpoints/*_dcp.py",
)  # fmt: skip
"""What speaks to one other library or format."""


def test_an_adapter_has_a_file_of_its_own_that_is_read_at_once():
    for pattern in ADAPTERS:
        found = [*(ROOT / "autopart").glob(pattern)]
        assert found, pattern
        for path in found:
            assert len(path.read_text().splitlines()) <= 150, path


METHODS, DEPTH = 20, 2
LARGE = {
    "PipelineMixin", "_Writer",
}  # fmt: skip
"""Classes with more methods than a class should have.  A name may leave this list, and none may enter."""
DEEP: set[str] = set()
"""Classes below others that lie below others, apart from errors.  None may enter."""


def test_classes_are_small_and_not_made_of_layers():
    classes = [n for path in SOURCES for n in ast.walk(_parsed(path)) if isinstance(n, ast.ClassDef)]
    bases: dict[str, set[str]] = {}
    for each in classes:
        bases.setdefault(each.name, set()).update(ast.unparse(base).split("[")[0] for base in each.bases)

    def chain(name: str) -> int:
        """Return how many of our classes lie above each other, 0 for an error."""
        if name.endswith(("Error", "Warning", "Exception")):
            return 0
        above = [chain(base) for base in bases[name] if base in bases or base.endswith("Error")]
        return 0 if 0 in above else 1 + max(above, default=0)

    large = {each.name for each in classes if sum(isinstance(m, ast.FunctionDef) for m in each.body) > METHODS}
    assert large == LARGE
    assert {name for name in bases if chain(name) > DEPTH} == DEEP


def test_every_file_has_a_docstring():
    assert [_name(path) for path in CODE if not ast.get_docstring(_parsed(path))] == []


def test_tests_of_passes_start_no_process():
    starters = {"subprocess", "multiprocessing", "autopart.runtime.launch.local", "torch.distributed"}
    for path in (ROOT / "tests/passes").glob("**/*.py"):
        imported = re.findall(r"^(?:from|import) ([\w.]+)", path.read_text(), re.MULTILINE)
        assert not starters & set(imported), path


def test_every_public_function_of_the_planner_is_documented():
    for path in (ROOT / "passes").glob("**/*.py"):
        for node in _parsed(path).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{path}: {node.name}"
                methods = [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.FunctionDef)]
                for method in methods if isinstance(node, ast.ClassDef) else ():
                    assert method.name.startswith("_") or ast.get_docstring(method), f"{path}: {method.name}"


def test_the_public_package_is_small_and_documented():
    assert len(autopart.__all__) <= EXPORTS
    assert autopart.__all__ == sorted(autopart.__all__)
    for name in autopart.__all__:
        assert getattr(autopart, name).__doc__, name


@pytest.mark.parametrize("room", ["passes", "runtime"])
def test_packages_cannot_be_imported_under_a_second_name(room):
    result = subprocess.run([sys.executable, "-c", f"import {room}"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode != 0 and f"import autopart.{room}" in result.stderr


def test_every_dependency_has_a_comment():
    text = (ROOT / "pyproject.toml").read_text()
    project = PROJECT["project"]
    extras = [requirement for group in project["optional-dependencies"].values() for requirement in group]
    for requirement in [*project["dependencies"], *extras]:
        assert re.search(rf'"{re.escape(requirement)}",\s+# \S', text), f"{requirement} has no comment"


def test_the_check_runs_the_test_command_of_the_readme():
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    extract = next(line for line in script.read_text().splitlines() if line.startswith("command="))
    found = subprocess.run(["bash", "-c", f'{extract}; echo "$command"'], cwd=ROOT, capture_output=True, text=True)
    command = found.stdout.strip()
    assert "\n" not in command and command.startswith("python3 -m venv .venv && ")
    assert command.endswith(" && .venv/bin/python -m pytest")
    assert f"```bash\n{command}\n```" in (ROOT / "README.md").read_text()
    assert 'eval "$command"' in script.read_text()


def test_the_architecture_is_short_and_names_files_that_exist():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert len(text.splitlines()) <= 275
    for name in ("ARCHITECTURE.md", "CONTRIBUTING.md"):
        for path in re.findall(r"`([\w.]+(?:/[\w.]+)+)/?`", (ROOT / name).read_text()):
            assert any((ROOT / start / path).exists() for start in ("", "autopart", "passes")), f"{name}: {path}"


def test_what_to_read_first_exists_and_is_short():
    section = (ROOT / "ARCHITECTURE.md").read_text().split("| to learn | read |")[1].split("\n## ")[0]
    files: list[Path] = []
    for name in re.findall(r"`([\w/]+\.py)`", section):  # without a folder: in that of the file before
        files.append(ROOT / name if "/" in name else files[-1].with_name(name))
    assert len(files) == len(set(files)) and 34 <= len(files) <= 40
    assert sum(len(file.read_text().splitlines()) for file in files) <= 7500


def test_every_slow_test_is_in_exactly_one_part():
    for file in slow.slow_files():
        assert len(slow.parts_of(file)) == 1, file
    listed = re.findall(r"^\| `([\w-]+)` \|", (ROOT / "docs/testing.md").read_text().split("| part |")[1], re.MULTILINE)
    assert listed == list(slow.PARTS)

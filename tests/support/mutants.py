"""Change the product at random, one place at a time, and count how many of these mutants the tests find.

    python tests/support/mutants.py list --count 200               the mutants, one line each
    python tests/support/mutants.py run --count 200 --last 40      try some of them; a JSON line for each, appended

A mutant is one changed operator, constant or branch in `passes/`, `runtime/`, `autopart/session/` or the stage code.
The list follows from the seed and the sources alone.  A mutant is found if a test fails, or runs longer than the limit;
tests run in the order of `TESTS`, those nearest to the change first, and end at the first failure.  The sources are
copied to a temporary folder, so the checkout does not change.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("passes", "runtime", "autopart/session", "autopart/stagecode")
COPIED = ("autopart", "passes", "runtime", "tests", "benchmarks", "examples", "docs", "pyproject.toml", "README.md")
WHOLE_STEPS = ("tests/e2e/test_any_plan.py",)
"""Tests of whole training steps against one process."""
TESTS = {
    "passes": ("tests/passes", *WHOLE_STEPS),
    "runtime": ("tests/runtime", "tests/session/test_session.py", *WHOLE_STEPS),
    "autopart/session": ("tests/session", "tests/extras", *WHOLE_STEPS),
    "autopart/stagecode": ("tests/session", *WHOLE_STEPS),
}
LIMIT_S = 420.0
SWAPS: dict[type[ast.AST], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*",
    ast.Mod: "*", ast.And: "or", ast.Or: "and",
}  # fmt: skip
"""What an operator becomes."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: the text of a file from `start` to `end` becomes `text`."""

    path: str
    line: int
    start: int
    end: int
    old: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.old!r} -> {self.text!r}"


def mutants(root: Path, count: int, seed: int) -> list[Mutant]:
    """Return the mutants of a seed, drawn from all places in the sources of a checkout."""
    folders = [root / folder for folder in FOLDERS if (root / folder).exists()]
    paths = sorted(path for folder in folders for path in folder.rglob("*.py"))
    found = [mutant for path in paths for mutant in _places(path, str(path.relative_to(root)))]
    return random.Random(seed).sample(found, min(count, len(found)))


def _places(path: Path, name: str) -> Iterator[Mutant]:
    source = path.read_text()
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def at(line: int | None, column: int | None) -> int:
        return starts[(line or 1) - 1] + (column or 0)

    raw = source.encode()

    def mutant(start: int, end: int, text: str, line: int) -> Mutant:
        return Mutant(name, line, start, end, raw[start:end].decode(), text)

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
            sides, new = (node.left, node.comparators[0]), SWAPS[type(node.ops[0])]
        elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS and not _is_text(node):
            sides, new = (node.left, node.right), SWAPS[type(node.op)]
        elif isinstance(node, ast.BoolOp):
            sides, new = (node.values[0], node.values[1]), SWAPS[type(node.op)]
        elif isinstance(node, ast.If | ast.IfExp | ast.While) and not _is_type_checking(node.test):
            start, end = at(node.test.lineno, node.test.col_offset), at(node.test.end_lineno, node.test.end_col_offset)
            yield mutant(start, end, f"(not ({raw[start:end].decode()}))", node.test.lineno)
            continue
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            start, end = at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)
            yield mutant(start, end, str(node.value + 1), node.lineno)
            continue
        else:
            continue
        start = at(sides[0].end_lineno, sides[0].end_col_offset)
        end = at(sides[1].lineno, sides[1].col_offset)
        between = raw[start:end].decode()
        if between.strip(" ").replace(" ", "").isidentifier() or not set(between) & set("()#\n"):
            yield mutant(start, end, f" {new} ", node.lineno)


def _is_text(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return any(isinstance(side, ast.JoinedStr) or isinstance(getattr(side, "value", 0), str) for side in sides)


def _is_type_checking(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def tried(mutant: Mutant, copy: Path, limit_s: float) -> dict[str, object]:
    """Run the tests nearest to a mutant, and return whether they found it, which did, and the seconds."""
    path = copy / mutant.path
    raw = path.read_bytes()
    path.write_bytes(raw[: mutant.start] + mutant.text.encode() + raw[mutant.end :])
    folder = next(folder for folder in TESTS if mutant.path.startswith(folder))
    tests = [test for test in (_mirror(mutant.path), *TESTS[folder]) if test and (copy / test).exists()]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider", *dict.fromkeys(tests)]
    started = time.monotonic()
    run = subprocess.Popen(
        command, cwd=copy, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said, _ = run.communicate(timeout=limit_s)
        found = (
            "" if run.returncode == 0 else next((x for x in said.splitlines() if x.startswith("FAILED")), said[-200:])
        )
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        run.communicate()
        found = "longer than the limit"
    finally:
        path.write_bytes(raw)
    seconds = round(time.monotonic() - started, 1)
    return {"mutant": str(mutant), "found": bool(found), "by": found[:200], "seconds": seconds}


def _mirror(path: str) -> str:
    """Return the tests' folder, or module, with the name of a source file's, if there is one."""
    folder, _, name = path.removeprefix("autopart/").rpartition("/")
    module = f"tests/{folder}/test_{name}"
    return module if (ROOT / module).exists() else f"tests/{folder}" if folder.count("/") else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("list", "run"))
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout whose product is changed and tested")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last", type=int, default=None)
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"))
    asked = parser.parse_args()
    drawn = list(enumerate(mutants(asked.root, asked.count, asked.seed)))[asked.first : asked.last]
    if asked.action == "list":
        print(*(f"{number} {mutant}" for number, mutant in drawn), sep="\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        for name in COPIED:
            source = asked.root / name
            if source.is_dir():
                shutil.copytree(source, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / name)
        for number, mutant in drawn:
            row = {"number": number, **tried(mutant, copy, asked.limit_s)}
            print(json.dumps(row), flush=True)
            with asked.out.open("a") as out:
                out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

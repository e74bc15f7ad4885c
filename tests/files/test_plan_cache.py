"""Plans on disk: found again when nothing changed, missed when anything did, and never trusted."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.graphs import cluster, layers, source
from support.plans import changed
from torch import nn

import autopart
from autopart.cli.main import main
from autopart.files import plan_cache
from autopart.files.plan_cache import PlanCache
from autopart.files.plans import load_plan, save_plan
from autopart.ir.cluster import Cluster
from autopart.ir.errors import UsageError
from autopart.ir.plan import Plan
from autopart.passes import pipeline
from autopart.passes.pipeline import PlannerInput, build
from autopart.passes.search.space import PlanRequest


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the plans; a cache of each test's own."""
    monkeypatch.setenv("AUTOPART_CACHE", str(tmp_path))
    return tmp_path / "plans"


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each search."""
    count: list[int] = []

    def search(*args: Any) -> Any:
        count.append(1)
        return known(*args)

    known = pipeline.search
    monkeypatch.setattr(pipeline, "search", search)
    return count


def net(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 3))


def plan(machines: str | Cluster = "cpu:2", model: nn.Module | None = None, rows: int = 8, **options: Any) -> Plan:
    sample = torch.zeros(rows, 8), torch.zeros(rows, dtype=torch.long)
    given = {"costs": "analytic", "loss_fn": nn.functional.cross_entropy, **options}
    return autopart.plan(model or net(), machines, sample=sample, **given)


def test_what_was_planned_is_not_searched_again(searches: list[int], folder: Path) -> None:
    first = plan()
    count = len(searches)
    assert count and len(list(folder.iterdir())) >= 1
    assert plan() == first and len(searches) == count
    assert plan(watch=lambda *told: None) == first and len(searches) == count


def test_without_the_cache_nothing_is_read_or_kept(searches: list[int], folder: Path) -> None:
    first = plan(cache=False)
    count = len(searches)
    assert not folder.exists()
    assert plan(cache=False) == first and len(searches) == 2 * count
    with pytest.raises(UsageError, match="cache is 'no'"):
        plan(cache="no")


@pytest.mark.parametrize(
    "change",
    [
        {"machines": "cpu:3"},
        {"machines": "h200x8"},
        {"model": net(16)},
        {"rows": 16},
        {"stages": 1},
        {"micro_batches": 2},
        {"schedule": "gpipe"},
        {"cuts": ["2"]},
        {"together": ["0"]},
        {"pins": {"0": 0}},
        {"replicas": 1},
        {"recompute": "off"},
        {"optimizer": "adam"},
        {"prove": 1.0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_anything_else_is_planned_anew(searches: list[int], change: dict[str, Any]) -> None:
    plan(optimizer="sgd")
    count = len(searches)
    plan(**{"optimizer": "sgd", **change})
    assert len(searches) > count


REQUEST = PlanRequest(((1,) * 4,))


def place(asked: PlannerInput, *, c: Cluster | None = None, request: PlanRequest = REQUEST, other: Any = None) -> Path:
    return PlanCache(asked, other, c or cluster(2), request).path


def test_the_key_covers_costs_modules_captures_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    g = layers(3)
    known = source(g, cluster(2))
    op = g.ops[1]
    dearer = replace(g, ops=(g.ops[0], replace(op, cost=replace(op.cost, scratch_bytes=7)), *g.ops[2:]))
    moved = replace(g, ops=(g.ops[0], replace(op, module="elsewhere"), *g.ops[2:]))
    elsewhere = replace(g, ops=(g.ops[0], replace(op, where="model.py:7"), *g.ops[2:]))
    paths = [
        place(known),
        place(replace(known, graph=dearer)),
        place(replace(known, graph=moved)),
        place(replace(known, torch_version="3")),
        place(replace(known, costs="measured")),
        place(known, other=replace(g, rows=2)),
        place(known, c=cluster(2, latency_ns=1)),
        place(known, request=replace(REQUEST, state_factor=6.0)),
    ]
    assert len(set(paths)) == len(paths)
    assert place(replace(known, graph=elsewhere)) == paths[0] == place(source(g, cluster(2)))
    monkeypatch.setattr(plan_cache, "_planner", lambda: "another planner")
    assert place(known) not in paths


@pytest.fixture
def kept() -> tuple[PlanCache, Plan]:
    """A place and its plan, which is there."""
    asked = source(layers(3), cluster(2))
    cache, made = PlanCache(asked, None, cluster(2), REQUEST), build(asked, cluster(2), REQUEST)
    assert cache.get() is None
    cache.put(made)
    assert cache.get() == made
    return cache, made


def reversed_stages(text: str) -> str:
    document = json.loads(text)
    document["decision"]["stages"].reverse()
    return json.dumps(document)


BROKEN = {
    "empty": lambda text: "",
    "truncated": lambda text: text[: len(text) // 2],
    "no plan": lambda text: "[]",
    "a pickle": lambda text: "\x80\x04cos\nsystem\n",
    "unknown key": lambda text: json.dumps(json.loads(text) | {"run": "rm"}),
    "an op of no graph": lambda text: text.replace('"embed"', '"__import__"'),
    "an op too few": lambda text: text.replace('"u1",', "", 1),
    "flow back": lambda text: reversed_stages(text),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_no_plan_for_the_graph_is_ignored(kept: tuple[PlanCache, Plan], name: str) -> None:
    cache, made = kept
    text = cache.path.read_text()
    assert BROKEN[name](text) != text
    cache.path.write_text(BROKEN[name](text))
    assert cache.get() is None
    cache.put(made)
    assert cache.get() == made


@pytest.mark.parametrize(
    "change",
    [
        {"graph_digest": "x"}, {"structure_digest": "x"}, {"torch_version": "1"}, {"world": 3}, {"costs": "measured"},
        {"micro_rows": (2, 2)}, {"schedule": "pipedream"},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_a_plan_for_something_else_is_ignored(kept: tuple[PlanCache, Plan], change: dict[str, Any]) -> None:
    cache, made = kept
    save_plan(changed(made, **change), cache.path)
    assert cache.get() is None


def test_a_broken_file_is_planned_anew_and_replaced(searches: list[int], folder: Path) -> None:
    first = plan()
    count = len(searches)
    for path in folder.iterdir():
        path.write_text("{")
    assert plan() == first and len(searches) == 2 * count
    assert all(load_plan(path) for path in folder.iterdir())


def test_the_newest_are_kept(kept: tuple[PlanCache, Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    cache, made = kept
    monkeypatch.setattr(plan_cache, "MOST", 3)
    for i in range(5):
        path = cache.path.with_name(f"{i}.json")
        path.write_text("{}")
        os.utime(path, ns=(i, i))
    cache.put(made)
    assert sorted(path.name for path in cache.path.parent.iterdir()) == sorted(["3.json", "4.json", cache.path.name])


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOPART_CACHE", str(tmp_path / "file"))
    assert plan() == plan(cache=False)


def test_the_command_line_can_do_without(searches: list[int], folder: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\nfrom torch import nn\n\ndef make():\n    return nn.Linear(4, 3), (torch.zeros(4, 4), "
        "torch.zeros(4, dtype=torch.long)), nn.functional.cross_entropy\n"
    )
    words = ["plan", f"{tmp_path / 'own.py'}:make", "--costs", "analytic", "--out", str(tmp_path / "a.json")]
    for more in (["--no-cache"], ["--prove", "0.5"]):
        with pytest.raises(SystemExit) as end:
            main([*words, *more])
        assert not end.value.code and folder.exists() == ("--prove" in more)
    assert any("CP-SAT" in note for note in load_plan(tmp_path / "a.json").notes)


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "5", True])
def test_seconds_of_a_proof_are_a_number(seconds: Any) -> None:
    with pytest.raises(UsageError, match="prove is"):
        plan(prove=seconds)

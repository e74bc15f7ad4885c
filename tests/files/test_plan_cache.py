"""Plans on disk: found again when nothing changed, missed when anything did, and checked like any plan file."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.grids import sampled
from support.languages.graphs import cluster, layers, source
from torch import nn

import autopart
from autopart.cli.main import main
from autopart.files import caches
from autopart.files.caches import (
    CacheWarning,
    digest_of_sources,
    find_plan,
    keep_plan,
    plan_path,
    planner_digest,
    read_kept,
)
from autopart.files.plans import load_plan, plan_to_json
from autopart.ir.cluster import Cluster
from autopart.ir.errors import UsageError
from autopart.ir.graph import Size
from autopart.ir.plan import Plan
from autopart.passes import pipeline
from autopart.passes.pipeline import PlannerInput, build
from autopart.passes.program import schedules
from autopart.passes.search.space import PlanRequest
from autopart.planning import make
from autopart.planning.make import plan_key


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


def backward_at_once(stages: int, micro_batches: int) -> list[list[str]]:
    return [[f"{s}{kind}{m}" for m in range(micro_batches) for kind in "FB"] for s in range(stages)]


def test_a_users_schedule_is_planned_anew_as_it_may_have_changed(
    searches: list[int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedules, "_registered", dict(schedules._registered))
    schedules.register(backward_at_once)
    first = plan(schedule="backward_at_once")
    count = len(searches)
    assert plan(schedule="backward_at_once") == first and len(searches) == 2 * count
    assert not folder.exists()


def test_without_the_cache_nothing_is_read_or_kept(searches: list[int], folder: Path) -> None:
    first = plan(cache=False)
    count = len(searches)
    assert not folder.exists()
    assert plan(cache=False) == first and len(searches) == 2 * count
    with pytest.raises(UsageError, match="cache is 'no'"):
        plan(cache="no")


@pytest.mark.parametrize(
    "change",
    sampled(
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
        ]
    ),
    ids=lambda change: next(iter(change)),
)
def test_anything_else_is_planned_anew(
    known: Path, searches: list[int], monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    monkeypatch.setenv("AUTOPART_CACHE", str(known))
    plan(**{"optimizer": "sgd", **change})
    assert searches


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds the plan which the others are a change of; with it, nothing is searched."""
    folder = tmp_path_factory.mktemp("known")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOPART_CACHE", str(folder))
        plan(optimizer="sgd")
        patch.setattr(pipeline, "search", None)
        plan(optimizer="sgd")
    return folder


REQUEST = PlanRequest(((1,) * 4,))


def key(asked: PlannerInput, *, c: Cluster | None = None, request: PlanRequest = REQUEST, other: Any = None) -> str:
    return plan_key(asked, other, c or cluster(2), request)


def test_the_key_covers_costs_modules_captures_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    g = layers(3)
    known = source(g, cluster(2))
    op = g.ops[1]
    dearer = replace(g, ops=(g.ops[0], replace(op, cost=replace(op.cost, scratch_bytes=7)), *g.ops[2:]))
    moved = replace(g, ops=(g.ops[0], replace(op, module="elsewhere"), *g.ops[2:]))
    elsewhere = replace(g, ops=(g.ops[0], replace(op, where="model.py:7"), *g.ops[2:]))
    keys = [
        key(known),
        key(replace(known, graph=dearer)),
        key(replace(known, graph=moved)),
        key(replace(known, torch_version="3")),
        key(replace(known, costs="measured")),
        key(known, other=replace(g, size=Size(2))),
        key(known, c=cluster(2, latency_ns=1)),
        key(known, request=replace(REQUEST, state_factor=6.0)),
    ]
    assert len(set(keys)) == len(keys)
    assert key(replace(known, graph=elsewhere)) == keys[0] == key(source(g, cluster(2)))
    monkeypatch.setattr(make, "planner_digest", lambda: "another planner")
    assert key(known) not in keys


def test_a_change_in_any_file_of_the_planner_changes_the_key(tmp_path: Path) -> None:
    rooms = tmp_path / "home" / "ir", tmp_path / "home" / "passes"
    shutil.copytree(Path(autopart.__file__).parent / "ir", rooms[0])
    shutil.copytree(Path(autopart.__file__).parent / "passes", tmp_path / "elsewhere")
    rooms[1].symlink_to(tmp_path / "elsewhere")
    known = digest_of_sources(*rooms)
    assert known == planner_digest()
    nested = [path for path in (tmp_path / "elsewhere").rglob("*.py") if path.parent != tmp_path / "elsewhere"]
    assert len({path.parent for path in nested}) >= 6
    for path in [*rooms[0].glob("*.py"), *nested]:
        text = path.read_text()
        path.write_text(text + "#")
        assert digest_of_sources(*rooms) != known, path
        path.write_text(text)
    nested[0].rename(nested[0].with_name("renamed.py"))
    assert digest_of_sources(*rooms) != known


@pytest.fixture
def kept() -> tuple[str, Plan]:
    """A key and its plan, which is there."""
    asked = source(layers(3), cluster(2))
    made = build(asked, cluster(2), REQUEST)
    assert found() is None
    keep_plan(key(asked), made)
    assert found() == made
    return key(asked), made


def found() -> Plan | None:
    """Return the plan that planning would take from the cache."""
    asked = source(layers(3), cluster(2))
    return find_plan(key(asked), asked.graph)


def ignored() -> None:
    """What is kept is not believed, and a warning says why, in printable words."""
    with pytest.warns(CacheWarning) as told:
        assert found() is None
    assert all(line.isprintable() for each in told for line in str(each.message).splitlines())


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
def test_a_file_that_is_no_plan_for_the_graph_is_ignored(kept: tuple[str, Plan], name: str) -> None:
    key, made = kept
    path = plan_path(key)
    text = plan_to_json(made)
    assert BROKEN[name](text) != text
    path.write_text(BROKEN[name](text))
    ignored()
    keep_plan(key, made)
    assert found() == made


def test_a_broken_file_is_planned_anew_and_replaced(searches: list[int], folder: Path) -> None:
    first = plan()
    count = len(searches)
    for path in folder.iterdir():
        path.write_text("{")
    with pytest.warns(CacheWarning):
        assert plan() == first
    assert len(searches) == 2 * count
    assert all(read_kept(path, str) for path in folder.glob("*.json"))
    assert plan() == first and len(searches) == 2 * count


def test_the_newest_are_kept(kept: tuple[str, Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    key, made = kept
    monkeypatch.setattr(caches, "MOST_PLANS", 3)
    for i in range(5):
        path = plan_path(key).with_name(f"{i}.json")
        path.write_text("{}")
        os.utime(path, ns=(i, i))
    keep_plan(key, made)
    names = [path.name for path in plan_path(key).parent.iterdir()]
    assert sorted(names) == sorted(["3.json", "4.json", f"{key}.json"])


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOPART_CACHE", str(tmp_path / "file"))
    with pytest.warns(CacheWarning, match="Not a directory"):
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

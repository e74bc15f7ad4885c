"""Files broken in ten thousand ways: each is refused by our own error, or taken and then of use, soon and in little
memory."""

from __future__ import annotations

import json
import os
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.languages.bounded import SECONDS, bounded
from support.languages.graphs import cluster, layers, source
from support.languages.mutations import mutated
from support.languages.plans import example

from autopart.files.caches.cost_cache import cost_path, keep_times, read_times
from autopart.files.caches.kept import CacheWarning, write_kept
from autopart.files.caches.plan_cache import find_plan, plan_path
from autopart.files.clusters import cluster_to_dict, cluster_to_yaml, parse_cluster
from autopart.files.plans import diff_plans, load_plan, plan_from_json, plan_to_json
from autopart.ir.cluster import Cluster
from autopart.ir.errors import AutopartError, PlanFileError
from autopart.ir.graph import Graph
from autopart.ir.plan import Plan, check
from autopart.passes.pipeline import PlannerInput, build
from autopart.passes.program.routing import edges
from autopart.passes.search.space import PlanRequest
from autopart.passes.simulation.estimate import stage_estimates
from autopart.passes.simulation.stage_costs import Estimator
from autopart.report.cluster_table import cluster_table
from autopart.report.plan_table import plan_facts, stage_table

SEED = 2026
CLUSTER_FILES = (
    {"devices": [{"kind": "cuda", "count": 4, "memory": "80GiB", "flops": {"bfloat16": 3e14, "float32": "2e13"},
                  "memory_bandwidth": 2e12}, {"kind": "cuda", "count": 4, "name": "V100"}],
     "levels": [{"size": 4, "latency_us": 5, "bandwidth": 3e11}, {"size": 8, "latency_us": 20.5, "bandwidth": "9 GB"}]},
    cluster_to_dict(parse_cluster("p3.16xlarge:2")),
    {"devices": [{"kind": "cpu", "memory": "1GiB"}, {"kind": "cpu"}]},
)  # fmt: skip
TIMES = {"version": 1, "times": {"here": {"a": [1, 2], "b": [30, 40]}, "there": {"c 1": [5000, 0]}}}


@dataclass(frozen=True)
class Subject:
    """What plans are made for, and the plans."""

    graph: Graph
    machines: Cluster
    asked: PlannerInput
    request: PlanRequest
    plans: tuple[Plan, ...]


@pytest.fixture(scope="module")
def subject() -> Subject:
    graph, machines = layers(3), cluster(4)
    asked, request = source(graph, machines), PlanRequest(((2,) * 4, (4, 4)))
    again = replace(request, recompute="all", stages=2)
    made = tuple(build(asked, machines, each) for each in (request, again))
    return Subject(graph, machines, asked, request, (*made, example()))


def shown(*texts: str) -> None:
    """What goes to a terminal."""
    for text in texts:
        assert all(line.isprintable() for line in text.splitlines()), text[:500]
        text.encode()


def use_plan(raw: bytes, folder: Path, subject: Subject) -> str:
    path = folder / "plan.json"
    path.write_bytes(raw)
    plan = load_plan(path)
    shown(plan.explain(), stage_table(plan, width=80), diff_plans(subject.plans[0], plan))
    assert plan_from_json(plan_to_json(plan)) == plan and plan.digest()
    json.dumps(plan_facts(plan), allow_nan=False)
    check(plan, subject.graph)
    if plan.decision.world > subject.machines.world or len(plan.micro_rows) > 100:
        return "read"
    estimator = Estimator(subject.machines, subject.asked.cost_model)
    stage_estimates(plan.decision, edges(plan.decision, subject.graph), estimator)
    return "simulated"


def use_cluster(raw: bytes, folder: Path, subject: Subject, ending: str) -> str:
    path = folder / f"cluster.{ending}"
    path.write_bytes(raw)
    found = parse_cluster(path, env={})
    shown(cluster_table(found), cluster_to_yaml(found))
    json.dumps(cluster_to_dict(found), allow_nan=False)
    last = found.world - 1
    assert found.link(0, last).bytes_per_s > 0 and len(found.ports(0, last)) == 2
    return "read"


def use_times(raw: bytes, folder: Path, subject: Subject) -> str:
    keep(cost_path(), raw)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        keep_times("here", {"new": (7, 7)})
    shown(*(str(each.message) for each in told))
    assert all(each.category is CacheWarning for each in told)
    assert read_times("here")["new"] == (7, 7)
    times = [read_times(place).get(key) for place, key in (("here", "a"), ("here", "b"), ("there", "c 1"))]
    assert all(entry is None or (entry[0] > 0 and entry[1] >= 0) for entry in times)
    return "ignored" if told else "read"


def use_entry(raw: bytes, folder: Path, subject: Subject) -> str:
    key = "fuzz"
    keep(plan_path(key), raw)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = find_plan(key, subject.graph)
    shown(*(str(each.message) for each in told))
    assert all(each.category is CacheWarning for each in told) and (found is None) == bool(told)
    if found is None:
        return "ignored"
    shown(found.explain())
    return "read"


def keep(path: Path, raw: bytes) -> None:
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
    else:
        write_kept(path, text)


def attempt(use: Any, raw: bytes, folder: Path, subject: Subject) -> str:
    """What became of it; anything but our own error passes."""
    try:
        return str(use(raw, folder, subject))
    except AutopartError as error:
        shown(str(error))
        assert len(str(error)) < 6000
        assert error.where or error.why or not isinstance(error, PlanFileError)
        return "refused"


def sort_of(i: int) -> str:
    """A fifth of each sort, and of the cluster files a few in TOML."""
    return "toml" if i % 20 == 4 else ("plan", "yaml", "times", "entry", "json")[i % 5]


def works(subject: Subject, folder: Path, numbers: range) -> Iterator[Callable[[], str]]:
    """What is done with the files of these numbers, the same ones every time; each is made when its turn comes."""
    for i in numbers:
        draw, sort = random.Random(SEED * 10**6 + i), sort_of(i)
        use: Any = {"plan": use_plan, "times": use_times, "entry": use_entry}.get(sort)
        if sort in ("plan", "entry"):
            document = json.loads(plan_to_json(draw.choice(subject.plans) if sort == "plan" else subject.plans[0]))
        else:
            document = TIMES if sort == "times" else draw.choice(CLUSTER_FILES)
        raw = mutated(document, draw, "yaml" if sort == "yaml" else "json")
        if sort == "toml":
            raw = as_toml(raw)
        yield partial(attempt, use or partial(use_cluster, ending=sort), raw, folder, subject)


def as_toml(raw: bytes) -> bytes:
    """Lists, texts and numbers are written as in JSON, tables nearly so."""
    try:
        document = json.loads(raw)
        rows = [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in document.items()]
    except (ValueError, RecursionError, AttributeError):
        return raw
    return "\n".join(rows).replace('": ', '" = ').encode()


def broken_files(count: int, subject: Subject, folder: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    slowest = 0.0
    for start in range(0, count, 500):
        numbers = range(start, min(count, start + 500))
        results = bounded(works(subject, folder, numbers))
        for i, (said, seconds) in zip(numbers, results, strict=False):
            assert said in ("read", "simulated", "refused", "ignored"), f"number {i}, {sort_of(i)}: {said}"
            assert seconds < SECONDS, f"number {i}, {sort_of(i)}: {seconds:.1f} s"
            slowest = max(slowest, seconds)
            found[f"{sort_of(i)} {said}"] += 1
        assert len(results) == len(numbers), f"number {start + len(results)} ended its process"
    print(f"{count} broken files, slowest {slowest:.2f} s: {dict(sorted(found.items()))}")
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files and caches stand; nothing waits for the disk."""
    monkeypatch.setenv("AUTOPART_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    return tmp_path


def test_a_broken_file_is_refused_by_our_own_error_or_is_of_use(subject: Subject, folder: Path) -> None:
    found = broken_files(1500, subject, folder)
    assert sum(found.values()) == 1500 and {"plan refused", "entry ignored", "yaml read"} <= set(found)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_broken_files_are_refused_or_of_use(subject: Subject, folder: Path) -> None:
    found = broken_files(10_000, subject, folder)
    assert sum(found.values()) == 10_000

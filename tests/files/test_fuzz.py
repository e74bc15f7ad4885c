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
import yaml
from support.languages.bounded import SECONDS, bounded
from support.languages.graphs import cluster, layers, source
from support.languages.plans import example

from autopart.files.caches import CacheWarning, cost_path, find_plan, keep_times, plan_path, read_times, write_kept
from autopart.files.clusters import cluster_to_dict, cluster_to_yaml, parse_cluster
from autopart.files.plans import load_plan, plan_from_json, plan_to_json
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
from autopart.report.plan_diff import diff_plans
from autopart.report.plan_table import plan_facts, stage_table

JUNK: tuple[Callable[[random.Random], Any], ...] = (
    lambda draw: draw.choice([None, True, False, "", [], {}, [[]], {"": {}}]),
    lambda draw: draw.choice([0, -1, 1, 2**31, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, -(2**63), 10**30, 10**400]),
    lambda draw: draw.choice([0.0, -0.0, 0.5, 1e308, -1e308, 5e-324, float("nan"), float("inf"), -float("inf")]),
    lambda draw: draw.choice(
        ["\x1b[2J", "\x00", "\ud800", "\u202e", "é" * 50, "\n", "a\nb", "x" * 5000, "🙂", "1e5", "~"]
    ),
    lambda draw: draw.choice(
        ["cpu", "cuda", "80GiB", "1e999", "9" * 400, "1" * 30, "0x" + "f" * 99, "1P", "-5", "nan"]
    ),
    lambda draw: nested(draw.choice([3, 31, 33, 500]), draw.random() < 0.5),
    lambda draw: [draw.randint(-3, 70_000) for _ in range(draw.choice([1, 5, 2000]))],
    lambda draw: {f"k{i}": i for i in range(draw.choice([1, 5, 2000]))},
    lambda draw: draw.randint(-(2 ** draw.randint(1, 80)), 2 ** draw.randint(1, 80)),
)
TOKENS = [
    *'{}[],:"\\-+.0123456789eE \n\t#&*!|>%@`\'?', "null", "true", "NaN", "-Infinity", "1e999", "1" * 500,
    "[" * 100, "{" * 100, '{"a":' * 100, "\x00", "\x1b[2J", "\u2028", "\ufeff", "&a ", "*a", "<<: *a\n", "!!int ",
    "--- ", "...\n", "? ", "- " * 50, "1:" * 60 + "1", "\\ud800", '"\\u001b"', "%YAML 9.9\n", "a.b." * 40, "= 1\n",
    "[[a]]\n", "0x" + "f" * 500,
]  # fmt: skip


def nested(depth: int, lists: bool) -> Any:
    """Return an object or list nested to this depth."""
    made: Any = 1
    for _ in range(depth):
        made = [made] if lists else {"a": made}
    return made


def mutated(document: Any, draw: random.Random, language: str) -> bytes:
    """Return the document with up to three mutations as "json" or "yaml" text, which may be damaged too."""
    document = json.loads(json.dumps(document))
    for _ in range(draw.choice([0, 1, 1, 1, 2, 3])):
        document = _damaged(document, draw)
    text = _as_json(document, draw) if language == "json" or draw.random() < 0.2 else _as_yaml(document, draw)
    raw = text.encode("utf-8", "surrogatepass")
    for _ in range(draw.choice([0, 0, 0, 1, 1, 4])):
        raw = _torn(raw, draw)
    return raw


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key) of a document."""
    for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield node, key
        yield from _places(node[key])


def _damaged(document: Any, draw: random.Random) -> Any:
    places = list(_places(document))
    if not places or draw.random() < 0.01:
        return draw.choice(JUNK)(draw)
    holder, key = draw.choice(places)
    kind = draw.randrange(8)
    if kind == 0:
        del holder[key]
    elif kind == 1:  # duplicate
        if isinstance(holder, list):
            holder[key:key] = [holder[key]] * draw.choice([1, 1, 2, 3000])
        else:
            holder[draw.choice(["kind", "levels", "stages", "\x1b]0;x\x07", "k" * 9999, str(key) + "_"])] = holder[key]
    elif kind == 2:  # renamed or reordered
        if isinstance(holder, dict):
            holder[draw.choice([str(key).upper(), "", "__proto__", "\ud800", "version"])] = holder.pop(key)
        else:
            draw.shuffle(holder)
    elif kind == 3:  # replaced by another part
        other, there = draw.choice(places)
        if not any(other[there] is inner[k] for inner, k in _places(holder[key])) and other[there] is not holder:
            holder[key] = json.loads(json.dumps(other[there]))
    elif kind == 4 and isinstance(holder[key], int | float):
        holder[key] = holder[key] * draw.choice([-1, 0, 2, 10**6, 2**40]) + draw.choice([-1, 0, 1])
    elif kind == 5:
        holder[key] = draw.choice([[holder[key]], {"a": holder[key]}, str(holder[key])])
    else:
        holder[key] = draw.choice(JUNK)(draw)
    return document


def _as_json(document: Any, draw: random.Random) -> str:
    text = json.dumps(document, indent=draw.choice([None, 1]), ensure_ascii=draw.random() < 0.7)
    if draw.random() < 0.1 and '": ' in text:  # a duplicate key
        at = draw.choice([i for i in range(len(text)) if text.startswith('": ', i)][:200])
        start = text.rfind('"', 0, at)
        text = f'{text[:start]}{text[start:at]}": 1, {text[start:]}'
    return text


def _as_yaml(document: Any, draw: random.Random) -> str:
    try:
        return yaml.safe_dump(document, sort_keys=False, default_flow_style=draw.choice([True, False, None]))
    except (yaml.YAMLError, RecursionError):
        return json.dumps(document)


def _torn(raw: bytes, draw: random.Random) -> bytes:
    at = draw.randint(0, len(raw))
    kind = draw.randrange(5)
    if kind == 0:
        return raw[:at]
    if kind == 1 and raw:
        flipped = bytearray(raw)
        for _ in range(draw.choice([1, 3, 20])):
            flipped[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
        return bytes(flipped)
    if kind == 2:
        return raw[:at] + draw.choice(TOKENS).encode() + raw[at:]
    if kind == 3:
        return raw[:at] + raw[draw.randint(0, len(raw)) :]
    return raw[:at] + draw.randbytes(draw.choice([1, 4, 200])) + raw[at:]


# -- tests -----------------------------------------------------------------------------------------------------------


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
    found = broken_files(600, subject, folder)
    assert sum(found.values()) == 600 and {"plan refused", "entry ignored", "yaml read"} <= set(found)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_broken_files_are_refused_or_of_use(subject: Subject, folder: Path) -> None:
    found = broken_files(10_000, subject, folder)
    assert sum(found.values()) == 10_000

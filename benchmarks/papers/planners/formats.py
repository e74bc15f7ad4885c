"""Readers of the profile files that other planners published. The autopart package reads none of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.papers.planners import pipedream, piper
from benchmarks.papers.planners.placement import Machine, Message, Problem


@dataclass(frozen=True, slots=True)
class ProfileNode:
    """One line of PipeDream's text format, in ms and bytes per minibatch of the profile."""

    name: str
    what: str
    forward_ms: float
    backward_ms: float
    activation_bytes: float
    parameter_bytes: float


@dataclass(frozen=True, slots=True)
class ProfileGraph:
    """A profile. parents[v]: indices of the nodes that v reads."""

    nodes: tuple[ProfileNode, ...]
    parents: tuple[tuple[int, ...], ...]


def kind(path: Path) -> str:
    """Return `profile` (PipeDream, DAPPLE), `piper` or `dnn-partitioning`, detected by content."""
    text = path.read_text()
    if not text.lstrip().startswith("{"):
        return "profile"
    return "piper" if "TMPCs" in text else "dnn-partitioning"


def read_profile(path: Path) -> ProfileGraph:
    """Read PipeDream's text format. Inputs and unread `__getitem__` sinks are dropped, as in its optimizer.

    Node line: `ID -- DESC -- forward_compute_time=F, backward_compute_time=B, activation_size=A, parameter_size=P`.
    Edge line: begins with white space, `SRC -- DST`.
    """
    nodes: dict[str, ProfileNode] = {}
    edges: list[tuple[str, str]] = []
    for line in path.read_text().splitlines():
        if line[:1] in ("\t", " "):
            source, target = line.strip().split(" -- ")
            edges.append((source, target))
        elif line.strip():
            node = _profile_node(line)
            nodes[node.name] = node
    read, written = {s for s, _ in edges}, {t for _, t in edges}
    dropped = {n for n, x in nodes.items() if x.what.startswith("Input") and n not in written}
    dropped |= {n for n, x in nodes.items() if x.what.startswith("__getitem__") and n not in read}
    kept = [n for n in nodes if n not in dropped]
    place = {n: i for i, n in enumerate(kept)}
    parents: list[list[int]] = [[] for _ in kept]
    for source, target in edges:
        if source in place and target in place:
            parents[place[target]].append(place[source])
    return ProfileGraph(tuple(nodes[n] for n in kept), tuple(map(tuple, parents)))


def _profile_node(line: str) -> ProfileNode:
    name, what, numbers = line.strip().split(" -- ")[:3]
    fields = dict(field.split("=") for field in numbers.split(", "))
    sizes = fields["activation_size"].strip("[] ").split("; ")
    return ProfileNode(
        name,
        what,
        float(fields["forward_compute_time"]),
        float(fields["backward_compute_time"]),
        sum(float(size) for size in sizes),
        float(fields["parameter_size"]),
    )


def pipedream_profile(path: Path) -> pipedream.Profile:
    """Return the states of a profile file, with times in seconds per minibatch."""
    graph = read_profile(path)
    return pipedream.profile(
        graph.parents,
        [(n.forward_ms + n.backward_ms) / 1000 for n in graph.nodes],
        [n.activation_bytes for n in graph.nodes],
        [n.parameter_bytes for n in graph.nodes],
    )


def _load(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text())
    assert isinstance(content, dict)
    return content


@dataclass(frozen=True, slots=True)
class Placing:
    """A dnn-partitioning file: the problem in ns, and the ids of its parts.

    nodes: ids of the nodes of each item, which must share a machine (one colour class). content: the file.
    """

    problem: Problem
    nodes: tuple[tuple[int, ...], ...]
    content: dict[str, Any]


def read_placing(path: Path, *, devices: int | None = None, memory_bytes: int | None = None) -> Placing:
    """Read dnn-partitioning JSON: accelerators first, then the CPU cores, which pay no transfers. Times in ns.

    Contiguity applies to forward nodes. A class without forward nodes is constrained by its backward edges, reversed,
    as in the original DP (the original integer program leaves it free).
    """
    content = _load(path)
    classes: dict[object, list[dict[str, Any]]] = {}
    for node in content["nodes"]:
        classes.setdefault(node.get("colorClass", ("own", node["id"])), []).append(node)
    groups = list(classes.values())
    item = {node["id"]: i for i, group in enumerate(groups) for node in group}
    back = {node["id"]: bool(node["isBackwardNode"]) for node in content["nodes"]}
    readers: dict[int, list[int]] = {}
    for edge in content["edges"]:
        readers.setdefault(edge["sourceId"], []).append(edge["destId"])
    cost = {edge["sourceId"]: edge["cost"] for edge in content["edges"]}
    messages = [
        Message(round(cost[u] * NS_PER_MS), tuple(dict.fromkeys(item[v] for v in (u, *reads))))
        for u, reads in readers.items()
    ]
    pairs = [(u, v) for u, reads in readers.items() for v in reads if item[u] != item[v]]
    orphans = {i for i, group in enumerate(groups) if all(node["isBackwardNode"] for node in group)}
    turned = [(item[v], item[u]) for u, v in pairs if back[u] and back[v] and {item[u], item[v]} & orphans]
    accelerator = Machine(0, round(content["maxSizePerFPGA"]) if memory_bytes is None else memory_bytes)
    machines = [accelerator] * (content["maxFPGAs"] if devices is None else devices)
    machines += [Machine(1, None, pays=False)] * content["maxCPUs"]
    problem = Problem(
        times=(tuple(_accelerated_ns(group) for group in groups), tuple(_total_ns(g, "cpuLatency") for g in groups)),
        sizes=tuple(round(sum(node.get("size", 0.0) for node in group)) for group in groups),
        messages=tuple(message for message in messages if message.cost and len(message.items) > 1),
        edges=tuple(dict.fromkeys([(item[u], item[v]) for u, v in pairs if not back[u] and not back[v]] + turned)),
        machines=tuple(machines),
    )
    return Placing(problem, tuple(tuple(n["id"] for n in g) for g in groups), content)


def placing_loads_ms(placing: Placing, machine: Sequence[int]) -> list[float]:
    """Return the load of each machine in ms from the nodes and edges of the file: accelerators, then CPU cores."""
    place = {node: machine[i] for i, group in enumerate(placing.nodes) for node in group}
    pays = [m.pays for m in placing.problem.machines]
    loads = [0.0] * len(pays)
    for node in placing.content["nodes"]:
        loads[place[node["id"]]] += node["fpgaLatency" if pays[place[node["id"]]] else "cpuLatency"]
    crossing = {
        (edge["sourceId"], spot): edge["cost"]
        for edge in placing.content["edges"]
        for spot in (place[edge["sourceId"]], place[edge["destId"]])
        if place[edge["sourceId"]] != place[edge["destId"]] and pays[spot]
    }
    for (_, spot), cost in crossing.items():
        loads[spot] += cost
    return loads


NS_PER_MS = 1_000_000


def _total_ns(group: list[dict[str, Any]], field: str) -> int:
    return round(sum(float(node[field]) for node in group) * NS_PER_MS)


def _accelerated_ns(group: list[dict[str, Any]]) -> int | None:
    return _total_ns(group, "fpgaLatency") if all(node["supportedOnFpga"] for node in group) else None


def read_piper(path: Path) -> tuple[piper.Model, piper.Limits]:
    """Read Piper's JSON and its limits. Times in seconds per micro-batch."""
    content = _load(path)
    place = {node["id"]: v for v, node in enumerate(content["nodes"])}
    modes = tuple(
        {int(t): tuple(_mode(mode, place) for mode in choices) for t, choices in node["TMPCs"].items()}
        for node in content["nodes"]
    )
    edges = tuple((place[e["sourceId"]], place[e["destId"]], float(e["communicationCost"])) for e in content["edges"])
    limits = piper.Limits(
        content["maxDevices"], content["maxMemoryPerDevice"], content["bandwidth"], content["mbsInBatch"]
    )
    return piper.Model(modes, edges), limits


def _mode(mode: dict[str, Any], place: dict[int, int]) -> piper.Mode:
    return piper.Mode(
        mode["id"],
        mode["timePerSample"],
        mode["parameterSize"],
        mode["memoryUsageA"],
        mode["memoryUsageB"],
        tuple((place[int(v)], size) for v, size in mode["syncTimeFw"].items()),
        tuple((place[int(v)], size) for v, size in mode["syncTimeBw"].items()),
    )

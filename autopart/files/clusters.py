"""Cluster descriptions: a short string, a file, or what the launcher and the visible devices say.

    "cpu:2"   "cpu"   "cuda:8"   "h200x8"   "p3.16xlarge:2" (nodes)   "cluster.yaml"   None

A file (YAML, TOML or JSON) lists devices, of one kind or several, and, innermost first, the levels of links between
them; `ir.cluster` says what a level's bandwidth is:

    devices:
      - {kind: cuda, count: 4, memory: 80GiB, flops: {bfloat16: 3e14, float32: 2e13}, memory_bandwidth: 2e12}
      - {kind: cuda, count: 4, name: V100}
    levels:
      - {size: 4, latency_us: 5, bandwidth: 3e11}
      - {size: 8, latency_us: 20, bandwidth: 2.5e10}

flow is what a single device gets of a port that is of several network cards.  efficiency is the share of `flops`, and
memory_efficiency that of `memory_bandwidth`, that kernels reach: 1 where these are given, as if they were measured.
flops is one rate, or a rate for each dtype; a dtype that is not listed gets the rate of `default` or, without one, the
lowest.  A device with a name that `presets` knows has the numbers of its data sheet.  What else a file leaves out gets
the defaults below.  They are rough, of the right order for a laptop, a server CPU or a
recent data-centre GPU; they decide only where nothing was measured.  memory is in bytes, flops in 1/s, bandwidths in
bytes/s; "80GiB", "1e12" and "25 GB" are numbers too.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal

import yaml  # type: ignore[import-untyped]
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from autopart.files.documents import PARSERS, parse_yaml, read_document
from autopart.files.limits import MAX_INTEGER, MAX_LEVELS, MAX_RANKS, MAX_RATES, SHOWN
from autopart.files.presets import DEVICES, NODES, several
from autopart.files.reading import Source, brief, listed
from autopart.files.validation import problems_of
from autopart.ir.cluster import Cluster, Device, Level, Link, check
from autopart.ir.errors import ClusterError
from autopart.launcher import launcher_variables

FORMS = (
    f'write "cpu:2", "cuda:8", a preset ({", ".join(NODES)}; "h200x8:4" is four nodes), the path of a .yaml, .toml or '
    ".json file, or pass an autopart.Cluster"
)

CPU_FLOPS_PER_CORE = 5e10  # per second, fp32, one core with 8-wide FMA under load
CPU_BANDWIDTH = 10**10  # bytes/s of memory, per process
CUDA_MEMORY = 80 * 2**30
CUDA_FLOPS = 10**14  # per second, bf16 at what models reach
CUDA_BANDWIDTH = 2 * 10**12
LOOPBACK = Link(latency_ns=20_000, bytes_per_s=2 * 10**9)  # TCP between processes of one host
NVLINK = Link(latency_ns=10_000, bytes_per_s=2 * 10**11)  # between the GPUs of one host
NETWORK = Link(latency_ns=30_000, bytes_per_s=2 * 10**10)  # between hosts
GPUS_PER_HOST = 8
_OTHER_NAMES = {"gpu": "cuda", "nvidia": "cuda", "mps": "cpu"}
"""What others call the kinds of devices, or use where there is neither."""
_DEFAULT = "default"  # in a table of rates: every dtype that it does not list

_AMOUNT = re.compile(r"\s*(\d{1,30}(?:\.\d{0,30})?(?:[eE][+-]?\d{1,2})?)\s*(?:([kKMGTP])(i?))?B?\s*$")
_SHORT = re.compile(rf"(cpu|cuda|{'|'.join(map(re.escape, NODES))})(?::(\d{{1,9}}))?$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Host:
    """What this machine has, for defaults.  memory_bytes: physical memory; cores: usable ones."""

    memory_bytes: int
    cores: int


def this_host() -> Host:
    """The machine this process runs on; 8 GiB when the system does not say."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        memory = 8 * 2**30
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Host(memory, cores)


def parse_cluster(
    what: Cluster | str | os.PathLike[str] | None,
    *,
    env: Mapping[str, str] = os.environ,
    cuda_devices: int = 0,
    cuda_memory: int | None = None,
    host: Host | None = None,
) -> Cluster:
    """A checked `Cluster` from any description.

    env: where a launcher says WORLD_SIZE and LOCAL_WORLD_SIZE; read only for None.  cuda_devices, cuda_memory: GPUs
    this process sees and bytes of one of them.  host: this machine, by default asked from the system.
    For None: CUDA when every local rank can have its own device, else CPU; one rank per device without a launcher.
    Raises ClusterError; for a file, with the path inside it of everything that is wrong.
    """
    facts = _Facts(host or this_host(), cuda_memory or CUDA_MEMORY)
    if isinstance(what, Cluster):
        return check(what)
    if what is None:
        return _from_launcher(env, cuda_devices, facts)
    if isinstance(what, str) and (short := _SHORT.match(what.strip())):
        name, count = short[1].lower(), int(short[2] or 1)
        return _preset(name, count) if name in NODES else _uniform(name, count, facts)
    if not isinstance(what, str | os.PathLike):
        raise ClusterError(f"a cluster cannot be read from {brief(what)}", fix=FORMS)
    if Path(what).suffix.lower() not in PARSERS:
        word = os.fspath(what).strip().partition(":")[0].lower()
        near = _OTHER_NAMES.get(word) or next(iter(get_close_matches(word, ("cpu", "cuda", *NODES), n=1)), "")
        why = f"did you mean {near!r}?" if near else ""
        raise ClusterError(f"cluster {brief(os.fspath(what))} is not understood", why=why, fix=FORMS)
    return _from_file(Path(what), facts)


@dataclass(frozen=True, slots=True)
class _Facts:
    host: Host
    cuda_memory: int

    def device(self, kind: str, local: int) -> Device:
        """Defaults of one of `local` devices that share this host."""
        if kind == "cuda":
            return Device("cuda", self.cuda_memory, CUDA_FLOPS, CUDA_BANDWIDTH)
        share = max(1, self.host.cores // local) * CPU_FLOPS_PER_CORE
        return Device("cpu", max(1, self.host.memory_bytes // local), int(share), CPU_BANDWIDTH)


def _preset(name: str, nodes: int) -> Cluster:
    _check_count(nodes, "nodes", MAX_RANKS // NODES[name].count)
    return check(several(NODES[name], nodes))


def _check_count(count: int, what: str, most: int) -> None:
    if not 1 <= count <= most:
        raise ClusterError(f"a cluster of {count} {what}", why=f"the count must be between 1 and {most}")


def _uniform(kind: str, count: int, facts: _Facts, local: int | None = None) -> Cluster:
    _check_count(count, "devices", MAX_RANKS)
    local = min(local or _local(kind, count), count)
    return check(Cluster((facts.device(kind, local),) * count, _levels(kind, count, local)))


def _local(kind: str, count: int) -> int:
    """Ranks of one host: all of them on CPU, `GPUS_PER_HOST` with CUDA."""
    return count if kind == "cpu" else min(count, GPUS_PER_HOST)


def _levels(kind: str, count: int, local: int) -> tuple[Level, ...]:
    inner = Level(local, NVLINK if kind == "cuda" else LOOPBACK)
    hosts = -(-count // local)
    return (inner,) if hosts == 1 else (inner, Level(hosts * local, NETWORK))


def _from_launcher(env: Mapping[str, str], cuda_devices: int, facts: _Facts) -> Cluster:
    env = {**env, **launcher_variables(env)}
    world = _count(env, "WORLD_SIZE", max(1, cuda_devices))
    local = min(world, _count(env, "LOCAL_WORLD_SIZE", world if cuda_devices < 1 else min(world, cuda_devices)))
    return _uniform("cuda" if cuda_devices >= local else "cpu", world, facts, local)


def _count(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    if not text:
        return default
    if not re.fullmatch(r"[1-9]\d{0,8}", text):
        raise ClusterError(f"{name} is {text!r}", why="the launcher must set it to a positive integer")
    return int(text)


def _amount(given: object) -> object:
    """A number, or a text such as "16GiB", "1e12" or "25 GB", as a whole number; anything else is left to pydantic."""
    if isinstance(given, float) and math.isfinite(given):
        return int(given)
    if not isinstance(given, str):
        return given
    found = _AMOUNT.match(given)
    if not found:
        raise ValueError(f'write a number such as 16000000000, "1.6e10" or "16GiB", not {brief(given)}')
    number, letter, binary = found.groups()
    power = "KMGTP".index(letter.upper()) + 1 if letter else 0
    return int(float(number) * (1024 if binary else 1000) ** power)


def _one_rate(given: object) -> object:
    return None if isinstance(given, Mapping) else given


def _many_rates(given: object) -> object:
    if given == {}:
        raise ValueError("name at least one dtype")
    return given if isinstance(given, Mapping) else {}


_THE_SAME_KEY = Field(alias="flops", max_length=MAX_RATES)
Share = Annotated[float, Field(gt=0, le=1)]
Amount = Annotated[int, BeforeValidator(_amount), Field(gt=0, le=MAX_INTEGER)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _DeviceEntry(_Entry):
    kind: Literal["cpu", "cuda"]
    count: Annotated[int, Field(ge=1, le=MAX_RANKS)] = 1
    name: Annotated[str, Field(max_length=100)] = ""
    memory: Amount | None = None
    flops: Annotated[Amount | None, BeforeValidator(_one_rate)] = None
    rates: Annotated[dict[str, Amount], BeforeValidator(_many_rates), _THE_SAME_KEY] = {}
    memory_bandwidth: Amount | None = None
    efficiency: Share | None = None
    memory_efficiency: Share | None = None


class _LevelEntry(_Entry):
    size: Annotated[int, Field(ge=1)]
    latency_us: Annotated[float, Field(ge=0, le=1e9)]
    bandwidth: Amount
    flow: Amount | None = None


class _ClusterFile(_Entry):
    devices: Annotated[list[_DeviceEntry], Field(min_length=1, max_length=MAX_RANKS)]
    levels: Annotated[list[_LevelEntry] | None, Field(max_length=MAX_LEVELS)] = None


def _from_file(path: Path, facts: _Facts) -> Cluster:
    source = os.fspath(path)
    document = read_document(source, path.suffix.lower(), ClusterError, _SCHEMA)
    try:
        described = _ClusterFile.model_validate(document)
    except ValidationError as error:
        problems = [(path or "the file", message) for path, message in problems_of(error)]
        why = listed(f"{path}: {message}" for path, message in problems)
        where = ", ".join(path for path, _ in problems[:SHOWN])
        raise ClusterError(f"{source} describes no cluster", where=where, why=why, fix=_SCHEMA) from None
    try:
        return check(_built(described, facts))
    except ClusterError as error:
        raise ClusterError(f"{source}: {error.what}", where=error.where, why=error.why, fix=error.fix) from error


def _built(described: _ClusterFile, facts: _Facts) -> Cluster:
    count = sum(entry.count for entry in described.devices)
    kind = described.devices[0].kind
    if count > MAX_RANKS:
        raise ClusterError(f"{count} devices", where="devices", why=f"at most {MAX_RANKS} are supported")
    levels = tuple(
        Level(entry.size, Link(round(entry.latency_us * 1000), entry.bandwidth, entry.flow or 0))
        for entry in described.levels or ()
    )
    local = levels[0].size if levels else _local(kind, count)
    devices: list[Device] = []
    for entry in described.devices:
        known = DEVICES.get(entry.name)
        base = known if known and known.kind == entry.kind else facts.device(entry.kind, min(local, count))
        devices += [_device(entry, base)] * entry.count
    return Cluster(tuple(devices), levels or _levels(kind, count, local))


def _device(entry: _DeviceEntry, base: Device) -> Device:
    """What the entry says, else what `base` has."""
    other, rates = entry.flops or base.flops_per_s, () if entry.flops else base.rates
    if entry.rates:
        other = entry.rates.get(_DEFAULT) or min(entry.rates.values())
        rates = tuple((dtype, rate) for dtype, rate in entry.rates.items() if dtype != _DEFAULT)
    memory, bandwidth = entry.memory or base.memory_bytes, entry.memory_bandwidth or base.mem_bytes_per_s
    given = entry.flops or entry.rates  # of which nobody says that they are peaks
    reached = entry.efficiency or (1.0 if given else base.efficiency)
    memory_reached = entry.memory_efficiency or (1.0 if entry.memory_bandwidth else base.memory_efficiency)
    return Device(entry.kind, memory, other, bandwidth, entry.name, rates, reached, memory_reached)


def cluster_to_dict(cluster: Cluster) -> dict[str, object]:
    """The content of a file that `parse_cluster` reads as this cluster."""
    devices = []
    for device, same in itertools.groupby(cluster.devices):
        entry: dict[str, object] = {"kind": device.kind, "count": len(list(same))}
        if device.name:
            entry["name"] = device.name
        entry["memory"] = device.memory_bytes
        entry["flops"] = {_DEFAULT: device.flops_per_s, **dict(device.rates)} if device.rates else device.flops_per_s
        entry["memory_bandwidth"] = device.mem_bytes_per_s
        for name in ("efficiency", "memory_efficiency"):
            if getattr(device, name) != 1.0:
                entry[name] = getattr(device, name)
        devices.append(entry)
    levels: list[dict[str, object]] = []
    for level in cluster.levels:
        link = level.link
        levels.append({"size": level.size, "latency_us": link.latency_ns / 1000, "bandwidth": link.bytes_per_s})
        if link.flow_bytes_per_s:
            levels[-1]["flow"] = link.flow_bytes_per_s
    return {"devices": devices, "levels": levels}


def cluster_to_yaml(cluster: Cluster) -> str:
    """The file that `parse_cluster` reads as this cluster."""
    lines = []
    for part, entries in cluster_to_dict(cluster).items():
        assert isinstance(entries, list)
        lines += [f"{part}:", *map(_yaml_item, entries)]
    return "\n".join(lines) + "\n"


def _yaml_item(entry: Mapping[str, object]) -> str:
    text = yaml.safe_dump(entry, default_flow_style=True, sort_keys=False, width=math.inf)
    return f"  - {text.strip()}"


def save_cluster(cluster: Cluster, path: str | os.PathLike[str]) -> None:
    """Write a cluster as YAML.  Raises ClusterError when the file cannot be written, or would not be read again."""
    require_yaml(path)
    text = cluster_to_yaml(check(cluster))
    fix = "let equal devices be neighbours, so that they share a line, or write JSON"
    parse_yaml(text, Source(f"{os.fspath(path)}, to be written,", ClusterError, fix))
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ClusterError(f"cannot write {os.fspath(path)}", why=error.strerror or str(error)) from error


def require_yaml(path: str | os.PathLike[str]) -> None:
    """Raises ClusterError for a file name that is not one of YAML."""
    if PARSERS.get(Path(path).suffix.lower()) is not parse_yaml:
        raise ClusterError(f"{os.fspath(path)!r} is not the name of a YAML file", fix="let it end in .yaml")


_SCHEMA = (
    "devices: list of {kind, count, name, memory, flops, memory_bandwidth, efficiency, memory_efficiency}; "
    "levels: list of {size, latency_us, bandwidth, flow}, innermost first"
)

"""Cluster descriptions: a short string, a file, or what the launcher and the visible devices say.

    "cpu:2"   "cpu"   "cuda:8"   "h200x8"   "p3.16xlarge:2" (nodes)   "cluster.yaml"   None

docs/planning.md shows a file; `ir.cluster` says what the bandwidth of a level is.  memory is in bytes, flops in 1/s,
bandwidths in bytes/s; "80GiB", "1e12" and "25 GB" are numbers too.  flops: one rate, or a rate for each dtype; a dtype
that is not listed gets the rate of `default`, else the lowest.  efficiency, memory_efficiency: the shares of `flops`
and of `memory_bandwidth` that kernels reach; 1 if the file gives these rates.  What a device without a name leaves out
gets the defaults below, which are rough, of the order of a server CPU or a recent data-centre GPU.  What hosts spend
besides (`ir.cluster.HostCosts`) is in microseconds.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import yaml  # type: ignore[import-untyped]
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from autopart.files.documents import PARSERS, read_document
from autopart.files.limits import MAX_INTEGER, MAX_LEVELS, MAX_RANKS, MAX_RATES
from autopart.files.presets import DEVICES, NODES, several
from autopart.files.reading import brief, named, validated
from autopart.ir.cluster import DEVICE_KINDS, UNMEASURED, Cluster, Device, HostCosts, Level, Link, check
from autopart.ir.errors import WRITABLE, ClusterError
from autopart.launcher import launcher_variables

FORMS = (
    f'write "cpu:2", "cuda:8", a preset ({", ".join(NODES)}; "h200x8:4" is four nodes), the path of a .yaml, .toml or '
    ".json file, or pass an autopart.Cluster"
)

CPU_FLOPS_PER_CORE = 5e10  # per second, fp32, one core with 8-wide FMA under load
CPU_BANDWIDTH = 10**10  # bytes/s of memory, per process
NETWORK = Link(latency_ns=30_000, bytes_per_s=2 * 10**10)  # between hosts
_OTHER_NAMES = {"gpu": "did you mean 'cuda'?", "nvidia": "did you mean 'cuda'?"}
_OTHER_NAMES |= dict.fromkeys(("mps", "xpu", "tpu", "xla", "rocm", "hip"), "devices are 'cpu' or 'cuda'")
"""What to say of other names for kinds of devices, and of kinds that are not supported."""
_DEFAULT = "default"  # in a table of rates: every dtype that it does not list

_AMOUNT = re.compile(r"\s*(\d{1,30}(?:\.\d{0,30})?(?:[eE][+-]?\d{1,2})?)\s*(?:([kKMGTP])(i?))?B?\s*$")
_SHORT = re.compile(r"([\w.-]{1,100})(?::(\d{1,9}))?$")


@dataclass(frozen=True, slots=True)
class Host:
    """This machine, for defaults.  memory_bytes: physical memory; cores: usable ones."""

    memory_bytes: int
    cores: int

    def device(self, kind: str, local: int) -> Device:
        """Return the defaults of one of `local` devices that share this host."""
        flops = max(1, self.cores // local) * CPU_FLOPS_PER_CORE
        share = max(1, self.memory_bytes // local), int(flops), CPU_BANDWIDTH
        device = Device(kind, *(DEVICE_KINDS[kind].own or share))
        return replace(device, reserve_bytes=DEVICE_KINDS[kind].reserve(device.memory_bytes))


def this_host() -> Host:
    """Return the machine this process runs on; 8 GiB if its memory is unknown."""
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
    host: Host | None = None,
) -> Cluster:
    """Return a checked `Cluster` from any description.

    None: CUDA if every local rank can have its own device, else CPU; one rank for each device without a launcher.  env:
    variables of the launcher, read only for None.  cuda_devices: GPUs that this process sees.  host: this machine, by
    default as the system describes it.  Raises ClusterError; for a file, with everything that is wrong and its path.
    """
    host = host or this_host()
    if isinstance(what, Cluster):
        return check(what)
    if what is None:
        return _from_launcher(env, cuda_devices, host)
    short = _SHORT.match(what.strip()) if isinstance(what, str) else None
    if short and (name := short[1].lower()) in {*DEVICE_KINDS, *NODES}:
        count = int(short[2] or 1)
        if name in DEVICE_KINDS:
            return _uniform(name, count, host)
        _check_count(count, "nodes", MAX_RANKS // NODES[name].count)
        return check(several(NODES[name], count))
    if not isinstance(what, str | os.PathLike):
        raise ClusterError(f"a cluster cannot be read from {brief(what)}", fix=FORMS)
    path = Path(what)
    if path.suffix.lower() not in PARSERS:
        word = os.fspath(what).strip().partition(":")[0].lower()
        why = _OTHER_NAMES.get(word) or _near(word)
        raise ClusterError(f"cluster {brief(os.fspath(what))} is not understood", why=why, fix=FORMS)
    with named(path, ClusterError, _SCHEMA):
        described = validated("describes no cluster", _ClusterFile.model_validate, read_document(path))
    try:
        return check(_built(described, host))
    except ClusterError as error:
        raise ClusterError(f"{path}: {error.what}", where=error.where, why=error.why, fix=error.fix) from error


def _near(word: str) -> str:
    """Return a hint for a word that does not name a cluster."""
    near = next(iter(get_close_matches(word, (*DEVICE_KINDS, *NODES), n=1)), "")
    if near in NODES and (size := re.fullmatch(r"([a-z]+\d+)x(\d{1,6})", word)) and near.startswith(size[1]):
        return f"a preset is a whole node, such as {near!r}; `autopart cluster show {near} --out mine.yaml` writes a \
file, where the count and the sizes of the levels can be changed"
    return f"did you mean {near!r}?" if near else ""


def _check_count(count: int, what: str, most: int) -> None:
    if not 1 <= count <= most:
        raise ClusterError(
            f"a cluster of {count} {what}",
            why=f"the count must be between 1 and {most}",
            fix='"cuda:8" is eight devices; one is "cuda:1"' if count == 0 else "",
        )


def _uniform(kind: str, count: int, host: Host, local: int | None = None) -> Cluster:
    _check_count(count, "devices", MAX_RANKS)
    local = min(local or _local(kind, count), count)
    return check(Cluster((host.device(kind, local),) * count, _levels(kind, count, local)))


def _local(kind: str, count: int) -> int:
    """Return the default number of ranks of a host."""
    return min(count, DEVICE_KINDS[kind].of_host or count)


def link_within_host(kind: str) -> Link:
    """Return the link between devices of one host, where none was measured."""
    return Link(*DEVICE_KINDS[kind].link)


def _levels(kind: str, count: int, local: int) -> tuple[Level, ...]:
    inner = Level(local, link_within_host(kind))
    hosts = -(-count // local)
    return (inner,) if hosts == 1 else (inner, Level(hosts * local, NETWORK))


def _from_launcher(env: Mapping[str, str], cuda_devices: int, host: Host) -> Cluster:
    env = {**env, **launcher_variables(env)}
    world = _count(env, "WORLD_SIZE", max(1, cuda_devices))
    local = min(world, _count(env, "LOCAL_WORLD_SIZE", world if cuda_devices < 1 else min(world, cuda_devices)))
    return _uniform("cuda" if cuda_devices >= local else "cpu", world, host, local)


def _count(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    if not text:
        return default
    if not re.fullmatch(r"[1-9]\d{0,8}", text):
        raise ClusterError(f"{name} is {text!r}", why="the launcher must set it to a positive integer")
    return int(text)


def _amount(given: object) -> object:
    """Convert a number, or a text such as "16GiB", "1e12" or "25 GB", to an integer; leave other values to pydantic."""
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


def _many_rates(given: object) -> object:
    if given == {}:
        raise ValueError("name at least one dtype")
    return given if isinstance(given, Mapping) else {}


_HOST = ("compute", "message", "sum", "step")
"""What a host spends time on."""
_FLOPS_KEY = Field(alias="flops", max_length=MAX_RATES)
Share = Annotated[float, Field(gt=0, le=1)]
Amount = Annotated[int, BeforeValidator(_amount), Field(gt=0, le=MAX_INTEGER)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _known_kind(kind: str) -> str:
    if kind not in DEVICE_KINDS:
        raise ValueError("it should be " + " or ".join(map(repr, DEVICE_KINDS)))
    return kind


class _DeviceEntry(_Entry):
    kind: Annotated[str, AfterValidator(_known_kind)]
    count: Annotated[int, Field(ge=1, le=MAX_RANKS)] = 1
    name: Annotated[str, Field(max_length=100)] = ""
    memory: Amount | None = None
    reserve: Annotated[int | None, BeforeValidator(_amount), Field(ge=0, le=MAX_INTEGER)] = None
    flops: Annotated[Amount | None, BeforeValidator(lambda given: None if isinstance(given, Mapping) else given)] = None
    rates: Annotated[dict[str, Amount], BeforeValidator(_many_rates), _FLOPS_KEY] = {}
    memory_bandwidth: Amount | None = None
    efficiency: Share | None = None
    memory_efficiency: Share | None = None
    price_per_hour: Annotated[float, Field(ge=0, le=1e9)] = 0.0


class _LevelEntry(_Entry):
    size: (
        Annotated[int, Field(ge=1)]
        | Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1, max_length=MAX_RANKS)]
    )
    latency_us: Annotated[float, Field(ge=0, le=1e9)]
    bandwidth: Amount
    flow: Amount | None = None


Microseconds = Annotated[float, Field(ge=0, le=1e9)]


class _HostEntry(_Entry):
    compute_us: Microseconds = 0.0
    message_us: Microseconds = 0.0
    sum_us: Microseconds = 0.0
    step_us: Microseconds = 0.0


class _ClusterFile(_Entry):
    devices: Annotated[list[_DeviceEntry], Field(min_length=1, max_length=MAX_RANKS)]
    levels: Annotated[list[_LevelEntry] | None, Field(max_length=MAX_LEVELS)] = None
    host: _HostEntry = _HostEntry()


def _built(described: _ClusterFile, host: Host) -> Cluster:
    count = sum(entry.count for entry in described.devices)
    kind = described.devices[0].kind
    if count > MAX_RANKS:
        raise ClusterError(f"{count} devices", where="devices", why=f"at most {MAX_RANKS} are supported")
    levels = tuple(
        _level(entry.size, Link(round(entry.latency_us * 1000), entry.bandwidth, entry.flow or 0))
        for entry in described.levels or ()
    )
    local = levels[0].size if levels else _local(kind, count)
    devices: list[Device] = []
    for place, entry in enumerate(described.devices):
        known = DEVICES.get(entry.name)
        if known is None or known.kind != entry.kind:
            _require_figures(entry, f"devices[{place}]")
            known = host.device(entry.kind, min(local, count))
        devices += [_device(entry, known)] * entry.count
    spent = HostCosts(**{f"{what}_ns": round(getattr(described.host, f"{what}_us") * 1000) for what in _HOST})
    return Cluster(tuple(devices), levels or _levels(kind, count, local), spent)


def _level(size: int | list[int], link: Link) -> Level:
    """Return a level.  size: of each group, or the sizes of all."""
    if isinstance(size, int):
        return Level(size, link)
    return Level(max(size), link, tuple(size) if len(set(size)) > 1 else ())


def _require_figures(entry: _DeviceEntry, where: str) -> None:
    """Raise ClusterError for a name without a data sheet, unless the entry gives all that one would."""
    figures = {"memory": entry.memory, "flops": entry.flops or entry.rates, "memory_bandwidth": entry.memory_bandwidth}
    missing = [name for name, given in figures.items() if not given]
    if not entry.name or not missing:
        return
    sheets = {name.lower(): name for name, device in DEVICES.items() if device.kind == entry.kind}
    near = get_close_matches(entry.name.lower(), sheets, n=3, cutoff=0.5)
    known = f"CUDA devices with a data sheet are {', '.join(DEVICES)}"
    raise ClusterError(
        f"no data sheet of a {entry.kind} device is known under the name {brief(entry.name)}",
        where=where,
        why=f"did you mean {' or '.join(sheets[name] for name in near)}?" if near else known,
        fix=f"add {', '.join(missing)} of the device, or write a name that is known; without one, rough defaults count",
    )


def _device(entry: _DeviceEntry, base: Device) -> Device:
    """Return the device of an entry; base: for what the entry leaves out."""
    other, rates = entry.flops or base.flops_per_s, () if entry.flops else base.rates
    if entry.rates:
        other = entry.rates.get(_DEFAULT) or min(entry.rates.values())
        rates = tuple((dtype, rate) for dtype, rate in entry.rates.items() if dtype != _DEFAULT)
    memory, bandwidth = entry.memory or base.memory_bytes, entry.memory_bandwidth or base.mem_bytes_per_s
    given = entry.flops or entry.rates  # taken as rates that are reached
    reached = entry.efficiency or (1.0 if given else base.efficiency)
    memory_reached = entry.memory_efficiency or (1.0 if entry.memory_bandwidth else base.memory_efficiency)
    reserve = DEVICE_KINDS[entry.kind].reserve(memory) if entry.memory else base.reserve_bytes
    reserve = reserve if entry.reserve is None else entry.reserve
    speeds = other, bandwidth, entry.name, rates, reached, memory_reached
    return Device(entry.kind, memory, *speeds, reserve, entry.price_per_hour)


def cluster_to_dict(cluster: Cluster) -> dict[str, Any]:
    """Return the content of a file that `parse_cluster` reads as this cluster."""
    devices = []
    for device, same in itertools.groupby(cluster.devices):
        entry = {
            "kind": device.kind,
            "count": len(list(same)),
            "name": device.name or None,
            "memory": device.memory_bytes,
            "reserve": device.reserve_bytes,
            "flops": {_DEFAULT: device.flops_per_s, **dict(device.rates)} if device.rates else device.flops_per_s,
            "memory_bandwidth": device.mem_bytes_per_s,
            "efficiency": device.efficiency if device.efficiency != 1.0 else None,
            "memory_efficiency": device.memory_efficiency if device.memory_efficiency != 1.0 else None,
            "price_per_hour": device.price_per_hour or None,
        }
        devices.append({name: value for name, value in entry.items() if value is not None})
    levels = []
    for level in cluster.levels:
        link = level.link
        flow = {"flow": link.flow_bytes_per_s} if link.flow_bytes_per_s else {}
        size = list(level.groups) or level.size
        levels.append({"size": size, "latency_us": link.latency_ns / 1000, "bandwidth": link.bytes_per_s, **flow})
    host = {f"{what}_us": getattr(cluster.host, f"{what}_ns") / 1000 for what in _HOST}
    return {"devices": devices, "levels": levels} | ({"host": host} if cluster.host != UNMEASURED else {})


def cluster_to_yaml(cluster: Cluster) -> str:
    """Return the text of a file that `parse_cluster` reads as this cluster, with a device or a level a line."""

    def line(entry: object) -> str:
        return str(yaml.safe_dump(entry, default_flow_style=True, sort_keys=False, width=math.inf)).strip()

    lines = []
    for section, entries in cluster_to_dict(cluster).items():
        if isinstance(entries, list):
            lines += [f"{section}:", *(f"  - {line(entry)}" for entry in entries)]
        else:
            lines.append(f"{section}: {line(entries)}")
    return "\n".join(lines) + "\n"


def save_cluster(cluster: Cluster, path: str | os.PathLike[str]) -> None:
    """Write a cluster as YAML.  Raises ClusterError if the file cannot be written."""
    require_yaml(path)
    try:
        Path(path).write_text(cluster_to_yaml(check(cluster)), encoding="utf-8")
    except OSError as error:
        raise ClusterError(f"cannot write {os.fspath(path)}", why=error.strerror or str(error), fix=WRITABLE) from error


def require_yaml(path: str | os.PathLike[str]) -> None:
    """Raise ClusterError if the file name does not end in .yaml or .yml."""
    if Path(path).suffix.lower() not in (".yaml", ".yml"):
        raise ClusterError(f"{os.fspath(path)!r} is not the name of a YAML file", fix="let it end in .yaml")


_SCHEMA = (
    "devices: list of {kind, count, name, memory, flops, memory_bandwidth, efficiency, memory_efficiency, "
    "price_per_hour}; "
    "levels: list of {size, latency_us, bandwidth, flow}, innermost first; "
    "host: {compute_us, message_us, sum_us, step_us}"
)

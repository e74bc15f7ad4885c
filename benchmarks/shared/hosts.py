"""Two hosts on one machine: network namespaces joined by a rate-limited virtual link, with torchrun in both.

Needs root and the tools `ip` and `tc` (Debian's iproute2).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAYLOAD = 1448 / 1514
"""Share of the transmitted bytes that is payload, without TCP headers."""
LATENCY_NS = 200_000
"""Latency of a small Gloo message over the virtual link."""
PORT = 29511
LIMIT_S = 300.0


@dataclass(frozen=True)
class Hosts:
    """Two network namespaces. addresses[i], cards[i]: of the network card in names[i]."""

    names: tuple[str, str]
    cards: tuple[str, str]
    addresses: tuple[str, str] = ("10.77.0.1", "10.77.0.2")


def _run(command: str) -> None:
    """Run a command. Raises OSError with its output."""
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{command}: {(done.stderr or done.stdout).strip()}")


@contextmanager
def two_hosts(mbit: int, *, whole: bool = False) -> Iterator[Hosts]:
    """Create two namespaces whose cards send at most `mbit` Mbit/s each, and remove them at the end.

    whole: the system passes 64 KiB at once to the cards, so that sending takes few CPU seconds; otherwise packet by
    packet, which is limited more evenly. Raises OSError without permission or tools.
    """
    tag = f"ap{os.getpid()}"
    hosts = Hosts((f"{tag}a", f"{tag}b"), (f"{tag}va", f"{tag}vb"))
    try:
        for name in hosts.names:
            _run(f"ip netns add {name}")
        _run(f"ip link add {hosts.cards[0]} type veth peer name {hosts.cards[1]}")
        for name, card, address in zip(hosts.names, hosts.cards, hosts.addresses, strict=True):
            inside = f"ip netns exec {name}"
            _run(f"ip link set {card} netns {name}")
            _run(f"{inside} ip link set lo up")
            if not whole:
                _run(f"{inside} ip link set {card} gso_max_size 1514 gso_max_segs 1")
            _run(f"{inside} ip addr add {address}/24 dev {card}")
            _run(f"{inside} ip link set {card} up")
            # A bucket of a few packets, because a burst is not limited.
            burst = "128kb" if whole else "8kb"
            _run(f"{inside} tc qdisc add dev {card} root tbf rate {mbit}mbit burst {burst} limit 4mb")
        yield hosts
    finally:
        for name in hosts.names:  # removes the cards too
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", hosts.cards[0]], capture_output=True, check=False)


def why_not() -> str:
    """Return why two hosts cannot be created here, or an empty string."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (iproute2)"
    try:
        with two_hosts(100):
            return ""
    except OSError as error:
        return str(error)


def on_both(module: str, given: Sequence[str], mbit: int, *, ranks: int = 1, whole: bool = False) -> Any:
    """Run `module given --rank-of FILE` by torchrun on both hosts, with `ranks` on each, and return rank 0's result.

    The module writes its result by `leave`. Raises RuntimeError with the end of the output if it fails.
    """
    with two_hosts(mbit, whole=whole) as hosts, tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        logs = [Path(folder) / f"log{number}" for number in range(2)]
        arguments = ["-m", module, *given, "--rank-of", str(out)]
        processes = [_start(hosts, number, log, arguments, ranks) for number, log in enumerate(logs)]
        try:
            codes = [process.wait(LIMIT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()  # torchrun's ranks end with it
                process.wait()
        if any(codes):
            raise RuntimeError("\n".join(log.read_text()[-3000:] for log in logs))
        return json.loads(out.read_text())


def leave(found: Any, out: Path) -> None:
    """Write the result of rank 0 to the file that `on_both` reads."""
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(found))


def _start(hosts: Hosts, number: int, log: Path, arguments: Sequence[str], ranks: int) -> subprocess.Popen[bytes]:
    nodes = f"--nnodes 2 --node-rank {number} --nproc-per-node {ranks} --master-addr {hosts.addresses[0]}".split()
    torchrun = [sys.executable, "-m", "torch.distributed.run", *nodes, "--master-port", str(PORT)]
    command = ["ip", "netns", "exec", hosts.names[number], *torchrun, *arguments]
    env = os.environ | {"GLOO_SOCKET_IFNAME": hosts.cards[number], "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    with log.open("w") as out:
        return subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)

"""Are two hosts behind a slow link planned for, exact, and as fast as predicted?

Two network namespaces stand for the hosts, joined by a pair of virtual cards whose rate `tc` limits; torchrun starts
one rank in each.  GPT-2 of 2 layers in two stages, 4 micro-batches, 1F1B; every gradient is compared with one process,
then steps are measured and simulated, as `prediction.py` does, with the link that the cluster describes: the limited
rate, less the headers of TCP (1448 of 1514 bytes are ours).  Needs root and `ip` and `tc` (Debian's iproute2).

    python benchmarks/two_hosts.py            about 2 minutes on 2 cores; writes results/two_hosts.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import spread, write
from prediction import predicted
from trained import Trained, gpt2, tokens

import autopart
from autopart.files.clusters import LOOPBACK, parse_cluster
from autopart.ir.cluster import Cluster, Level, Link

MODEL = Trained(gpt2(512, 256, 2), tokens(512, 16, 96), "transformer.h", 2)
"""So shallow that messages take most of the step: the link is what is asked about."""
CUT, MICROS = "transformer.h.1", 4
RATES = (10, 30)
"""Of the link, in Mbit/s."""
LATENCY_NS = 200_000
"""One small message of Gloo over such a pair of cards."""
PAYLOAD = 1448 / 1514
PORT = 29511
LIMIT_S = 300.0


@dataclass(frozen=True)
class Hosts:
    """Two network namespaces; addresses[i], cards[i]: of the card in names[i]."""

    names: tuple[str, str]
    cards: tuple[str, str]
    addresses: tuple[str, str] = ("10.77.0.1", "10.77.0.2")


def _run(command: str) -> None:
    """Raises OSError with what the command says."""
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{command}: {(done.stderr or done.stdout).strip()}")


@contextmanager
def two_hosts(mbit: int) -> Iterator[Hosts]:
    """Two namespaces whose cards send at most `mbit` Mbit/s each; taken down at the end.  Raises OSError where this
    is not permitted or the tools are missing."""
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
            _run(f"{inside} ip link set {card} gso_max_size 1514 gso_max_segs 1")  # as a wire: packet by packet
            _run(f"{inside} ip addr add {address}/24 dev {card}")
            _run(f"{inside} ip link set {card} up")
            # A bucket of a few packets: what it lets through at once is not limited.
            _run(f"{inside} tc qdisc add dev {card} root tbf rate {mbit}mbit burst 8kb limit 4mb")
        yield hosts
    finally:
        for name in hosts.names:  # the cards go with their namespaces
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", hosts.cards[0]], capture_output=True, check=False)


def why_not() -> str:
    """Why there can be no two hosts here; empty where there can."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (iproute2)"
    try:
        with two_hosts(100):
            return ""
    except OSError as error:
        return str(error)


def cluster_of(mbit: int) -> Cluster:
    """Two hosts of one CPU rank, and the link between them."""
    between = Link(LATENCY_NS, int(mbit * 125_000 * PAYLOAD))
    return Cluster(parse_cluster("cpu:2").devices, (Level(1, LOOPBACK), Level(2, between)))


def on_rank(mbit: int, rounds: int) -> dict[str, Any]:
    """One rank: a step compared with one process, then measured and predicted steps."""
    torch.set_num_threads(1)
    case, cluster = MODEL, cluster_of(mbit)
    options: dict[str, Any] = {"stages": 2, "cuts": (CUT,), "micro_batches": MICROS, "schedule": "1f1b"}
    options |= {"recompute": "off", "optimizer": "sgd"}
    checked = autopart.verify(case.model(), cluster, sample=case.batch(), costs="analytic", **options)
    batch = case.batch()
    with autopart.compile(case.model(), cluster, sample=batch, costs="measured", **options) as pipe:
        seconds, forecasts = [], [predicted(pipe, batch)]
        for number in range(2 + rounds):
            pipe.zero_grad()
            dist.barrier()
            began = time.perf_counter()
            pipe.step(batch)
            dist.barrier()
            if number >= 2:
                seconds.append(time.perf_counter() - began)
            if number == rounds // 2:
                forecasts.append(predicted(pipe, batch))
        forecasts.append(predicted(pipe, batch))
        pipe.close(sync=False)
    return {
        "exact": checked.ok, "largest_gradient_error": checked.largest, "seconds": seconds,
        "predicted": statistics.median(forecasts),
    }  # fmt: skip


def both_ranks(mbit: int, rounds: int) -> dict[str, Any]:
    """torchrun on both hosts; what rank 0 found.  Raises RuntimeError with the end of the output when it fails."""
    with two_hosts(mbit) as hosts, tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        logs = [Path(folder) / f"log{number}" for number in range(2)]
        processes = [_start(hosts, number, logs[number], out, mbit, rounds) for number in range(2)]
        try:
            codes = [process.wait(LIMIT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()  # torchrun's ranks end with it
                process.wait()
        if any(codes):
            raise RuntimeError("\n".join(log.read_text()[-3000:] for log in logs))
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def _start(hosts: Hosts, number: int, log: Path, out: Path, mbit: int, rounds: int) -> subprocess.Popen[bytes]:
    script = f"--rank-of {out} --rates {mbit} --rounds {rounds}".split()
    nodes = f"--nnodes 2 --node-rank {number} --nproc-per-node 1 --master-addr {hosts.addresses[0]}".split()
    torchrun = [sys.executable, "-m", "torch.distributed.run", *nodes, "--master-port", str(PORT)]
    command = ["ip", "netns", "exec", hosts.names[number], *torchrun, __file__, *script]
    env = os.environ | {"GLOO_SOCKET_IFNAME": hosts.cards[number], "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    with log.open("w") as said:
        return subprocess.Popen(command, env=env, stdout=said, stderr=subprocess.STDOUT)


def compared(rates: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """A row for each rate."""
    rows = []
    for mbit in rates:
        found = both_ranks(mbit, rounds)
        took = spread(found.pop("seconds"))
        error = found["predicted"] / took.median - 1
        rows.append({"mbit": mbit, "cluster": cluster_of(mbit), "measured": took, "error": error, **found})
        print(f"{mbit:5} Mbit/s  {took}  predicted {found['predicted']:.4f} s  {error:+.1%}  exact: {found['exact']}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=int, nargs="+", default=list(RATES), help="Mbit/s")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of:
        found = on_rank(given.rates[0], given.rounds)
        if os.environ["RANK"] == "0":
            given.rank_of.write_text(json.dumps(found))
        return
    if reason := why_not():
        raise SystemExit(f"no two hosts here: {reason}")
    rows = compared(given.rates, given.rounds)
    claims = {
        "exact": all(row["exact"] for row in rows),
        "predicted within 15 %": all(abs(row["error"]) <= 0.15 for row in rows),
    }
    print("written to", write("two_hosts", {"rows": rows, "claims": claims}).name)


if __name__ == "__main__":
    main()

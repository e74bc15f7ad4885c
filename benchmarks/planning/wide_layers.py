"""Four ranks for a model with wide layers: tensor parallelism, stages or replicas?  Measured beside simulated.

A decoder of wide layers and few tokens (`--width`, `--layers`, `--rows`, `--tokens`), AdamW, fp32; 4 Gloo ranks over
loopback, one thread each.  Two stages of two ranks that compute together, four stages and four replicas, each with the
cuts and the schedule that the planner gives it; their steps alternate in one run.  Stages get two micro-batches
(`--micro-batches`): few for four of them, which is where ranks that compute together are for.  Ratios are taken pair by
pair.

How the simulator is told about the machine: on fewer than 4 cores a control group keeps each rank to its part of a core
(`shared/quotas.py`), while the cluster is measured as in every step.  Then `autopart cluster detect` measures what four
ranks reach, all at once: rates of products and of memory, latency and bytes of a link.  Costs are analytic, from these:
measured alone, an op shorter than a period of the control group would run at the pace of a whole core.

Messages between stages are counted, and compared with those of the program; exchanges of ranks that compute together,
with those that follow from the states of values (`passes/shards/states.py`).

    python -m benchmarks.planning.wide_layers          about 4 minutes on 2 cores; writes results/wide_layers.json
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import autopart
from autopart.costs.detect import probe
from autopart.ir.actions import SEND
from autopart.passes.shards.calls import calls_of
from autopart.passes.shards.choice import choose
from autopart.passes.shards.states import WHOLE, State, passes
from autopart.passes.shards.strategies import CLASSES, ROWS
from autopart.runtime.stages.shard_group import ShardGroup
from benchmarks.shared.alternation import alternate
from benchmarks.shared.architectures import seeded
from benchmarks.shared.bench_models import training_step
from benchmarks.shared.common import ratio, spread, write
from benchmarks.shared.quotas import enter, parts_of_cores, share_of, why_not

RANKS, WORDS = 4, 512
TOGETHER = "2 stages of 2 ranks together"
VARIANTS: dict[str, dict[str, Any]] = {
    TOGETHER: {"tensor_parallel": 2, "stages": 2, "replicas": 1},
    "4 stages": {"stages": 4, "replicas": 1},
    "4 replicas": {"stages": 1, "replicas": 4, "micro_batches": 1},
}
NEAR = 0.03
"""Steps that are simulated nearer to each other than this have no order."""


class Decoder(nn.Module):
    """Blocks of causal attention and an MLP, as wide as they are asked for."""

    def __init__(self, width: int, layers: int, tokens: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Parameter(torch.randn(tokens, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = 8
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        parts = [part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)]
        seen = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def cluster_of(folders: list[Path]) -> autopart.Cluster:
    """Measure the cluster on one of its ranks."""
    _begin(folders)
    return probe("cpu", (RANKS,))


def _begin(folders: list[Path]) -> None:
    if folders:
        enter(folders[int(os.environ["RANK"])])
    torch.set_num_threads(1)


def measure(
    folders: list[Path], cluster: autopart.Cluster, sizes: dict[str, int], rounds: int, warmup: int
) -> dict[str, Any]:
    """Run every variant once per round on one rank; return seconds, and what was counted in one more step of each."""
    _begin(folders)
    ids = torch.randint(0, WORDS, (sizes["rows"], sizes["tokens"]), generator=torch.Generator().manual_seed(1))
    batch = ids, ids.roll(-1, 1)
    model = partial(Decoder, sizes["width"], sizes["layers"], sizes["tokens"])
    common: dict[str, Any] = {
        "micro_batches": sizes["micro_batches"], "sample": batch, "costs": "analytic", "optimizer": "adamw",
        "recompute": "off", "zero": 0, "transport": "gloo",
    }  # fmt: skip
    pipes = {n: autopart.compile(seeded(model, seed=0), cluster, **{**common, **own}) for n, own in VARIANTS.items()}
    steps = {n: training_step(partial(pipe.step, *batch), pipe.parameters()) for n, pipe in pipes.items()}
    measured = alternate(steps, rounds, warmup)
    losses = {name: [float(loss) for loss in found] for name, found in measured.results.items()}
    return {
        "seconds": measured.seconds,
        "losses": losses,
        "plans": {name: pipe.plan for name, pipe in pipes.items()},
        "messages": {name: counted(steps[name], pipe) for name, pipe in pipes.items()},
    }


def counted(step: Callable[[], Any], pipe: autopart.Pipe) -> dict[str, int]:
    """Return the messages that all ranks sent in one step, those that its program has, and the exchanges of ranks that
    compute together."""
    own: Counter[str] = Counter()
    with pipe.traced() as spans, counting(own):
        step()
    program = pipe.program
    for span in spans:
        if span.action.is_a.role == SEND:
            own["messages"] += sum(each.src_rank == pipe.rank for each in program.transfers(span.action))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, dict(own))
    sends = [action for action in program.order if action.is_a.role == SEND]
    return {
        "messages": sum(each.get("messages", 0) for each in every),
        "messages of the program": sum(len(list(program.transfers(action))) for action in sends),
        "exchanges": sum(each.get("exchanges", 0) for each in every),
        "exchanges by states": len(pipe.plan.micro_rows) * exchanges_by_states(pipe),
    }


def exchanges_by_states(pipe: autopart.Pipe) -> int:
    """Return how many exchanges the ranks of all groups make for one micro-batch: one in each stage for each value that
    is read in another state, and for its gradient, and those of the loss."""
    shards, graph = pipe.plan.decision.shards, pipe.session.graph
    if shards == 1:
        return 0
    assignment, values = choose(graph, shards), graph.value_map()
    home = {op: number for number, stage in enumerate(pipe.plan.stages) for op in stage.ops}
    seen: set[tuple[int, str, State]] = set()
    count = 0
    for call in calls_of(graph):
        reads = list(assignment.reads(call.op, call))
        reads += [(name, assignment.states[name], WHOLE) for name in call.op.writes if name in graph.outputs]
        for name, held, wanted in reads:
            key = home[call.op.name], name, wanted
            there, back = passes(held, wanted) if key not in seen else (0, 0)
            seen.add(key)
            count += (there > 0) + (back > 0 and (name not in values or values[name].grad))
        count += {CLASSES: 2, ROWS: 1}.get(assignment.strategies[call.op.name].how, 0)
    return shards * count


@contextmanager
def counting(found: Counter[str]) -> Iterator[None]:
    """Count the exchanges of this rank with those that compute with it."""
    plain = ShardGroup._group  # asked for once by each

    def asked(group: ShardGroup) -> dist.ProcessGroup:
        found["exchanges"] += 1
        return plain(group)

    with mock.patch.object(ShardGroup, "_group", asked):
        yield


def report(found: dict[str, Any], cluster: autopart.Cluster, sizes: dict[str, int], *, keep: bool) -> None:
    """Print medians beside simulated steps, and write them."""
    seconds, plans = found["seconds"], found["plans"]
    simulated = {name: plan.step_ns * 1e-9 for name, plan in plans.items()}
    medians = {name: spread(values).median for name, values in seconds.items()}
    each = share_of(RANKS)
    print(f"decoder {sizes}, {RANKS} ranks with {each:.0%} of a core each")
    rows = {}
    for name, values in seconds.items():
        plan, messages = plans[name], found["messages"][name]
        rows[name] = {
            "seconds": spread(values), "simulated_seconds": simulated[name],
            "simulated / measured": simulated[name] / medians[name], "schedule": plan.schedule,
            "micro_batches": len(plan.micro_rows), **messages,
        }  # fmt: skip
        print(
            f"  {name:30s} {spread(values)}  simulated {simulated[name]:.4f} s, {plan.schedule}, "
            f"{len(plan.micro_rows)} micro-batches, {messages['messages']} messages, {messages['exchanges']} exchanges "
            f"({messages['exchanges by states']} by states)"
        )
    order = sorted(simulated, key=lambda name: simulated[name])
    apart = [(a, b) for a, b in pairwise(order) if simulated[b] > (1 + NEAR) * simulated[a]]
    gains = {f"{b} / {a}": ratio(seconds[b], seconds[a]) for a, b in pairwise(order)}
    worst = max(abs(a / b - 1) for own in zip(*found["losses"].values(), strict=True) for a, b in pairwise(own))
    claims = {
        **{f"{a} before {b}, as simulated": medians[a] < medians[b] for a, b in apart},
        "messages are those of the program": all(
            own["messages"] == own["messages of the program"] for own in found["messages"].values()
        ),
        "exchanges are those of the states": all(
            own["exchanges"] == own["exchanges by states"] for own in found["messages"].values()
        ),
        "losses equal to 1e-4 in every round": worst < 1e-4,
    }
    for claim, holds in claims.items():
        print(f"  {claim}: {holds}")
    if keep:
        content = {"cluster": cluster, "part_of_a_core": each, "sizes": sizes, "plans": rows, "ratios": gains}
        print("written to", write("wide_layers", {**content, "claims": claims}).name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--dry", action="store_true", help="print alone, write no result")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if share_of(RANKS) < 1 and (reason := why_not()):
        raise SystemExit(f"ranks would share cores, which a plan does not expect; {reason}")
    sizes = {name: getattr(given, name) for name in ("width", "layers", "rows", "tokens", "micro_batches")}
    with parts_of_cores([share_of(RANKS)] * RANKS) as folders:
        cluster = autopart.launch(cluster_of, f"cpu:{RANKS}", folders)[0]
        found = autopart.launch(measure, f"cpu:{RANKS}", folders, cluster, sizes, given.rounds, given.warmup)[0]
    report(found, cluster, sizes, keep=not given.dry)


if __name__ == "__main__":
    main()

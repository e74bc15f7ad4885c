"""A change of plan while training: how fast its bytes move beside one all-to-all of the same bytes, and the pause.

24 layers of 2,048 x 2,048 (100.7 M parameters, fp32) with Adam, 4 Gloo ranks with 1 thread each on one machine.  Three
plans in turn: four stages; two stages of two replicas; four stages on the ranks in reverse, so that everything moves.
Each change is made by `pipe.replan`, of
which the planner's choice is replaced by the other plan; so the pause is predicted and measured as for users.  After
each change the same bytes go between the same ranks by one `all_to_all_single`.

    python -m benchmarks.planning.plan_change               3 minutes on 2 cores, 12 GB; writes results/plan_change.json
    python -m benchmarks.planning.plan_change --layers 2    small, writes nothing
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import autopart
from autopart.extras.freezing import replan as replanning
from autopart.planning.make import make_plan
from benchmarks.shared.common import ratio, spread, write

RANKS, WIDTH, ROWS = 4, 2048, 16
LEAST, WITHIN = 0.70, 0.25
"""What is asked: the part of the all-to-all's rate, and how far the predicted pause may be from the measured one."""


class Tower(nn.Module):
    """Layers of one width, and a mean of squares as loss."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def all_to_all_s(pairs: Mapping[tuple[int, int], int]) -> float:
    """Return the seconds of one all-to-all of these bytes between these ranks."""
    rank = dist.get_rank()
    out = [pairs.get((rank, other), 0) for other in range(RANKS)]
    into = [pairs.get((other, rank), 0) for other in range(RANKS)]
    sent = torch.ones(sum(out), dtype=torch.uint8)
    received = torch.zeros(sum(into), dtype=torch.uint8)
    dist.barrier()
    began = time.perf_counter()
    dist.all_to_all_single(received, sent, into, out)
    dist.barrier()
    return time.perf_counter() - began


def three_plans(model: nn.Module, x: torch.Tensor) -> tuple[autopart.Plan, autopart.Plan, autopart.Plan]:
    """Return the plans that follow each other."""
    asked: dict[str, Any] = {"sample": x, "costs": "analytic", "micro_batches": 4}
    four = autopart.plan(model, f"cpu:{RANKS}", stages=4, replicas=1, **asked)
    two = autopart.plan(model, f"cpu:{RANKS}", stages=2, replicas=2, zero=0, **asked)
    turned = tuple(replace(s, ranks=tuple(RANKS - 1 - rank for rank in s.ranks)) for s in four.stages)
    return four, two, replace(four, decision=replace(four.decision, stages=turned))


def measure(layers: int, rounds: int) -> list[dict[str, float]]:
    """Change the plan back and forth on one rank; return what each change took."""
    torch.set_num_threads(1)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    model = Tower(layers)
    cluster = f"cpu:{RANKS}"
    plans = three_plans(Tower(layers), x)
    found = []
    with autopart.compile(model, cluster, sample=x, plan=plans[0], costs="analytic") as pipe:
        optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-5)
        for number in range(rounds + 1):
            pipe.step(x)
            optimizer.step()
            optimizer.zero_grad()
            moved: dict[tuple[int, int], int] = {}
            target = plans[(number + 1) % len(plans)]

            def chosen(captures: Any, batch: Any, machines: Any, options: Any, target: Any = target) -> Any:
                return make_plan(captures, batch, machines, replace(options, plan=target))

            def counted(*given: Any, into: Any = moved) -> Any:
                pairs = autopart.extras.freezing.carried.moved_bytes(*given)
                into.update(pairs)
                return pairs

            with (
                mock.patch.object(replanning, "make_plan", chosen),
                mock.patch.object(replanning, "moved_bytes", counted),
                mock.patch.object(replanning, "_judged", lambda *_: (True, "as the benchmark wants it")),
            ):
                done = pipe.replan(optimizer)
            told = [moved]
            dist.broadcast_object_list(told, 0)
            again = all_to_all_s(told[0])
            if number:  # the first one opens connections
                found.append({
                    "bytes": done.moved_bytes, "predicted pause": done.pause_s, "pause": done.took_s,
                    "moving": done.moving_s, "all-to-all": again,
                })  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=12)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    changes = autopart.launch(measure, f"cpu:{RANKS}", given.layers, given.rounds)[0]
    columns = {name: [change[name] for change in changes] for name in changes[0]}
    rate = ratio(columns["all-to-all"], columns["moving"])
    off = spread([abs(a / b - 1) for a, b in zip(columns["predicted pause"], columns["pause"], strict=True)])
    for change in changes:
        print("  ", {name: round(value, 3) for name, value in change.items()})
    print(f"rate of moving beside one all-to-all: {rate.median:.2f} [{rate.low:.2f}, {rate.high:.2f}], asked {LEAST}")
    print(f"predicted pause off by {off.median:.0%} [{off.low:.0%}, {off.high:.0%}], asked within {WITHIN:.0%}")
    if given.layers == parser.get_default("layers"):
        content = {"changes": changes, "rate beside one all-to-all": rate, "pause off by": off}
        print("written to", write("plan_change", content).name)


if __name__ == "__main__":
    main()

"""Times of the planner's passes for growing models.

GPT-2 (hidden 256) on the meta device at several depths, planned for 4 stages and 16 micro-batches with analytic costs:
seconds of every step from the model object to the verified program, the fastest of a few runs. Expected growth:
capture, tokens, atoms, route and verify linear in the ops; coarsening O(n log n) with a small constant; search and
bound depend on the number of blocks, which is bounded. "build" is everything after capture and costs. "tokens" is the
analysis for `token_slices=`, after its second capture; the benchmark fails if it takes more than 1 s of processor time.
"shards" is what tensor parallelism over four ranks divides: factors and rule, which look at a few of the equal layers;
it fails above 0.3 s.

    python -m benchmarks.planning.pass_times               about 2 minutes on 2 cores; writes results/pass_times.json
    python -m benchmarks.planning.pass_times --layers 4    some depths; writes nothing
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

from autopart.batch.batch import flatten
from autopart.capture import capture
from autopart.capture.gc_pause import gc_paused
from autopart.files.clusters import parse_cluster
from autopart.passes.graph.atoms import atoms
from autopart.passes.graph.chain import BlockChain
from autopart.passes.graph.coarsen import coarsen
from autopart.passes.ops.analytic_costs import analytic_costs
from autopart.passes.ops.cost_model import CostModel
from autopart.passes.pipeline import BLOCKS, PlannerInput, build, search
from autopart.passes.program.routing import route
from autopart.passes.program.verify import check_program
from autopart.passes.proof.lower_bound import lower_bound
from autopart.passes.search.space import PlanRequest, SearchSpace
from autopart.passes.shards.choice import choose
from autopart.passes.simulation.stage_costs import Estimator, device_types
from autopart.passes.tokens.analysis import analyse
from autopart.passes.tokens.recipe import Recipe
from autopart.planning.derive.token_axis import Probed, fewer_tokens, shortened
from benchmarks.shared.common import write

STAGES, MICROS = 4, 16
TOKENS = 128
FEWER = fewer_tokens(TOKENS)


def gpt2(layers: int) -> torch.nn.Module:
    transformers.logging.set_verbosity_error()
    config = transformers.GPT2Config(
        n_embd=256, n_layer=layers, n_head=4, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0
    )
    with torch.device("meta"):
        return transformers.GPT2LMHeadModel(config).train()


def fastest(runs: int, work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of the fastest run and its result."""
    best, result = float("inf"), None
    for _ in range(runs):
        began = time.perf_counter()
        result = work()
        best = min(best, time.perf_counter() - began)
    return best, result


def passes(layers: int, runs: int) -> dict[str, float]:
    """Return the seconds of each pass at one depth, and the number of ops."""
    ids = torch.randint(0, 1000, (2, TOKENS))
    batch = flatten({"input_ids": ids, "labels": ids})
    cluster = parse_cluster("cpu:4")
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any], times: int = runs) -> Any:
        seconds[name], result = fastest(times, work)
        return result

    model = gpt2(layers)
    captured = timed("capture", lambda: capture(model, batch), 1)
    shorter = timed("shorter capture", lambda: capture(model, shortened(batch, TOKENS, FEWER)), 1).graph
    spent = time.process_time()
    recipe = timed("tokens", lambda: analyse(captured.graph, shorter, TOKENS, FEWER, Probed(captured)))
    spent = (time.process_time() - spent) / runs
    assert isinstance(recipe, Recipe) and spent <= 1, f"the token analysis took {spent:.2f} s of processor time"
    spent = time.process_time()
    timed("shards", lambda: choose.__wrapped__(captured.graph, 4))
    spent = (time.process_time() - spent) / runs
    assert spent <= 0.3, f"what tensor parallelism divides took {spent:.2f} s of processor time"
    graph = timed("costs", lambda: analytic_costs(captured.graph, cluster.devices[0]))
    fine = timed("atoms", lambda: atoms(graph))
    blocks = timed("coarsen", lambda: coarsen(fine, blocks=BLOCKS))
    cost_model = CostModel(graph, None, device_types(cluster))  # at the captured rows only, as requested below
    request = PlanRequest(((2,) * MICROS,), stages=STAGES, replicas=1)

    def space() -> SearchSpace:
        chain = BlockChain(blocks, graph, cost_model)
        return SearchSpace(chain, Estimator(cluster, chain), request, fine, ())

    timed("search", lambda: search((space(), space())))
    timed("bound", lambda: lower_bound(space()))
    source = PlannerInput(graph, cost_model, torch.__version__)
    with gc_paused():
        plan = timed("build (all passes)", lambda: build(source, cluster, request))
    program = timed("route", lambda: route(plan.decision, graph))
    timed("verify", lambda: check_program(program, plan.schedule))
    return {"layers": layers, "ops": len(graph.ops), "blocks": len(blocks.ops), **seconds}


LAYERS = [4, 8, 16, 32, 64, 96, 126]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [passes(layers, given.runs) for layers in given.layers]
    names = list(rows[0])
    print("  ".join(f"{name:>18s}" for name in names))
    for row in rows:
        print("  ".join(f"{row[name]:18d}" if isinstance(row[name], int) else f"{row[name]:18.4f}" for name in names))
    if given.layers == LAYERS:
        print("written to", write("pass_times", {"rows": rows}).name)


if __name__ == "__main__":
    main()

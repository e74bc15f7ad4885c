"""`eval_loss` in micro-batches that overlap on the stages, beside the whole batch as one micro-batch.

Two stages, 8 micro-batches, 2 Gloo ranks with 1 thread each, fp32; both ways alternate in one run, over two pipes of
the same plan; ratios are taken pair by pair.

    python -m benchmarks.steps.evaluation    2 minutes on 2 cores; writes results/evaluation.json
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import Any
from unittest import mock

import torch

import autopart
from autopart.session.session import Session
from benchmarks.shared.alternation import alternate
from benchmarks.shared.bench_models import MODELS
from benchmarks.shared.common import ratio, spread, write

NAMES = ("gpt2", "llama", "bert", "vit")
MICROS = 8


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Return the seconds of one rank, and the losses of both ways."""
    torch.set_num_threads(1)
    model, batch = MODELS[name], MODELS[name].batch()
    options: dict[str, Any] = {"stages": 2, "micro_batches": MICROS, "replicas": 1, "costs": "analytic"}
    pipes = {way: autopart.compile(model.model(), "cpu:2", sample=batch, **options) for way in ("overlapped", "whole")}
    with mock.patch.object(Session, "_evaluation_rule", return_value=None):
        whole = pipes["whole"].eval_loss(batch).item()
    losses = {"overlapped": pipes["overlapped"].eval_loss(batch).item(), "whole": whole}
    steps = {way: partial(pipe.eval_loss, batch) for way, pipe in pipes.items()}
    return {"seconds": alternate(steps, rounds).seconds, "losses": losses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    content = {}
    for name in NAMES:
        found = autopart.launch(measure, "cpu:2", name, given.rounds)[0]
        faster = ratio(found["seconds"]["whole"], found["seconds"]["overlapped"])
        print(f"{name}: whole / overlapped {faster.median:.3f}x  [{faster.low:.3f}, {faster.high:.3f}]", flush=True)
        content[name] = {
            "seconds": {way: spread(values) for way, values in found["seconds"].items()},
            "whole / overlapped": faster,
            "losses": found["losses"],
        }
    print("written to", write("evaluation", content).name)


if __name__ == "__main__":
    main()

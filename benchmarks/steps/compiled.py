"""Steps of compiled stages beside the same steps run eagerly.

Two stages of GPT-2, Llama and BERT shapes under one plan, 4 micro-batches, 1F1B, fp32, 2 Gloo ranks with 1 thread each;
eager and compiled steps alternate in one run, ratios are taken pair by pair. The seconds of `compile` are those of the
first start, with an empty cache of TorchInductor, and of a second one; they contain capturing and planning.

    python -m benchmarks.steps.compiled                6 minutes on 2 cores; writes results/compiled.json
    python -m benchmarks.steps.compiled --only gpt2    one model
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from functools import partial
from typing import Any

import torch

import autopart
from benchmarks.shared.alternation import alternate
from benchmarks.shared.bench_models import MODELS, training_step
from benchmarks.shared.common import ratio, spread, write

NAMES = ("gpt2", "llama", "bert")
MICROS = 4


def _pipe(name: str, backend: str) -> tuple[autopart.Pipe, float]:
    """Return a pipe over a fresh model, and the seconds that `compile` took."""
    model = MODELS[name]
    options: dict[str, Any] = {"stages": 2, "micro_batches": MICROS, "schedule": "1f1b", "costs": "analytic"}
    began = time.perf_counter()
    pipe = autopart.compile(
        model.model(), "cpu:2", sample=model.batch(), recompute="off", replicas=1, backend=backend, **options
    )
    return pipe, time.perf_counter() - began


def started(name: str, backend: str) -> float:
    """Return the seconds that one rank takes to bring up a pipe."""
    torch.set_num_threads(1)
    pipe, seconds = _pipe(name, backend)
    pipe.close()
    return seconds


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Return the seconds of steps of one rank, and the largest error of a gradient."""
    torch.set_num_threads(1)
    batch = MODELS[name].batch()
    pipes = {backend: _pipe(name, backend)[0] for backend in ("eager", "inductor")}
    for pipe in pipes.values():
        pipe.step(batch)
    eager, own = (pipe.gradients() for pipe in pipes.values())
    norms = {key: value.norm() for key, value in eager.items() if value is not None}
    least = 1e-6 * max(norms.values())  # the gradient of a bias of attention keys is 0, but for rounding
    errors = [(own[key] - eager[key]).norm() / max(norm, least) for key, norm in norms.items()]
    steps = {backend: training_step(partial(pipe.step, batch), pipe.parameters()) for backend, pipe in pipes.items()}
    return {"seconds": alternate(steps, rounds).seconds, "error": max(map(float, errors))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    content = {}
    for name in given.only:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
            eager, first, second = (
                max(autopart.launch(started, "cpu:2", name, backend)) for backend in ("eager", "inductor", "inductor")
            )
            found = autopart.launch(measure, "cpu:2", name, given.rounds)[0]
        faster = ratio(found["seconds"]["eager"], found["seconds"]["inductor"])
        print(f"{name}: eager / compiled {faster.median:.3f}x  [{faster.low:.3f}, {faster.high:.3f}]")
        print(f"  compile: eager {eager:.1f} s, compiled {first:.1f} s, again {second:.1f} s")
        print(f"  largest error of a gradient {found['error']:.1e}", flush=True)
        content[name] = {
            "seconds": {backend: spread(values) for backend, values in found["seconds"].items()},
            "eager / compiled": faster,
            "compile_seconds": {"eager": eager, "first": first, "second": second},
            "gradient_error": found["error"],
        }
    if given.only == list(NAMES):
        print("written to", write("compiled", content).name)


if __name__ == "__main__":
    main()

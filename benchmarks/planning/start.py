"""How long a start takes: `compile` of GPT-2 (12 layers) on two ranks, by phase, with empty caches and once more.

Processor seconds hold on a busy machine too, which wall time does not. Phases are those that rank 0 logs, in processor
seconds. The model and the batch are made outside of the clock. Another tree is measured from its folder, with
this one in PYTHONPATH, and writes nothing.

    python -m benchmarks.planning.start                2 minutes; writes results/start.json
    python -m benchmarks.planning.start --layers 2     a smaller model; writes nothing
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import autopart
from benchmarks.shared.common import ROOT, write

ROWS, TOKENS, LAYERS = 16, 32, 12
_TOOK = re.compile(r"(.+) took [0-9.]+ s")


class _Phases(logging.Handler):
    """Adds up the processor seconds of each phase that is logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.seconds: dict[str, float] = {}
        self._began = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """Add a phase that ended."""
        what, now = record.getMessage(), time.process_time()
        if what.endswith(" ..."):
            self._began = now
        elif found := _TOOK.fullmatch(what):
            self.seconds[found[1]] = self.seconds.get(found[1], 0.0) + now - self._began


def start(layers: int) -> dict[str, Any]:
    """Return what one rank took."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(use_cache=False, n_layer=layers))
    words = torch.randint(0, model.config.vocab_size, (ROWS, TOKENS))
    phases, log = _Phases(), logging.getLogger("autopart")
    log.addHandler(phases)
    log.setLevel(logging.INFO)
    wall, cpu = time.perf_counter(), time.process_time()
    pipe = autopart.compile(model, "cpu:2", sample={"input_ids": words, "labels": words})
    found = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "phases_s": phases.seconds}
    found["plan"] = str(pipe.plan.decision)
    pipe.close()
    return found


def main() -> None:
    """Measure a cold and a warm start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=LAYERS)
    layers = parser.parse_args().layers
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["AUTOPART_CACHE"] = cache
        for name in ("cold", "warm"):
            results[name] = autopart.launch(start, "cpu:2", layers)
            for rank, found in enumerate(results[name]):
                phases = ", ".join(f"{what} {seconds:.1f}" for what, seconds in found["phases_s"].items())
                print(f"{name}, rank {rank}: {found['wall_s']:.1f} s, {found['cpu_s']:.1f} s of CPU; {phases}")
    own = Path(autopart.__file__).resolve().parents[1] == ROOT
    if own and layers == LAYERS:
        write("start", results)


if __name__ == "__main__":
    main()

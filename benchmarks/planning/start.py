"""How long a start takes, from the model to a pipeline that is ready, and planning alone.

`compile` of GPT-2 (12 layers) on two ranks of torchrun, with empty caches and once more with the plan and the costs in
them, each in new processes: seconds on the clock, and processor seconds by phase that rank 0 logs.  The model, the
batch and imports are made outside of that clock; imports have one of their own.  Plans of Llama-3 8B for 8 devices and
of Llama-3.1 405B for 1,024, as in `plan_speed`: processor seconds without imports.

Targets: a start in at most 60 % of the 19.1 s that it took at first (2281ae3, another machine); with full caches in at
most 35 % of one with empty caches; the plan of 8B in 5 s, that of 405B in 40 s of the processor.  With
`--before FOLDER` also the starts of the sources in that folder (a checkout of 2281ae3), in turn with these: a ratio
holds on any machine, and 60 % is then taken of those.  Seconds on the clock need an idle machine.

    python -m benchmarks.planning.start                5 minutes; writes results/start.json
    python -m benchmarks.planning.start --layers 2     a smaller model, once, without the plans; writes nothing
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import autopart

ROWS, TOKENS, LAYERS, ROUNDS = 16, 32, 12, 3
FIRST_S, BEFORE_SHARE, CACHED_SHARE = 19.1, 0.60, 0.35
"""Seconds of a start at first, and the parts of seconds before and of a start with empty caches that are allowed."""
_TOOK = re.compile(r"(.+) took [0-9.]+ s")
_COLD, _CACHED = "empty caches", "plan and costs cached"
Runs = dict[str, list[list[dict[str, Any]]]]
"""By kind of start, for each round what each rank took."""


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
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(use_cache=False, n_layer=layers))
    words = torch.randint(0, model.config.vocab_size, (ROWS, TOKENS))
    phases, log = _Phases(), logging.getLogger("autopart")
    log.addHandler(phases)
    log.setLevel(logging.INFO)
    cpu = time.process_time()
    compiled = autopart.compile  # imports what it needs
    imports_s = time.process_time() - cpu
    wall, cpu = time.perf_counter(), time.process_time()
    pipe = compiled(model, "cpu:2", sample={"input_ids": words, "labels": words})
    found = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "phases_s": phases.seconds}
    found |= {"imports_s": imports_s, "plan": str(pipe.plan.decision), "notes": list(pipe.plan.notes)}
    pipe.close()
    return found


def starts(folders: list[Path], layers: int, rounds: int) -> list[Runs]:
    """Start the sources in each folder in turn, with empty caches and once more, so many times."""
    found: list[Runs] = [{_COLD: [], _CACHED: []} for _ in folders]
    for _ in range(rounds):
        for folder, runs in zip(folders, found, strict=True):
            with tempfile.TemporaryDirectory() as cache:
                for each in runs.values():
                    each.append(started(folder, layers, cache))
    return found


def started(folder: Path, layers: int, cache: str) -> list[dict[str, Any]]:
    """Return what each of two ranks took that torchrun starts on the sources in a folder."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    with tempfile.TemporaryDirectory() as results:
        outcome = subprocess.run(
            [*torchrun, str(Path(__file__).resolve()), "--layers", str(layers), "--rank", results], cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder.resolve()), "AUTOPART_CACHE": cache, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if outcome.returncode:
            raise SystemExit(f"the sources in {folder} do not start:\n{outcome.stderr[-6000:]}")
        return [json.loads(Path(results, str(rank)).read_text()) for rank in range(2)]


def seconds_of(runs: list[list[dict[str, Any]]]) -> float:
    """Return the median of what the slowest rank took on the clock."""
    return statistics.median(max(rank["wall_s"] for rank in ranks) for ranks in runs)


def described(found: Runs) -> str:
    """Return the starts in lines, by kind and rank, of the last round."""
    lines = []
    for name, runs in found.items():
        for rank, each in enumerate(runs[-1]):
            phases = ", ".join(f"{what} {seconds:.1f}" for what, seconds in each["phases_s"].items())
            lines.append(
                f"{name}, rank {rank}: {each['wall_s']:.1f} s, {each['cpu_s']:.1f} s of the processor, and "
                f"{each['imports_s']:.1f} for imports; {phases}"
            )
    return "\n".join(lines)


def claims_of(found: Runs, before: Runs | None, plans: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """Return the targets and whether they are met."""
    cold, cached = seconds_of(found[_COLD]), seconds_of(found[_CACHED])
    first, whose = (seconds_of(before[_COLD]), "it took before, here") if before else (FIRST_S, "it took at first")
    told = f"a start takes {cold:.1f} s, at most {BEFORE_SHARE:.0%} of the {first:.1f} s that {whose}"
    claims = {told: cold <= BEFORE_SHARE * first}
    share = cached / cold
    claims[f"with plan and costs cached {share:.0%} of it, at most {CACHED_SHARE:.0%}"] = share <= CACHED_SHARE
    for name, plan in plans.items():
        seconds = plan.get("seconds", float("inf"))
        claims[f"{name}: {seconds:.1f} s of the processor, at most {plan['most_s']:g}"] = seconds <= plan["most_s"]
    return claims


def planning() -> dict[str, dict[str, Any]]:
    """Plan the large models, each in a process of its own."""
    from benchmarks.planning.plan_speed import TARGETS, Case, line, result
    from benchmarks.shared import shapes

    shapes.warm()
    large = next(case for case in TARGETS if case.name == "llama-405b")
    cases = (
        Case("llama-8b on 8", shapes.llama_8b, 512, 4096, "h100x8:1", seconds=5),
        Case("llama-405b on 1,024", large.make, large.rows, large.length, large.cluster, 40, optimizer="adamw"),
    )
    found = {}
    for case in cases:
        took = shapes.alone(lambda case=case: result(case))  # type: ignore[misc]
        print(line(case.name, took), flush=True)
        found[case.name] = {**took, "most_s": case.seconds}
    return found


def main() -> None:
    """Measure starts and plans."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--rounds", type=int, default=0, help=f"{ROUNDS} for the whole model, else 1")
    parser.add_argument("--before", type=Path, help="folder with other sources to compare with")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    # Compiled code is kept beside the sources, as Python does by itself, whatever the environment says.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    whole = given.layers == LAYERS
    rounds = given.rounds or (ROUNDS if whole else 1)
    if given.rank:
        sys.setrecursionlimit(10_000)  # the first sources need it
        given.rank.joinpath(os.environ["RANK"]).write_text(json.dumps(start(given.layers)))
        return
    folders = [Path(autopart.__file__).resolve().parents[1], *([given.before] if given.before else [])]
    found, *others = starts(folders, given.layers, rounds)
    before = others[0] if others else None
    print(described(found))
    if before:
        print(f"before:\n{described(before)}")
    plans = planning() if whole else {}
    claims = claims_of(found, before, plans)
    for claim, holds in claims.items():
        print("met   " if holds else "MISSED", claim)
    if whole:
        from benchmarks.shared.common import write

        if given.before:  # the recorded command names no folder of this machine
            sys.argv = [each.replace(str(given.before), "FOLDER") for each in sys.argv]
        write("start", {"claims": claims, "starts": found, "before": before, "plans": plans})


if __name__ == "__main__":
    main()

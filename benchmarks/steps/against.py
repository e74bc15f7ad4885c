"""Steps of this working tree and of another commit, side by side: is a step slower, and does a seen length cost more?

GPT-2, 8 layers, hidden 256, vocabulary 1024, batch 8, 8 micro-batches, 1F1B, fp32, dropout off, fused AdamW in the
step; 2 Gloo ranks with 1 thread each for each of the two states. The ranks of both states live at the same time, and
one state at a time runs a step, in turn. Ratios are taken pair by pair. "fixed" steps over one length of sequences, and
"lengths" over three that were seen before, one after the other. CPU seconds are those of the two ranks together: they
say more than the clock where the machine has other work. Captures are counted while steps are measured.

    python -m benchmarks.steps.against --against COMMIT          about 3 minutes on 2 cores; writes results/against.json
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.shared.common import ROOT, ratio, spread, write

HIDDEN, VOCAB, BATCH, MICROS, WORLD = 256, 1024, 8, 8, 2
FIXED, LENGTHS = (128,), (128, 96, 64)
HERE, THERE = "this tree", "the other commit"


# ---- a rank of one state ---------------------------------------------------------------------------------------------


def serve(address: str, state: str, layers: int) -> None:
    """Run steps on one rank whenever the benchmark asks for one, until it sends None."""
    import torch

    import autopart
    from benchmarks.shared.bench_models import gpt2, training_step

    torch.set_num_threads(1)
    batches = {length: _batch(length) for length in LENGTHS}
    torch.manual_seed(0)
    model = gpt2(VOCAB, HIDDEN, layers)()
    with autopart.compile(
        model, f"cpu:{WORLD}", sample=batches[LENGTHS[0]], stages=2, micro_batches=MICROS, schedule="1f1b",
        costs="analytic",
    ) as pipe, Client(address) as parent:  # fmt: skip
        steps = {length: training_step(_step(pipe, batch), pipe.parameters()) for length, batch in batches.items()}
        parent.send((state, pipe.rank, autopart.__file__))
        while (length := parent.recv()) is not None:
            began, captures = time.process_time(), _captures(pipe)
            steps[length]()
            parent.send((time.process_time() - began, _captures(pipe) - captures))


def _captures(pipe: Any) -> int:
    """Return how many captures there were, 0 where an earlier commit does not count them."""
    return int(getattr(pipe.session.captures, "made", 0))


def _batch(length: int) -> dict[str, Any]:
    import torch

    ids = torch.randint(0, VOCAB, (BATCH, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": ids, "labels": ids}


def _step(pipe: Any, batch: dict[str, Any]) -> Callable[[], Any]:
    return lambda: pipe.step(batch)


# ---- the benchmark ---------------------------------------------------------------------------------------------------


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """Give autopart as it was at a commit in a temporary folder, without the benchmarks of then."""
    packages = ["autopart", "passes", "runtime"]
    archive = subprocess.run(["git", "archive", commit, *packages], cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="tar")
        yield Path(folder)


def started(root: Path, address: str, state: str, layers: int) -> subprocess.Popen[bytes]:
    """Start the ranks of one state, with its own autopart."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--serve", address, state, "--layers", str(layers)]
    return subprocess.Popen(command, env=env)


def measured(against: str, rounds: int, warmup: int, layers: int) -> dict[str, Any]:
    """Return seconds, CPU seconds and captures by kind of step and state, a number for each round."""
    with ExitStack() as stack:
        listener = stack.enter_context(Listener(family="AF_UNIX"))
        roots = {HERE: ROOT, THERE: stack.enter_context(checked_out(against))}
        processes = [started(root, str(listener.address), state, layers) for state, root in roots.items()]
        ranks: dict[str, list[Connection]] = {state: [] for state in roots}
        for _ in range(WORLD * len(roots)):
            rank = stack.enter_context(listener.accept())
            state, _, file = rank.recv()
            assert Path(file).is_relative_to(roots[state]), f"the ranks of {state} run {file}"
            ranks[state].append(rank)
        found = {"fixed": _rounds(ranks, FIXED, rounds, warmup), "lengths": _rounds(ranks, LENGTHS, rounds, warmup)}
        for rank in itertools.chain(*ranks.values()):
            rank.send(None)
        for process in processes:
            if process.wait(timeout=60):
                raise SystemExit(f"the ranks ended with {process.returncode}")
        return found


def _rounds(
    ranks: dict[str, list[Connection]], lengths: tuple[int, ...], rounds: int, warmup: int
) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {s: {"seconds": [], "cpu_seconds": [], "captures": []} for s in ranks}
    states = list(ranks)
    for number in range(warmup * len(lengths) + rounds):
        length = lengths[number % len(lengths)]
        for state in states if number % 2 else reversed(states):
            began = time.perf_counter()
            for rank in ranks[state]:
                rank.send(length)
            answers = [rank.recv() for rank in ranks[state]]
            if number >= warmup * len(lengths):
                found[state]["seconds"].append(time.perf_counter() - began)
                found[state]["cpu_seconds"].append(sum(cpu for cpu, _ in answers))
                found[state]["captures"].append(sum(made for _, made in answers))
    return found


def report(found: dict[str, Any], against: str) -> dict[str, Any]:
    """Print medians and ratios, and return what is written."""
    content: dict[str, Any] = {"against": against}
    for kind, states in found.items():
        content[kind] = {"captures": {state: sum(numbers["captures"]) for state, numbers in states.items()}}
        for what in ("seconds", "cpu_seconds"):
            for state, numbers in states.items():
                print(f"{kind:8s} {what:12s} {state:18s} {spread(numbers[what])}")
            each = ratio(states[HERE][what], states[THERE][what])
            print(f"{kind:8s} {what:12s} {HERE} / {THERE}: {each.median:.3f}x  [{each.low:.3f}, {each.high:.3f}]")
            content[kind][what] = {**{state: spread(n[what]) for state, n in states.items()}, "ratio": each}
        print(f"{kind:8s} captures     {content[kind]['captures']}")
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", default="HEAD")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=3, help="rounds over each length before the measured ones")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--serve", nargs=2, metavar=("ADDRESS", "STATE"), help=argparse.SUPPRESS)
    parser.add_argument("--out", default="against", help="name of the file in results, - for none")
    given = parser.parse_args()
    if given.serve:
        import autopart

        autopart.launch(serve, f"cpu:{WORLD}", *given.serve, given.layers)
        return
    commit = subprocess.run(["git", "rev-parse", "--short", given.against], cwd=ROOT, capture_output=True, check=True)
    against = commit.stdout.decode().strip()
    content = report(measured(against, given.rounds, given.warmup, given.layers), against)
    if given.out != "-":
        print("written to", write(given.out, content).name)


if __name__ == "__main__":
    main()

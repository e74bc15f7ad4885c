"""What the host does in one step on one GPU: waits for the device, time until the call returns, a CUDA graph of it.

Plain PyTorch beside `autopart.compile`, forward, backward and fused AdamW.  `waits`: calls in a step that stop the host
until the device is done, as torch's debug mode counts them.  `returns_s`: seconds until the call returns, `seconds`:
until the device is done; the closer they are, the less of the next step can be prepared meanwhile.  `graph_s`: seconds
of forward and backward captured once as a CUDA graph and replayed, beside `alone_s`, the same without the graph: what
removing all launches could gain.  Where the capture fails, its reason is the row.

    python -m benchmarks.gpu.one_step               about two minutes; writes results/gpu_one_step.json after each row
    python -m benchmarks.gpu.one_step --dry-run     tiny shapes on the CPU; writes nothing
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.jobs import Job, reason
from benchmarks.gpu.plans import PLANS, device_of
from benchmarks.gpu.workloads import workload
from benchmarks.shared.common import RESULTS, write

MODELS = ("gpt2-xl", "bert-large", "resnet-152")
SHARE = 0.1
"""Share of the layers: small models are those whose launches count."""
Step = Callable[[], Any]


def timed(step: Step, device: torch.device, repeats: int) -> tuple[float, float]:
    """Return the median seconds until the step returns and until the device is done."""
    returned, done = [], []
    for _ in range(repeats + 2):
        began = time.perf_counter()
        step()
        returned.append(time.perf_counter() - began)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        done.append(time.perf_counter() - began)
    return statistics.median(returned[2:]), statistics.median(done[2:])


def waits(step: Step) -> list[str]:
    """Return the lines of code that stop the host until the device is done in one step, one entry for each stop."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stops = [one for one in found if "called a synchronizing" in str(one.message)]
    return [f"{Path(one.filename).name}:{one.lineno}" for one in stops]


def captured(compute: Step, device: torch.device, repeats: int) -> dict[str, Any]:
    """Return the seconds of forward and backward as a CUDA graph, or why they cannot be captured."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # gradients and workspaces exist before the capture
        for _ in range(3):
            compute()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            compute()
        return {"graph_s": timed(graph.replay, device, repeats)[1]}
    except RuntimeError as error:
        return {"no_graph": reason(error)}


def row(job: Job, repeats: int) -> dict[str, Any]:
    """Return what one plan's step does, on this process's device."""
    device = device_of(job)
    with PLANS[job.plan](job, workload(job.model, job.scale, tiny=job.tiny)) as running:
        found: dict[str, Any] = {"model": job.model, "plan": job.plan, "precision": job.precision}
        found["returns_s"], found["seconds"] = timed(running.step, device, repeats)
        assert running.compute is not None
        found["alone_s"] = timed(running.compute, device, repeats)[1]
        if device.type == "cuda":
            found["waits"] = waits(running.step)
            found |= captured(running.compute, device, repeats)  # last: a failed capture may spoil the stream
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    given = parser.parse_args()
    if not given.dry_run and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here; --dry-run tries the command on the CPU")
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    rows: list[dict[str, Any]] = []
    for model in MODELS[: 1 if given.dry_run else None]:
        for precision in ("fp32", "bf16"):
            for plan in ("one device", "ours"):
                kind = "cpu" if given.dry_run else "cuda"
                job = Job(model, plan, precision, kind, 1, 1, scale=SHARE, tiny=given.dry_run)
                try:
                    rows.append(row(job, 2 if given.dry_run else given.repeats))
                except Exception as error:  # another row may work, and this one says why it did not
                    rows.append({"model": model, "plan": plan, "precision": precision, "reason": reason(error)})
                print(*(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
                if not given.dry_run:
                    content = {"device": torch.cuda.get_device_name(0), "cuda": torch.version.cuda, "rows": rows}
                    write("gpu_one_step", content, command="python -m benchmarks.gpu.one_step", folder=given.folder)


if __name__ == "__main__":
    main()

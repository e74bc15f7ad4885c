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

import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.alone import Row, record
from benchmarks.gpu.jobs import Job, reason
from benchmarks.gpu.plans import PLANS, device_of
from benchmarks.gpu.workloads import workload

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


def row(job: Job, repeats: int) -> Row:
    """Return what one plan's step does, on this process's device, or why it does nothing."""
    device, found = device_of(job), {"model": job.model, "plan": job.plan, "precision": job.precision}
    try:
        with PLANS[job.plan](job, workload(job.model, job.scale, tiny=job.tiny)) as running:
            assert running.compute is not None
            returns_s, step_s = timed(running.step, device, repeats)
            seconds = {"returns_s": returns_s, "seconds": step_s, "alone_s": timed(running.compute, device, repeats)[1]}
            if device.type != "cuda":
                return {**found, **seconds}
            found_waits = waits(running.step)
            graph = captured(running.compute, device, repeats)  # last: a failed capture may spoil the stream
            return {**found, **seconds, "waits": found_waits, **graph}
    except Exception as error:  # another row may work, and this one says why it did not
        return {**found, "reason": reason(error)}


def rows(device: torch.device, repeats: int) -> Iterator[Row]:
    """Yield a row for each model, precision and plan; of one model in a dry run."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    tiny = device.type == "cpu"
    for model, precision, plan in product(MODELS[: 1 if tiny else None], ("fp32", "bf16"), ("one device", "ours")):
        yield row(Job(model, plan, precision, device.type, 1, 1, scale=SHARE, tiny=tiny), repeats)


if __name__ == "__main__":
    record("one_step", __doc__, rows, repeats=20)

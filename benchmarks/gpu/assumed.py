"""What the planner assumes of a GPU, measured: products, attention, sums of gradients, optimizers, launches, memory.

Each number is the median of `--repeats` runs between two waits for the device, of enough calls to take a millisecond.
Products are those of Llama's 8B and 405B layers at 1, 1/2, 1/4 and 1/8 of their width, as tensor parallelism cuts them:
`share` is their rate relative to the whole width.  Attention is torch's, causal and full.  Sums: the gradient of a
bf16 weight added to its fp32 sum by a product and an addition, and by one kernel.

    python -m benchmarks.gpu.assumed                a few minutes; writes results/gpu_assumed.json after each row
    python -m benchmarks.gpu.assumed --dry-run      tiny shapes on the CPU; writes nothing
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from benchmarks.gpu.alone import Row, record

WIDTHS = {
    "8B": {"qkv": (4096, 6144), "feed-forward": (4096, 14336), "vocabulary": (4096, 128256)},
    "405B": {"qkv": (16384, 18432), "feed-forward": (16384, 53248), "vocabulary": (16384, 128256)},
}
"""(hidden, width) of the products of one layer, and of the last one; the width is what t devices divide."""
PARTS = (1, 2, 4, 8)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Machine:
    """A device, and the time of calls on it.  tiny: divides the sizes, for the dry run."""

    def __init__(self, device: torch.device, repeats: int, tiny: int) -> None:
        self.device, self.repeats, self.tiny = device, repeats, tiny

    def wait(self) -> None:
        """Wait until the device has done everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], Any]) -> float:
        """Return the median seconds of a call."""
        call()
        once = self._took(call, 1)
        calls = max(1, min(200, int(1e-3 / max(once, 1e-7))))
        return statistics.median(self._took(call, calls) for _ in range(self.repeats))

    def _took(self, call: Callable[[], Any], calls: int) -> float:
        self.wait()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        self.wait()
        return (time.perf_counter() - began) / calls

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return random values on the device, with axes divided by `tiny`."""
        return torch.randn([max(1, axis // self.tiny) for axis in shape], device=self.device).to(dtype)


def products(on: Machine) -> Iterator[Row]:
    """Yield the rates of products of 2,048 and 8,192 tokens by parts of the width."""
    for model, kinds in WIDTHS.items():
        for (kind, (hidden, width)), (name, dtype), tokens in [
            (kind, dtype, tokens) for kind in kinds.items() for dtype in DTYPES.items() for tokens in (2048, 8192)
        ]:
            if name == "fp32" and model == "405B":
                continue  # nobody trains it so
            rates = []
            for parts in PARTS:
                rows, weight = on.new(tokens, hidden, dtype=dtype), on.new(width // parts, hidden, dtype=dtype)
                flops = 2.0 * rows.numel() * weight.shape[0]
                rates.append(flops / on.seconds(lambda a=rows, b=weight: functional.linear(a, b)))
            shares = [rate / rates[0] for rate in rates]
            found = {"parts": PARTS, "flops_per_s": rates, "share": shares}
            yield {"what": "product", "model": model, "kind": kind, "dtype": name, "tokens": tokens, **found}


def attention(on: Machine) -> Iterator[Row]:
    """Yield the seconds of causal and full attention, forward and backward."""
    for tokens in (1024, 4096, 16384):
        seconds = {}
        for causal in (True, False):
            q, k, v = (
                on.new(1, 32 * on.tiny, tokens, 128 * on.tiny, dtype=torch.bfloat16).requires_grad_() for _ in range(3)
            )

            def forward(q: Any = q, k: Any = k, v: Any = v, causal: bool = causal) -> torch.Tensor:
                return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

            out = forward()
            name = "causal" if causal else "full"
            seconds[f"{name} forward"] = on.seconds(forward)
            seconds[f"{name} backward"] = on.seconds(
                lambda o=out, i=(q, k, v): torch.autograd.grad(o, i, o, retain_graph=True)
            )
        yield {"what": "attention", "tokens": tokens, "heads": 32, "seconds": seconds}


def sums(on: Machine) -> Iterator[Row]:
    """Yield the seconds in which the gradient of a bf16 weight is added to its fp32 sum."""
    for tokens, hidden, width in [(2048, 4096, 14336), (8192, 4096, 14336), (512, 4096, 4096)]:
        rows, grads = on.new(tokens, hidden, dtype=torch.bfloat16), on.new(tokens, width, dtype=torch.bfloat16)
        total = on.new(width, hidden)
        ways: dict[str, Callable[[], Any]] = {
            "product alone": lambda a=grads, b=rows: a.T @ b,
            "product and addition": lambda s=total, a=grads, b=rows: s.add_(a.T @ b),
            "one kernel": lambda s=total, a=grads, b=rows: torch.addmm(s, a.T, b, out_dtype=torch.float32, out=s),
        }
        found: Row = {"what": "sum of gradients", "tokens": tokens, "shape": [width, hidden], "seconds": {}}
        for name, call in ways.items():
            try:
                found["seconds"][name] = on.seconds(call)
            except (RuntimeError, TypeError) as error:
                found[f"{name} cannot run"] = str(error).splitlines()[0]
        yield found


def optimizers(on: Machine) -> Iterator[Row]:
    """Yield the seconds of an optimizer step of 134 million fp32 parameters in 32 tensors."""
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        for way in ("fused", "foreach"):
            params = [on.new(2048, 2048).requires_grad_() for _ in range(32)]
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer = kind(params, lr=1e-3, **{way: True})
            count = sum(param.numel() for param in params)
            yield {"what": "optimizer step", "kind": kind.__name__, "way": way, "parameters": count,
                   "seconds": on.seconds(optimizer.step)}  # fmt: skip


def launches(on: Machine) -> Iterator[Row]:
    """Yield the seconds of one small call in a row of many, and of one that is waited for."""
    value = on.new(1)
    calls: dict[str, Callable[[], Any]] = {"addition": lambda: value.add_(1.0), "view": lambda: value.view(-1)}
    for name, call in calls.items():
        yield {"what": "launch", "call": name, "seconds": on.seconds(call), "waited_for": on.seconds(
            lambda call=call: (call(), on.wait()))}  # fmt: skip


def memory(on: Machine) -> Iterator[Row]:
    """Yield the bytes that the device lost to this process besides its tensors, and the workspace of products."""
    if on.device.type != "cuda":
        yield {"what": "memory", "cannot run": "no GPU"}
        return
    free, total = torch.cuda.mem_get_info(on.device)
    reserved = torch.cuda.memory_reserved(on.device)
    before = torch.cuda.memory_allocated(on.device)
    stream = torch.cuda.Stream(on.device)  # a new stream takes its own workspace
    a, b = on.new(512, 512, dtype=torch.bfloat16), on.new(512, 512, dtype=torch.bfloat16)
    inside = torch.cuda.memory_allocated(on.device)
    with torch.cuda.stream(stream):
        product = a @ b
    on.wait()
    workspace = torch.cuda.memory_allocated(on.device) - inside - product.nbytes
    yield {"what": "memory", "total_bytes": total, "context_bytes": total - free - reserved,
           "allocated_bytes": before, "workspace_bytes": workspace}  # fmt: skip


QUESTIONS = (memory, launches, sums, optimizers, attention, products)
"""In order of worth, short ones first; memory before anything else is loaded."""


def rows(device: torch.device, repeats: int) -> Iterator[Row]:
    """Yield the answers to all questions."""
    on = Machine(device, repeats, 64 if device.type == "cpu" else 1)
    for question in QUESTIONS:
        yield from question(on)


if __name__ == "__main__":
    record("assumed", __doc__, rows, repeats=9)

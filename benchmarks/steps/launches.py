"""Kernels launched in a training step: the plain model against the program that autopart captured from it.

Both run forward, backward and the reading of the loss on one batch in this process, and start without gradients. On a
CPU the launches are the ops dispatched below autograd, without views and allocations; on CUDA those of its profiler.
The batch lies in the host's memory, where a DataLoader puts it, and the plain model's step takes it to the device
first. Device waits are ops whose result the host reads: a number, or positions whose count is the size of a tensor.
What is asked of the batch in the host's memory launches no kernel and waits for no device: it does not count. What
autopart runs beside the code of its one stage (questions to the batch, weights of losses, bookkeeping of gradients) is
part of its launches and counted once more on its own. Expected: no more launches than the plain model, and no waits
that the plain model does not have.

    python -m benchmarks.steps.launches                   4 minutes; writes results/launches.json
    python -m benchmarks.steps.launches --only bert t5    some models
    python -m benchmarks.steps.launches --device cuda
"""

from __future__ import annotations

import argparse
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest import mock

import torch
import transformers
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import autopart
from autopart.capture.python.reads.questions import Question, Reader
from autopart.runtime.stages.stage import StageRunner
from benchmarks.shared.common import write
from benchmarks.shared.launch_models import MODELS, LaunchModel

PRECISIONS = ("fp32", "bf16")
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim"}
HOST_COPIES = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu}
_NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "_unsafe_view"}
WARM_UPS = 2


@dataclass
class Launches:
    """What a step ran. ops: launches by op; waits: by op; outside: launches that the code of a stage did not make."""

    ops: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    outside: Counter[str] = field(default_factory=Counter)


class Counting(TorchDispatchMode):
    """Counts ops dispatched inside; of an op written in Python those that it is made of. in_stage: whether a stage's
    code runs. on_host: whether what runs belongs to the host on every device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found, self.in_stage, self.on_host = Launches(), False, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.on_host:
            return func(*args, **kwargs)
        if func.namespace not in ("aten", "prims"):
            key = next(t for t in args if isinstance(t, torch.Tensor)).device.type.upper()
            with self:
                return func.redispatch(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)), *args, **kwargs)
        name = func._schema.name.split("::")[1]
        if name in WAITS:
            self.found.waits[name] += 1
        if launches(func, name):
            self.found.ops[name] += 1
            if not self.in_stage:
                self.found.outside[name] += 1
        return func(*args, **kwargs)


class CountingReads(TorchFunctionMode):
    """Counts calls that copy a tensor to the host in ways that are no op below autograd on every device."""

    def __init__(self, found: Launches) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HOST_COPIES:
            self._found.waits[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def launches(func: Any, name: str) -> bool:
    """Return whether an op runs a kernel: it is no view, no allocation and no copy of a number to the host."""
    shares = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    return not shares and name not in _NO_KERNEL and name != "_local_scalar_dense"


def counted(step: Callable[[], Any], device: str) -> Launches:
    """Return the launches of a step after it has run a few times."""
    for _ in range(WARM_UPS):
        step()
    counting = Counting()
    with _stages_marked(counting), _host_marked(counting), CountingReads(counting.found), counting:
        step()
    found = counting.found
    if device == "cuda":
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            step()
            torch.cuda.synchronize()
        events = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        found.ops = Counter(e.name for e in events if not e.name.startswith("Mem"))
    return found


@contextlib.contextmanager
def _stages_marked(counting: Counting) -> Iterator[None]:
    """Tell `counting` while a stage runs forward or backward."""

    def marked(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counting.in_stage = True
            try:
                return run(*args, **kwargs)
            finally:
                counting.in_stage = False

        return call

    with (
        mock.patch.object(StageRunner, "forward", marked(StageRunner.forward)),
        mock.patch.object(StageRunner, "backward", marked(StageRunner.backward)),
    ):
        yield


@contextlib.contextmanager
def _host_marked(counting: Counting) -> Iterator[None]:
    """Tell `counting` while a question is answered in the host's memory, whatever the device."""
    plain = Reader.answer

    def answer(reader: Reader, question: Question) -> Any:
        elsewhere = Reader(reader._tensors, torch.device("meta"))  # on a CPU, host and device are the same
        counting.on_host = elsewhere.place(question).type == "cpu"
        try:
            return plain(reader, question)
        finally:
            counting.on_host = False

    with mock.patch.object(Reader, "answer", answer):
        yield


@dataclass(frozen=True)
class Row:
    """A model in one precision with one kind of mask.

    plain, ours: launches. more: ops that ours launches more often, and how much, the three largest; fewer likewise.
    outside: launches of ours outside the code of its stage. waits: ops, of plain and of ours.
    """

    model: str
    precision: str
    mask: str
    plain: int
    ours: int
    more: dict[str, int]
    fewer: dict[str, int]
    outside: dict[str, int]
    plain_waits: dict[str, int]
    our_waits: dict[str, int]

    @property
    def above(self) -> float:
        """Launches of ours above those of the plain model, as a share of these."""
        return self.ours / self.plain - 1

    @property
    def waits_above(self) -> int:
        """Waits of ours beyond those of the plain model."""
        return sum(self.our_waits.values()) - sum(self.plain_waits.values())


def row(name: str, precision: str, mask: str, device: str = "cpu") -> Row:
    """Count a step of both."""
    model = MODELS[name]
    batch = model.batch(mask)
    plain = counted(_plain_step(model, batch, precision, device), device)
    own = model.model().to(device)
    with autopart.compile(
        own, f"{device}:1", sample=batch, micro_batches=1, stages=1, precision=precision, optimizer="sgd",
        costs="analytic", recompute="off", cache=False,
    ) as pipe:  # fmt: skip

        def step() -> None:
            pipe.step(batch)
            own.zero_grad()

        ours = counted(step, device)
        pipe.close(sync=False)
    return Row(
        name, precision, mask, plain.ops.total(), ours.ops.total(), dict((ours.ops - plain.ops).most_common(3)),
        dict((plain.ops - ours.ops).most_common(3)), dict(ours.outside), dict(plain.waits), dict(ours.waits),
    )  # fmt: skip


def _plain_step(model: LaunchModel, batch: dict[str, torch.Tensor], precision: str, device: str) -> Callable[[], None]:
    plain = model.model().to(device)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            result = plain(**{key: value.to(device) for key, value in batch.items()})
        loss = result if isinstance(result, torch.Tensor) else result.loss
        loss.backward()
        loss.item()
        plain.zero_grad()

    return step


def line(found: Row) -> str:
    """Return one row of the table."""
    more = ", ".join(f"{op} +{count}" for op, count in found.more.items()) if found.ours > found.plain else ""
    waits = f"{sum(found.plain_waits.values())} : {sum(found.our_waits.values())}"
    verdict = "more" if found.ours > found.plain else ""
    name = f"{found.model:10s} {found.precision:5s} {found.mask:8s}"
    return f"{name} {found.plain:6d} : {found.ours:6d}  waits {waits:8s} {verdict:5s} {more}".rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="NAME")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for name in given.only:
        for precision in PRECISIONS:
            for mask in MODELS[name].masks:
                found.append(row(name, precision, mask, given.device))
                print(line(found[-1]), flush=True)
    claims = {
        "no row above the plain model by more than 1 %": all(r.above <= 0.01 for r in found),
        "no row without padding above the plain model": all(r.above <= 0 for r in found if r.mask != "padding"),
        "no wait that the plain model does not have": all(r.waits_above <= 0 for r in found),
    }
    print(*(f"{claim}: {'yes' if holds else 'NO'}" for claim, holds in claims.items()), sep="\n")
    if given.only == list(MODELS):
        rows = [{**asdict(r), "above": round(r.above, 4)} for r in found]
        name = "launches" if given.device == "cpu" else f"launches_{given.device}"
        print(write(name, {"transformers": transformers.__version__, "rows": rows, "claims": claims}))


if __name__ == "__main__":
    main()

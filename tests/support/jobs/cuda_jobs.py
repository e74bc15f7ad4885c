"""What the tests on CUDA devices run on every rank; importable there by name."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

import autopart
from autopart.ir.program import Action, Slot
from autopart.runtime.engine import Engine
from autopart.runtime.group.carriers import NcclCarrier, NcclPosted
from autopart.runtime.group.world import World
from autopart.runtime.messages.transport import pack, unpack
from support.jobs.engine_jobs import step
from support.jobs.step_jobs import EVERY
from support.oracles.one_process import Difference, Expected, difference, plain_step

Tensors = list[torch.Tensor]
ACTION = Action("SF", Slot(0, 0), 1)


def exact() -> None:
    """In fp32 a product is one of fp32, and of several algorithms the one is taken that adds in the same order."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True


def moved(tensors: Any, device: str) -> Any:
    """The same tensors on a device."""
    return pytree.tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, tensors)


def _reference(name: str, dtype: torch.dtype, rows: int, micros: int, device: str, steps: int) -> Expected:
    case = EVERY[name]
    model, batch = case.model(dtype=dtype).to(device), moved(case.data(rows, dtype), device)
    for _ in range(steps):
        loss = plain_step(case, model, batch, micros)
    return Expected.of(loss.cpu(), model.cpu())


def trained(
    name: str, schedule: str, micros: int, rows: int, dtype_name: str, transport: str, model_on: str
) -> tuple[list[float], dict[str, Difference] | None]:
    """Two training steps without zeroing in between, a stage on each rank, beside one process on a device and on CPU.

    The second step finds every channel in use already.  Every rank returns its losses, rank 0 how far off they and
    the summed gradients are.
    """
    exact()
    case, dtype, world = EVERY[name], getattr(torch, dtype_name), int(os.environ["WORLD_SIZE"])
    batch, model = moved(case.data(rows, dtype), model_on), case.model(dtype=dtype).to(model_on)
    options = {"stages": world, "schedule": schedule, "micro_batches": micros, "costs": "analytic", "replicas": 1}
    with autopart.compile(
        model, f"cuda:{world}", sample=batch, loss_fn=case.loss_fn, transport=transport, **options
    ) as pipe:
        losses = [pipe.step(batch).item() for _ in range(2)]
        gradients, state, leads = moved(pipe.gradients(), "cpu"), moved(pipe.state_dict(), "cpu"), pipe.rank == 0
        assert all(p.is_cuda for p in pipe.parameters() if p.numel())
    if not leads:
        return losses, None
    found = {}
    for device in ("cuda", "cpu"):
        expected = _reference(name, dtype, rows, micros, device, 2)
        found[device] = difference(losses[-1], gradients, state, expected, dtype)
    return losses, found


def masks(stages: int) -> tuple[float, dict[str, torch.Tensor]]:
    """A step of a model with dropout: its loss and gradients."""
    exact()
    world = int(os.environ["WORLD_SIZE"])
    case = EVERY["dropped"]
    batch = case.batch(12)
    options = {"stages": stages, "micro_batches": 3, "costs": "analytic", "seed": 5, "replicas": 1}
    with autopart.compile(
        case.model(), f"cuda:{world}", sample=batch, loss_fn=case.loss_fn, transport="gloo", **options
    ) as pipe:
        return pipe.step(batch).item(), {n: g for n, g in pipe.gradients().items() if g is not None}


def verified(name: str, dtype_name: str, rows: int) -> dict[str, Any]:
    """What `autopart.verify` says of a model with parameters of that type."""
    exact()
    case, dtype, world = EVERY[name], getattr(torch, dtype_name), int(os.environ["WORLD_SIZE"])
    found = autopart.verify(
        case.model(dtype=dtype), f"cuda:{world}", sample=case.data(rows, dtype), loss_fn=case.loss_fn, stages=world,
        micro_batches=3, costs="analytic", transport="gloo", replicas=1,
    )  # fmt: skip
    return {"ok": found.ok, "loss_error": found.loss_error, "largest": found.largest, "tolerance": found.tolerance}


# -- memory and time -----------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A block of a transformer without attention: what it keeps and holds is large beside what libraries take."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(torch.nn.functional.gelu(self.wide(self.norm(x))))


class Deep(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, width: int, depth: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, words)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def held(recompute: str, dtype_name: str) -> dict[str, Any]:
    """Peak bytes of this rank in its third step with AdamW, those that the plan predicts."""
    exact()
    world = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(3)
    model = Deep(1024, 12, 8192).to(getattr(torch, dtype_name))
    ids = torch.randint(0, 8192, (32, 256), generator=torch.Generator().manual_seed(4))
    batch = {"ids": ids, "labels": ids.roll(-1, 1)}
    options = {"stages": world, "micro_batches": 4, "recompute": recompute, "optimizer": "adamw", "replicas": 1}
    with autopart.compile(
        model, f"cuda:{world}", sample=batch, transport="gloo", costs="measured", cache=False, **options
    ) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-4, foreach=False)
        libraries = _library_bytes(getattr(torch, dtype_name))
        for number in range(3):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            timeline = pipe.timeline(batch) if number == 2 else None
            if timeline is None:
                pipe.step(batch)
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        measured = torch.cuda.max_memory_allocated() - libraries
        estimate = pipe.plan.report.estimates[pipe.rank]
    assert timeline is not None
    spans = [(span.rank, str(span.action), span.start_ns, span.end_ns) for span in timeline.spans]
    return {"measured": measured, "predicted": estimate.peak_bytes, "libraries": libraries, "spans": spans}


def _library_bytes(dtype: torch.dtype) -> int:
    """What matrix products leave allocated: workspaces of their library, kept for good."""
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    left = torch.ones(64, 64, dtype=dtype, device="cuda").requires_grad_()
    (left @ left).sum().backward()
    left.grad = None
    del left
    return torch.cuda.memory_allocated() - before


# -- NCCL ----------------------------------------------------------------------------------------------------------


class HandedOverByNccl(dict[Action, Tensors]):
    """What stages of one rank hand each other, sent over NCCL to the rank itself."""

    def __init__(self, carrier: NcclCarrier) -> None:
        super().__init__()
        self._carrier = carrier
        self._under_way: dict[Action, tuple[NcclPosted, Tensors]] = {}
        self.messages = 0

    def __setitem__(self, action: Action, tensors: Tensors) -> None:
        data = pack(tensors)
        posted = self._carrier.post(0, [(action, data)], [(action, data.numel())])
        self._under_way[action] = posted, [t.to("meta") for t in tensors]
        self.messages += 1

    def pop(self, action: Action, *default: Any) -> Tensors:
        """Waits for the message."""
        posted, specs = self._under_way.pop(action)
        posted.wait()
        return unpack(posted.received[0], specs)


@contextmanager
def _alone() -> Iterator[None]:
    """A process group of this process alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.cuda.set_device(0)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=address, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def through_nccl_to_itself() -> dict[str, Any]:
    """A step of four stages on one rank, every message over NCCL, in which nothing may make the host wait."""
    exact()
    handed: list[HandedOverByNccl] = []

    def prepare(engine: Engine, world: World) -> None:
        carrier = NcclCarrier(world.rank, world.device, lambda *_: dist.group.WORLD)
        carrier._groups[0] = dist.new_group([0], backend="nccl")
        engine._mailbox._handed = HandedOverByNccl(carrier)
        handed.append(engine._mailbox._handed)
        play = engine._play

        def without_waiting(*args: Any) -> None:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                play(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        engine._play = without_waiting  # type: ignore[method-assign]

    with _alone():
        found = step((0, 0, 0, 0), "alone", 3, "nccl", "cuda", prepare)
    return {**found, "messages": handed[0].messages, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}


def bytes_through_nccl(sizes: list[int]) -> list[bool]:
    """Messages of these sizes to the rank itself: each filled by work that runs still when it is posted, taken while
    the next is under way, and overwritten once it was waited for."""
    with _alone():
        world = World("cuda", 1, transport="nccl")
        carrier = NcclCarrier(world.rank, world.device, lambda *_: dist.group.WORLD)
        carrier._groups[0] = dist.new_group([0], backend="nccl")
        slow = torch.randn(2048, 2048, device="cuda")
        equal = []
        for number, size in enumerate(sizes):
            for _ in range(20):
                slow = torch.tanh(slow @ slow)
            data = (torch.arange(size, device="cuda") + number + slow.flatten()[0].long() * 0).to(torch.uint8)
            expected = data.clone()
            posted = carrier.post(0, [(ACTION, data)], [(ACTION, size)])
            posted.wait()
            data.fill_(0)
            equal.append((posted.received[0] == expected).all())
        return torch.stack(equal).tolist()

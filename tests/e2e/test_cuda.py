"""On CUDA devices, loss and gradients equal those of one process, over NCCL and, on one device, over Gloo.

`python -m benchmarks.gpu.gpu_tests` runs these tests and writes the results with the device's name to a file.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.jobs.engine_jobs import step
from support.jobs.step_jobs import EVERY
from support.oracles.one_process import Difference, Expected, difference, plain_step
from support.workers import Workers
from torch import nn
from torch.utils import _pytree as pytree

import autopart
from autopart.ir.actions import Action, Slot
from autopart.passes.program.named import FAMILY as SCHEDULES
from autopart.runtime.engine import Engine
from autopart.runtime.group.carriers import NcclCarrier, NcclPosted
from autopart.runtime.group.world import World
from autopart.runtime.launch.local import launch
from autopart.runtime.messages.transport import pack, unpack

Tensors = list[torch.Tensor]
ACTION = Action("SF", Slot(0, 0), 1)


def exact() -> None:
    """Disable TF32 and select deterministic algorithms."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True


def moved(tensors: Any, device: str) -> Any:
    """Return the tensors, moved to a device."""
    return pytree.tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, tensors)


def _reference(name: str, dtype: torch.dtype, rows: int, micros: int, device: str, steps: int) -> Expected:
    case = EVERY[name]
    model, batch = case.model(dtype=dtype).to(device), moved(case.data(rows, dtype), device)
    for _ in range(steps):
        loss = plain_step(case, model, batch, micros)
    return Expected.of(loss.cpu(), model.cpu())


def trained(
    name: str, schedule: str, micros: int, rows: int, dtype_name: str, transport: str, model_on: str, shards: int = 1
) -> tuple[list[float], dict[str, Difference] | None]:
    """Take two accumulated training steps with one stage per rank and compare with one process on a GPU and on CPU.

    The second step reuses the channels of the first one. Every rank returns its losses; rank 0 also returns the errors
    of the last loss and of the summed gradients by device.
    """
    exact()
    case, dtype, world = EVERY[name], getattr(torch, dtype_name), int(os.environ["WORLD_SIZE"])
    batch, model = moved(case.data(rows, dtype), model_on), case.model(dtype=dtype).to(model_on)
    options = {"stages": world // shards, "schedule": schedule, "micro_batches": micros, "costs": "analytic"}
    with autopart.compile(
        model, f"cuda:{world}", sample=batch, loss_fn=case.loss_fn, transport=transport, replicas=1,
        tensor_parallel=shards, **options,
    ) as pipe:  # fmt: skip
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
    """Return the loss and the gradients of one step of a model with dropout."""
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
    """Return the result of `autopart.verify` for a model with parameters of the given dtype."""
    exact()
    case, dtype, world = EVERY[name], getattr(torch, dtype_name), int(os.environ["WORLD_SIZE"])
    found = autopart.verify(
        case.model(dtype=dtype), f"cuda:{world}", sample=case.data(rows, dtype), loss_fn=case.loss_fn, stages=world,
        micro_batches=3, costs="analytic", transport="gloo", replicas=1,
    )  # fmt: skip
    return {"ok": found.ok, "loss_error": found.loss_error, "largest": found.largest, "tolerance": found.tolerance}


# -- memory and time -----------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A transformer block without attention, large enough that activations outweigh the workspaces of libraries."""

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
    """Return the measured and the predicted peak bytes of this rank in its third step with AdamW, and a timeline."""
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
        estimate = pipe.plan.outlook.estimates[pipe.rank]
    assert timeline is not None
    spans = [(span.rank, str(span.action), span.start_ns, span.end_ns) for span in timeline.spans]
    return {"measured": measured, "predicted": estimate.peak_bytes, "libraries": libraries, "spans": spans}


def _library_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of workspace that matrix products leave allocated."""
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    left = torch.ones(64, 64, dtype=dtype, device="cuda").requires_grad_()
    (left @ left).sum().backward()
    left.grad = None
    del left
    return torch.cuda.memory_allocated() - before


# -- NCCL ----------------------------------------------------------------------------------------------------------


class HandedOverByNccl(dict[Action, Tensors]):
    """A mailbox between the stages of one rank that sends its tensors over NCCL to the rank itself."""

    def __init__(self, carrier: NcclCarrier) -> None:
        super().__init__()
        self._carrier = carrier
        self._under_way: dict[Action, tuple[NcclPosted, Tensors]] = {}
        self.messages = 0

    def __setitem__(self, action: Action, tensors: Tensors) -> None:
        specs = [torch.empty_like(t, device="meta") for t in tensors]
        data = pack(tensors, specs)
        posted = self._carrier.post(0, [(action, data)], [(action, data.numel())])
        self._under_way[action] = posted, specs
        self.messages += 1

    def pop(self, action: Action, *default: Any) -> Tensors:
        """Wait for the message and return its tensors."""
        posted, specs = self._under_way.pop(action)
        posted.wait()
        return unpack(posted.received[0], specs)


@contextmanager
def _alone() -> Iterator[None]:
    """Open a process group of this process only."""
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
    """Run a step of four stages on one rank with all messages over NCCL; a host synchronization is an error."""
    exact()
    handed: list[HandedOverByNccl] = []

    def prepare(engine: Engine, world: World) -> None:
        carrier = NcclCarrier(world.rank, world.device, lambda *_: dist.group.WORLD)
        carrier._groups[0] = dist.new_group([0], backend="nccl")
        engine._player.mailbox._handed = HandedOverByNccl(carrier)
        handed.append(engine._player.mailbox._handed)
        play = engine._play

        def without_waiting(*args: Any) -> int:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                return play(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        engine._play = without_waiting  # type: ignore[method-assign]

    with _alone():
        found = step((0, 0, 0, 0), "alone", 3, "nccl", "cuda", prepare)
    return {**found, "messages": handed[0].messages, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}


def bytes_through_nccl(sizes: list[int]) -> list[bool]:
    """Send messages of the given sizes over NCCL to the rank itself and return which arrived intact.

    The work that fills a message is still running when it is posted. The message is overwritten after the wait.
    """
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


# -- tests -----------------------------------------------------------------------------------------------------------


DEVICES = torch.cuda.device_count()
Record = Callable[[str, object], None]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),  # ends deadlocks between streams
    pytest.mark.skipif(not DEVICES, reason="needs a CUDA device; this machine shows none"),
]
two_devices = pytest.mark.skipif(DEVICES < 2, reason=f"needs two CUDA devices; this machine shows {DEVICES}")


@pytest.fixture(scope="module")
def two() -> Iterator[Workers]:
    with Workers(2, timeout=240) as pool:
        yield pool


@pytest.fixture(scope="module")
def four() -> Iterator[Workers]:
    with Workers(4, timeout=240) as pool:
        yield pool


def _check(results: list, dtype: str, record: Record) -> None:
    losses, found = results[0]
    assert all(others == losses for others, _ in results)
    for device, one in found.items():
        record(f"gradient_error_against_{device}", f"{one.gradient:.2e}")
    assert found["cuda"].within(getattr(torch, dtype)), found["cuda"]
    against_cpu = found["cpu"]
    limit = 1e-4 if dtype == "float32" else 1e-10  # sums in another order
    assert max(abs(against_cpu.loss), against_cpu.gradient, against_cpu.buffer) <= limit, against_cpu


MODELS = [
    ("gpt2", "float32"), ("llama_tied", "float32"), ("bert", "float64"), ("t5", "float32"), ("resnet", "float64"),
    ("vit", "float64"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), MODELS)
def test_two_ranks_on_one_device(two: Workers, record_property: Record, name: str, dtype: str) -> None:
    schedule = SCHEDULES[len(name) % len(SCHEDULES)]
    on = "cuda" if name in ("gpt2", "resnet") else "cpu"
    _check(two.run(trained, name, schedule, 3, 12, dtype, "gloo", on), dtype, record_property)


@pytest.mark.parametrize(("name", "dtype"), [("gpt2", "float32"), ("resnet", "float64"), ("skips", "float64")])
def test_four_ranks_on_one_device(four: Workers, record_property: Record, name: str, dtype: str) -> None:
    _check(four.run(trained, name, "1f1b", 4, 12, dtype, "gloo", "cpu"), dtype, record_property)


def test_masks_do_not_depend_on_the_stages(two: Workers) -> None:
    (loss, gradients), (other, others) = two.run(masks, 1)[0], two.run(masks, 2)[0]
    assert other == pytest.approx(loss, rel=1e-6)
    assert all(torch.allclose(gradients[n], others[n], rtol=1e-5, atol=1e-8) for n in gradients)


@pytest.mark.parametrize("name", ["gpt2", "llama_tied"])
def test_parameters_in_bf16(two: Workers, record_property: Record, name: str) -> None:
    found = two.run(verified, name, "bfloat16", 12)[0]
    record_property("largest_gradient_error", f"{found['largest']:.2e}")
    assert found["ok"], found


@pytest.mark.parametrize(
    ("ranks", "recompute", "dtype"),
    [(1, "off", "float32"), (2, "off", "float32"), (2, "all", "float32"), (2, "off", "bfloat16")],
)
def test_memory_is_what_the_plan_says(
    two: Workers, record_property: Record, ranks: int, recompute: str, dtype: str
) -> None:
    found = two.run(held, recompute, dtype) if ranks == 2 else launch(held, 1, recompute, dtype, timeout=240)
    errors = [one["measured"] / one["predicted"] - 1 for one in found]
    record_property("measured_bytes", [one["measured"] for one in found])
    record_property("predicted_bytes", [one["predicted"] for one in found])
    record_property("error", [f"{error:+.1%}" for error in errors])
    record_property("library_bytes", [one["libraries"] for one in found])
    assert max(map(abs, errors)) <= 0.1, errors


def test_a_trace_is_of_the_device(two: Workers) -> None:
    spans = two.run(held, "off", "float32")[0]["spans"]
    for rank in (0, 1):
        own = sorted((start, end, action) for who, action, start, end in spans if who == rank)
        assert all(0 <= start <= end for start, end, _ in own)
        assert all(before[1] <= after[0] for before, after in pairwise(own))
        computes = [end - start for start, end, action in own if action[1] in "FB"]
        assert min(computes) > 10_000  # longer than a host takes to enqueue a block


def test_four_stages_talk_over_nccl_on_one_device_without_a_wait_of_the_host(record_property: Record) -> None:
    found = launch(through_nccl_to_itself, 1, timeout=200)[0]
    record_property("messages", found["messages"])
    record_property("nccl", found["nccl"])
    assert found["messages"] > 12
    assert found["loss"] == pytest.approx(found["expected"], rel=1e-5)
    assert found["gradients"] < 1e-5, found["worst"]


def test_what_is_sent_over_nccl_is_what_was_computed(record_property: Record) -> None:
    sizes = [1, 3, 64, 4097, 2**20 + 1, 2**26]
    assert launch(bytes_through_nccl, 1, sizes, timeout=200)[0] == [True] * len(sizes)


@two_devices
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["stack", "tied", "skips"])
def test_two_stages_on_two_devices_train_as_one_process(
    two: Workers, record_property: Record, name: str, schedule: str
) -> None:
    _check(two.run(trained, name, schedule, 4, 10, "float32", "nccl", "cpu"), "float32", record_property)


@two_devices
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_two_devices_that_compute_together_train_as_one_process(
    two: Workers, record_property: Record, name: str
) -> None:
    _check(two.run(trained, name, "1f1b", 4, 10, "float32", "nccl", "cpu", 2), "float32", record_property)


def test_two_ranks_that_compute_together_on_one_device(two: Workers, record_property: Record) -> None:
    _check(two.run(trained, "gpt2", "1f1b", 3, 12, "float32", "gloo", "cuda", 2), "float32", record_property)

"""On CUDA devices, loss and gradients equal those of one process, over NCCL and, on one device, over Gloo.

`python benchmarks/gpu_tests.py` runs these tests and writes the results with the device's name to a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from support.jobs.cuda_jobs import bytes_through_nccl, held, masks, through_nccl_to_itself, trained, verified
from support.workers import Workers

from autopart.passes.program.named import FAMILY as SCHEDULES
from autopart.runtime.launch.local import launch

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

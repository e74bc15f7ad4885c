"""A kind of device from outside: one row of `DEVICE_KINDS`, and clusters of it are described, planned and trained on.

It stands on the CPU here and takes the messages that there are; a kind with a transport of its own adds an entry of
`CARRIERS`, which is the second file that a newcomer touches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support.workers import Workers
from torch import nn
from torch.nn import functional

import autopart
from autopart.files.clusters import cluster_to_yaml, parse_cluster
from autopart.ir.cluster import DEVICE_KINDS
from autopart.ir.errors import ClusterError

ROW = replace(
    DEVICE_KINDS["cpu"], beside=True, launch_ns=500, own=(2**30, 10**12, 10**11), link=(1_000, 10**10), of_host=2
)


@contextmanager
def registered() -> Iterator[None]:
    kinds = cast(dict[str, Any], DEVICE_KINDS)
    kinds["npu"] = ROW
    try:
        yield
    finally:
        del kinds["npu"]


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    x, y = (torch.randn(8, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def trained() -> tuple[int, float, list[torch.Tensor]]:
    with registered():
        options: dict[str, Any] = {"loss_fn": functional.mse_loss, "stages": 2, "micro_batches": 2}
        with autopart.compile(net(), "npu:2", sample=batch(), **options) as pipe:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            pipe.step(batch())
            optimizer.step()
            loss = pipe.step(batch()).item()
        return len(pipe.plan.stages), loss, [p.detach() for p in pipe.model.parameters()]


def test_a_cluster_of_it_is_described_in_a_word_and_in_a_file(tmp_path: Path) -> None:
    with registered():
        cluster = parse_cluster("npu:4")
        assert [level.size for level in cluster.levels] == [2, 4]
        device, link = cluster.devices[0], cluster.levels[0].link
        assert (device.memory_bytes, device.flops_per_s, device.mem_bytes_per_s) == ROW.own
        assert (link.latency_ns, link.bytes_per_s) == ROW.link
        (tmp_path / "npu.yaml").write_text(cluster_to_yaml(cluster))
        assert parse_cluster(tmp_path / "npu.yaml") == cluster
    with pytest.raises(ClusterError, match="'cpu' or 'cuda'"):
        parse_cluster(tmp_path / "npu.yaml")
    with pytest.raises(ClusterError, match="not understood"):
        parse_cluster("npu:4")


def test_a_plan_for_it_counts_what_its_row_says() -> None:
    def planned(**change: Any) -> int:
        with registered():
            cast(dict[str, Any], DEVICE_KINDS)["npu"] = replace(ROW, **change)
            plan = autopart.plan(net(), "npu:1", sample=batch(), loss_fn=functional.mse_loss, costs="analytic")
            return plan.outlook.step_ns

    assert planned(launch_ns=100_000) > planned() + 8 * 99_000


@pytest.mark.timeout(300)
def test_two_ranks_of_it_train_as_one_process_does(pair: Workers) -> None:
    model, (x, y) = net(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    functional.mse_loss(model(x), y).backward()
    optimizer.step()
    expected = functional.mse_loss(model(x), y).item()
    for stages, loss, _ in (found := pair.run(trained)):
        assert stages == 2 and loss == pytest.approx(expected, rel=1e-12)
    for mine, plain in zip(found[0][2], model.parameters(), strict=True):
        torch.testing.assert_close(mine, plain.detach(), rtol=1e-11, atol=1e-13)

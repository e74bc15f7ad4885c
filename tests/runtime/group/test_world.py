"""What carries messages, and on which device a rank stands."""

from __future__ import annotations

import gc
import multiprocessing

import pytest

from autopart.ir.errors import ClusterError, UsageError
from autopart.options import read_options
from autopart.runtime.group.shared_group import shared_group
from autopart.runtime.group.world import AUTO, GLOO, NCCL, World, local_ranks, require_devices, transport_of


def test_cuda_devices_talk_over_nccl_unless_asked_otherwise() -> None:
    assert transport_of("cuda", AUTO) == transport_of("cuda", NCCL) == NCCL
    assert transport_of("cuda", GLOO) == transport_of("cpu", AUTO) == transport_of("cpu", GLOO) == GLOO
    with pytest.raises(ClusterError, match="no CUDA devices"):
        transport_of("cpu", NCCL)
    with pytest.raises(UsageError, match="unknown transport 'mpi'"):
        read_options(transport="mpi")


def test_nccl_wants_a_device_for_each_rank_and_gloo_shares_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (local_ranks(16), local_ranks(2)) == (4, 2)
    require_devices(1, 4, GLOO)
    require_devices(4, 4, NCCL)
    with pytest.raises(ClusterError, match=r"4 ranks run on this host, which shows 1 CUDA device\n"):
        require_devices(1, 4, NCCL)
    for transport in (GLOO, NCCL):
        with pytest.raises(ClusterError, match="this host shows none"):
            require_devices(0, 1, transport)


def _forked_over_a_dead_group() -> int | None:
    """Return the exit code of a process that was forked while a group was garbage, and collected it."""
    gc.disable()
    world, circle = World("cpu", 2), []
    circle.append([circle, shared_group.group])
    world.close()
    del circle, world
    child = multiprocessing.get_context("fork").Process(target=gc.collect)
    child.start()
    gc.enable()
    child.join(30.0)
    child.kill()
    return child.exitcode


@pytest.mark.timeout(300)
def test_a_forked_process_never_destroys_a_group_of_its_parent(pair) -> None:
    assert pair.run(_forked_over_a_dead_group) == [0, 0]

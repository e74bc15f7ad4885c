"""Ranks are lost and come back while a run goes on: the same losses, each sample once an epoch."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
import torch
from support.jobs.failures import elastic_jobs as jobs
from support.jobs.failures.fault_runs import environment
from support.workers import Workers
from torch import nn

import autopart
from autopart.runtime.stages.stage import StageRunner

WIDTH, ROWS = 384, 24


def net() -> nn.Module:
    """Return a tower of equal layers in fp64."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))).double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of a step."""
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


@contextmanager
def slowed(factor: float) -> Iterator[None]:
    """Let every forward and backward of this process take `factor` times as long, by a busy loop behind it."""

    def slow(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = method(*args, **kwargs)
            end = time.perf_counter() + (factor - 1) * (time.perf_counter() - began)
            while time.perf_counter() < end:
                pass
            return result

        return run

    with ExitStack() as stack:
        for name in ("forward", "backward"):
            stack.enter_context(mock.patch.object(StageRunner, name, slow(getattr(StageRunner, name))))
        yield


def shares(plan: autopart.Plan, rank: int) -> float:
    """Return the part of all work that a rank has: ops of its stages, each by its share of the rows."""
    whole = sum(len(stage.ops) for stage in plan.stages)
    own = 0.0
    for stage in plan.stages:
        if rank in stage.ranks:
            parts = stage.division.shares
            own += len(stage.ops) * parts[stage.ranks.index(rank) // stage.division.shards] / sum(parts)
    return own / whole


def train(
    world: int, slow_rank: int, more: int, costs: str = "analytic", options: Mapping[str, Any] = MappingProxyType({})
) -> tuple[list[float], int, bool, float, float]:
    """Train 12 steps, then with a slow rank until it is named, and some more under a new plan.

    Returns the losses, after how many slow steps it was named (0: never within 40), whether a plan was adopted, and
    the part of the work that the slow rank had before and has then."""
    torch.set_num_threads(1)
    named, losses = 0, []
    asked: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "costs": costs, **options}
    with autopart.compile(net(), f"cpu:{world}", sample=batch(0), **asked) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)

        def step() -> None:
            optimizer.zero_grad()
            losses.append(float(pipe.step(batch(pipe.steps))))
            optimizer.step()

        for _ in range(12):
            step()
        with slowed(3.0) if pipe.rank == slow_rank else nullcontext():
            for number in range(1, 41):
                step()
                if slow_rank in pipe.stragglers:
                    named = number
                    break
            before = shares(pipe.plan, slow_rank)
            found = pipe.replan(optimizer, steps=10**6)
            for _ in range(more):
                step()
        return losses, named, found.adopted, before, shares(pipe.plan, slow_rank)


def plainly(steps: int) -> list[float]:
    """Return the losses of the same training in one process."""
    model, losses = net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# -- tests -----------------------------------------------------------------------------------------------------------


pytestmark = pytest.mark.timeout(400)
HALVES = {"stages": 2, "replicas": 2, "zero": 0}


@pytest.mark.slow
def test_three_of_four_ranks_go_on_after_a_kill_and_the_fourth_joins_back(tmp_path: Path) -> None:
    run = jobs.Run(str(tmp_path), kills=((2, 4),), pause_s=0.2)
    results = autopart.launch(jobs.train, jobs.slow_cluster(4), run, elastic=(2, 4), rejoin=3.0, timeout=300)
    steps = jobs.noted(run.folder)
    jobs.require_each_sample_once(steps)
    assert jobs.largest_error(steps) < 1e-10
    assert results == [(2, len(steps))] * 4
    assert {each.world for each in steps if each.generation == 1} == {3}
    assert steps[-1].world == 4
    assert all(each.working == each.world for each in steps)


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "left"), [(2, 2), ("auto", 3)])
def test_groups_of_ranks_go_on_after_a_kill_with_as_many_as_fit(tmp_path: Path, asked: int | str, left: int) -> None:
    options = {"tensor_parallel": asked, "transport": "gloo"}
    run = jobs.Run(str(tmp_path), kills=((2, 4),), pause_s=0.2, alike=True, options=options)
    autopart.launch(jobs.train, jobs.slow_cluster(4, alike=True), run, elastic=(2, 4), rejoin=6.0, timeout=300)
    steps = jobs.noted(run.folder)
    jobs.require_each_sample_once(steps)
    assert jobs.largest_error(steps) < 1e-10
    worlds = [each.world for each in steps]
    assert left in worlds and worlds[-1] == 4 and set(worlds) <= {4, left}


def launched(run: jobs.Run) -> list[jobs.Noted]:
    """Run on four ranks that may become three, and return all steps, after comparing those that counted."""
    autopart.launch(jobs.train, jobs.slow_cluster(4), run, elastic=(2, 4), rejoin=1.0, timeout=300)
    steps = jobs.noted(run.folder)
    jobs.require_each_sample_once(steps)
    assert jobs.largest_error(steps) < 1e-10
    return jobs.every_step(run.folder)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 3])
def test_a_replica_is_killed_and_no_step_is_lost(tmp_path: Path, rank: int, capfd: pytest.CaptureFixture[str]) -> None:
    run = jobs.Run(str(tmp_path), kills=((rank, 5),), pause_s=0.1, options=HALVES)
    steps = launched(run)
    assert [each.step for each in steps] == list(range(1, len(steps) + 1)) and steps[5].world == 3
    assert "training continues from memory after step 5; the last checkpoint is of step 3" in capfd.readouterr().err


@pytest.mark.slow
def test_replicas_are_killed_at_any_instant(tmp_path: Path) -> None:
    chosen = random.Random(3)
    kills = tuple(each for first in range(4, 24, 4) for each in ((chosen.randrange(4), first), None))
    later_s = tuple(chosen.uniform(0.0, 0.1) for _ in kills)
    steps = launched(jobs.Run(str(tmp_path), kills, later_s, steps=28, pause_s=0.02, options=HALVES))
    assert {each.generation for each in steps} >= set(range(10))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"replicas": 1}, HALVES | {"zero": 1}])
def test_without_a_holder_that_lives_the_checkpoint_is_loaded(
    tmp_path: Path, options: dict[str, int], capfd: pytest.CaptureFixture[str]
) -> None:
    steps = launched(jobs.Run(str(tmp_path), kills=((0, 5),), pause_s=0.1, options=options))
    assert next(each.step for each in steps if each.generation == 1) == 4
    assert "cannot continue from memory: after step 5 no rank that lives had" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("costs", ["analytic", "measured"])
@pytest.mark.parametrize("slow_rank", [0, 1])
def test_a_rank_slowed_to_a_third_is_named_and_gets_less(pair: Workers, slow_rank: int, costs: str) -> None:
    for losses, named, adopted, before, after in pair.run(train, 2, slow_rank, 3, costs):
        assert 0 < named <= 20
        assert adopted and after < 0.75 * before
        torch.testing.assert_close(losses, plainly(len(losses)), rtol=1e-10, atol=0)


@pytest.mark.slow
def test_ranks_that_divide_their_work_plan_again_while_one_is_slow(pair: Workers) -> None:
    for losses, *_ in pair.run(train, 2, 1, 3, "analytic", {"tensor_parallel": 2, "transport": "gloo"}):
        torch.testing.assert_close(losses, plainly(len(losses)), rtol=1e-10, atol=0)


def agent(run: jobs.Run, port: int) -> subprocess.Popen[bytes]:
    """Start an agent of torchrun with two ranks; the first one holds the store."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "2"]
    command += ["--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    command += ["--rdzv-conf", "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3", "--rdzv-id", "e"]
    command += ["-m", "support.jobs.failures.elastic_jobs", run.text()]
    env = environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with Path(run.folder, f"log-{time.monotonic_ns()}").open("wb") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)


def await_steps(folder: str, world: int, agents: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until the newest five steps were made by so many ranks, which have saved at least one of them."""
    end = time.monotonic() + 200
    while [each.world for each in jobs.every_step(folder)[-5:]] != [world] * 5:
        alive = [each.poll() is None for each in agents]
        logs = [path.read_text()[-3000:] for path in Path(folder).glob("log-*")]
        assert time.monotonic() < end and all(alive), "\n".join(logs)
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_under_torchrun_a_second_host_joins_and_is_lost(tmp_path: Path) -> None:
    Path(tmp_path, "steps").touch()
    run = jobs.Run(str(tmp_path), steps=10**9, pause_s=0.05)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    agents = [agent(run, port)]
    try:
        await_steps(run.folder, 2, agents)
        agents.append(agent(run, port))
        await_steps(run.folder, 4, agents)
        os.killpg(agents[1].pid, signal.SIGKILL)
        await_steps(run.folder, 2, agents[:1])
        agents[0].terminate()
        agents[0].wait(120)
    finally:
        for each in agents:
            with suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
            each.wait(20)
    steps = jobs.noted(run.folder)
    assert {each.world for each in steps} == {2, 4}
    jobs.require_each_sample_once(steps)
    assert jobs.largest_error(steps) < 1e-10

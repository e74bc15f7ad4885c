"""Tests of the GPU benchmark suite on CPUs, with successful and failed rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from autopart.ir.errors import UsageError
from benchmarks.gpu.half_hour import PARTS, Part, run
from benchmarks.gpu.jobs import Job, default_micros, reason
from benchmarks.gpu.pool import Pool
from benchmarks.gpu.rows import preset, row_of, table, with_rates
from benchmarks.gpu.workloads import MODELS, workload

SUITE = Path(__file__).parents[2] / "benchmarks/gpu"
JOB = Job("gpt2-xl", "ours", "fp32", "cpu", world=2, local=2, tiny=True)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return Pool()


def hang() -> dict[str, Any]:
    time.sleep(3600)
    return {}


def die() -> dict[str, Any]:
    os._exit(3)


def fail() -> dict[str, Any]:
    raise UsageError("no such thing", why="it was never made") from None


def rank() -> dict[str, Any]:
    return {"rank": os.environ["RANK"]}


def test_a_job_that_hangs_dies_or_fails_has_a_reason_and_the_next_job_runs(pool: Pool) -> None:
    assert pool.run(hang, limit_s=0.5) == [{"reason": "ended after 0.5 s", "late": True}]
    assert pool.run(die, limit_s=30) == [{"reason": "the process died (exit code 3)"}]
    assert pool.run(fail, limit_s=30) == [{"reason": "UsageError: no such thing: it was never made"}]
    assert pool.run(rank, limit_s=30) == [{"rank": "0"}]


def test_a_part_of_the_half_hour_that_fails_or_hangs_is_named_and_leaves_no_process(tmp_path: Path) -> None:
    good, bad = (
        Part("part", (sys.executable, "-c", code), 30.0) for code in ("print('a row')", "raise SystemExit('no device')")
    )
    assert run(good, tmp_path, dry=False) == ""
    assert run(bad, tmp_path, dry=False) == "exit code 1\nno device"
    slow = Part("part", (sys.executable, "-c", "import time; print('a row', flush=True); time.sleep(3600)"), 1.0)
    assert run(slow, tmp_path, dry=False).startswith("cut off after 1 s")
    assert sum(part.limit_s for part in PARTS) <= 32 * 60


def test_the_cause_of_an_error_is_the_reason() -> None:
    try:
        try:
            raise ValueError("the true one\nand more")
        except ValueError as error:
            raise RuntimeError("stage 0 failed") from error
    except RuntimeError as error:
        assert reason(error) == "ValueError: the true one"


def answer(seconds: list[float], **more: Any) -> dict[str, Any]:
    return {"seconds": seconds, "losses": [2.0, 1.0], "micro_rows": [4, 4], "devices": 2, "peak_bytes": 90, **more}


def test_a_row_is_that_of_the_slowest_rank_and_marks_wrong_losses() -> None:
    planned = {"simulated_s": 0.15, "predicted_peak_bytes": 99}
    row = row_of(JOB, [answer([0.1, 0.3, 0.2], reference=[2.0, 1.1], **planned), answer([0.2, 0.1, 0.1], **planned)])
    assert row["seconds"].median == 0.2
    assert row["per_second"] == pytest.approx(8 * 16 / 0.2)
    assert row["step_error"] == pytest.approx(-0.25)
    assert row["peak_error"] == pytest.approx([0.1, 0.1])
    assert row["loss_difference"] == pytest.approx(0.1 / 1.1) and not row["alike"]
    cluster = preset("NVIDIA H100 80GB HBM3", 80 * 10**9, world=16, local=8, gpus=8)
    with_rates([row], {"gpt2-xl": 67e12}, cluster)
    assert row["mfu"] == pytest.approx(67e12 * 8 / 0.2 / 2 / 67e12)
    assert "-25.0%" in table([row]) and "9e-02 !" in table([row])


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([{"reason": "another rank failed", "late": True}, {"reason": "ValueError: no"}], "rank 1: ValueError: no"),
        ([{"reason": "one device", "stays": True}, {"reason": "one device", "stays": True}], "one device"),
        ([{"reason": "another rank failed"}, {"reason": "ended after 9 s", "late": True}], "rank 1: ended after 9 s"),
    ],
)
def test_a_failed_row_has_the_first_reason(answers: list[dict[str, Any]], expected: str) -> None:
    row = row_of(JOB, answers)
    assert row["reason"] == expected
    assert table([row]).endswith(f" (1) {expected}")


def test_a_cluster_preset_is_found_by_the_name_of_the_gpu() -> None:
    two = preset("NVIDIA H100 80GB HBM3", 85 * 10**9, world=16, local=8, gpus=8)
    assert two is not None and [level.size for level in two.levels] == [8, 16]
    assert two.devices[0].rate("bfloat16") == 98_950 * 10**10 and two.devices[0].memory_bytes == 85 * 10**9
    shared = preset("NVIDIA H100 80GB HBM3", 85 * 10**9, world=4, local=4, gpus=1)
    assert shared is not None and shared.devices[0].rate("float32") == 67 * 10**12 // 4
    assert preset("GeForce 256", 2**25, world=1, local=1, gpus=1) is None


def test_every_model_is_cut_into_equal_layers() -> None:
    for name in MODELS:
        work = workload(name, scale=0.01)
        assert work.count >= 2 and len(work.cuts(2)) == 1
    assert workload("gpt2-xl").cuts(4) == ("transformer.h.12", "transformer.h.24", "transformer.h.36")
    assert [default_micros(rows, 2) for rows in (1, 2, 7, 8, 12, 64)] == [1, 1, 1, 4, 6, 8]


def dry_run(folder: Path, *options: str, timeout: float) -> tuple[dict[str, Any], str]:
    """Run the command under torchrun on two CPU ranks and return its result file and its output."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    env |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [*TORCHRUN, str(SUITE), "--dry-run", "--costs", "analytic", "--warmup", "1", "--repeats", "2", *options]
    done = subprocess.run(
        [*command, "--folder", str(folder)], env=env, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "gpu.json").read_text()), done.stdout


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_command_runs_on_two_ranks(tmp_path: Path) -> None:
    options = ["--models", "llama-1b", "--precisions", "fp32", "--plans", "ours, equal layers", "DDP"]
    found, expected = dry_run(tmp_path, *options, timeout=180)
    ours, parallel = found["rows"]
    assert ours["alike"] and ours["replicas"] == [1, 1] and ours["simulated_seconds"] > 0
    assert 0 < ours["measured_bubble"] < 1 and ours["flops"] > 0
    assert parallel["alike"] and parallel["flops"] == ours["flops"]
    assert "ours, equal layers" in expected
    assert found["command"].startswith("torchrun --nnodes 1 --nproc-per-node 2 benchmarks/gpu --dry-run")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_whole_grid_runs_and_autopart_is_exact_everywhere(tmp_path: Path) -> None:
    found, _ = dry_run(tmp_path, "--limit", "120", timeout=1400)
    rows = found["rows"]
    assert len(rows) == 5 * 6 * 2
    for row in rows:
        if row["plan"].startswith("ours") or row["plan"] in ("one device", "DDP"):
            assert row.get("alike"), row
        assert "seconds" in row or row["reason"]

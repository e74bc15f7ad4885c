"""Metrics of a step: the same on every rank, equal to what is counted by hand, and free until they are asked for."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.languages.plans import changed, example
from support.workers import Workers
from torch import nn

import autopart
from autopart.extras.metrics import sinks
from autopart.extras.metrics.log import MetricsLog
from autopart.extras.metrics.metrics import DRIFT_STEPS, Meter, Metrics, drift_line
from autopart.ir.actions import parse_action
from autopart.ir.errors import UsageError
from autopart.ir.plan import Plan
from autopart.ir.timeline import Span

ROWS, TOKENS, VOCABULARY, WIDTH = 8, 6, 32, 16


class Sentences(nn.Module):
    """A network over tokens whose work is known: two products of each token with a matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.middle = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.head = nn.Linear(4 * WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.middle(self.table(ids)).tanh())
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


FLOPS = 3 * 2 * ROWS * TOKENS * (WIDTH * 4 * WIDTH + 4 * WIDTH * VOCABULARY)
"""Of a step: forward and twice as much backward, a multiplication and an addition for each weight and token."""


def batch(rows: int = ROWS) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(rows)
    ids = torch.randint(0, VOCABULARY, (rows, TOKENS), generator=source)
    return {"ids": ids, "labels": ids}


def measured(folder: Path | None = None, **options: Any) -> dict[str, Any]:
    """Train some steps, and return the metrics of each, with what they should be."""
    torch.set_num_threads(1)
    given = {"costs": "analytic", "micro_batches": 4, "stages": 2, **options}
    found: dict[str, Any] = {"metrics": [], "losses": [], "norms": []}
    with autopart.compile(Sentences(), "cpu:2", sample=batch(), **given) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for number in range(4):
            found["losses"].append(pipe.step(batch()).item())
            if number == 1:
                found["norms"].append(float(pipe.clip_grad_norm_(0.01)))
            elif number < 3:
                grads = [grad for grad in pipe.gradients().values() if grad is not None]
                found["norms"].append(math.sqrt(sum(float(grad.square().sum()) for grad in grads)))
            else:
                found["norms"].append(None)
                pipe.zero_grad()
            found["metrics"].append(pipe.metrics())
            optimizer.step()
            pipe.zero_grad()
        found["spans after"] = pipe.session.spans
        found["plan"] = pipe.plan
        found["devices"] = pipe.cluster.devices
        pipe.step(batch(ROWS // 2))
        found["other"] = pipe.metrics()
        if folder is not None:
            pipe.timeline(batch())
            found["report"] = pipe.report(folder / "run.html")
            found["fragment"] = pipe._repr_html_()
    return found


def logged(folder: Path) -> list[Metrics | None]:
    """Write a log of five steps, a line for every second one, and return what it returned."""
    torch.set_num_threads(1)
    options: dict[str, Any] = {"costs": "analytic", "micro_batches": 2, "stages": 2}
    found = []
    with (
        autopart.compile(Sentences(), "cpu:2", sample=batch(), **options) as pipe,
        autopart.MetricsLog(folder / "run.jsonl", every=2, tensorboard=False) as log,
    ):
        for number in range(5):
            pipe.step(batch())
            found.append(log.add(pipe, lr=0.5 * number, note="warm-up"))
    return found


def lines(folder: Path) -> list[dict[str, Any]]:
    """Return what a log wrote."""
    return [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]


# -- tests -----------------------------------------------------------------------------------------------------------


NUMBERS = Metrics(
    step=3, loss=2.5, grad_norm=1.25, skipped=False, loss_scale=None, step_s=0.2, predicted_s=0.1, rows_per_s=40.0,
    tokens_per_s=4000.0, flops_per_s=3e12, mfu=0.3, bubble=0.2, predicted_bubble=0.1,
    stage_s=((0.01, 0.02), (0.01, 0.03)), peak_bytes=(2**30, 2**31), predicted_peak_bytes=(1, 2),
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def ran(pair: Workers, folder: Path) -> list[dict[str, Any]]:
    return pair.run(measured, folder)


def test_all_ranks_have_the_same_metrics(ran: list[dict[str, Any]]) -> None:
    here, there = ran
    assert here["metrics"] == there["metrics"]


def test_loss_norm_and_rates_are_those_of_the_step(ran: list[dict[str, Any]]) -> None:
    peak_rate = sum(device.rate("float32") for device in ran[0]["devices"])
    for number, found in enumerate(ran[0]["metrics"]):
        assert (found.step, found.loss) == (number + 1, pytest.approx(ran[0]["losses"][number]))
        assert found.grad_norm == (pytest.approx(ran[0]["norms"][number], rel=1e-5) if number < 3 else None)
        assert found.rows_per_s * found.step_s == pytest.approx(ROWS)
        assert found.tokens_per_s * found.step_s == pytest.approx(ROWS * TOKENS)
        assert found.flops_per_s * found.step_s == pytest.approx(FLOPS, rel=0.1)  # besides: tanh, the loss
        assert found.mfu == pytest.approx(found.flops_per_s / peak_rate)
        assert found.loss_scale is None and not found.skipped
        assert found.predicted_s == pytest.approx(ran[0]["plan"].step_without_optimizer_ns * 1e-9)


def test_a_step_is_timed_from_the_first_call_on(ran: list[dict[str, Any]]) -> None:
    first, *others = ran[0]["metrics"]
    assert first.bubble is None and first.stage_s == ()
    for found in others:
        assert 0 < found.bubble < 1 and len(found.stage_s) == 2
        assert all(forward > 0 and backward > 0 for forward, backward in found.stage_s)
        assert sum(map(sum, found.stage_s)) * 4 <= 2 * found.step_s
    assert ran[0]["spans after"] is None


def test_memory_is_that_of_every_rank(ran: list[dict[str, Any]]) -> None:
    for found in ran[0]["metrics"]:
        assert len(found.peak_bytes) == 2 and all(size > 2**26 for size in found.peak_bytes)
        assert found.predicted_peak_bytes == tuple(e.peak_bytes for e in ran[0]["plan"].estimates)


def test_another_kind_of_batch_is_not_compared_with_the_plan(ran: list[dict[str, Any]]) -> None:
    assert ran[0]["other"].predicted_s is None
    assert ran[0]["other"].rows_per_s * ran[0]["other"].step_s == pytest.approx(ROWS // 2)


def test_a_pipe_writes_its_report_on_rank_0(ran: list[dict[str, Any]], folder: Path) -> None:
    assert ran[0]["report"] == folder / "run.html" and ran[1]["report"] is None
    page = (folder / "run.html").read_text()
    assert "<h1>autopart: Sentences</h1>" in page and "measured, whole process" in page and 'id="compared"' in page
    assert "<table>" in ran[1]["fragment"] and "5 steps taken" not in ran[1]["fragment"]
    assert "6 steps taken" in ran[1]["fragment"]


def test_a_log_has_a_line_for_every_second_step(pair: Workers, tmp_path: Path) -> None:
    returned = pair.run(logged, tmp_path)[0]
    assert [found.step if found else None for found in returned] == [None, 2, None, 4, None]
    written = lines(tmp_path)
    assert [line["step"] for line in written] == [2, 4]
    assert [line["lr"] for line in written] == [0.5, 1.5] and written[0]["note"] == "warm-up"
    assert written[1]["loss"] == returned[3].loss and written[1]["peak_bytes"] == list(returned[3].peak_bytes)


class Still:
    """What a log needs of a pipe."""

    is_main, steps = True, 3

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def metrics(self) -> Metrics:
        return self._metrics


def test_a_log_keeps_numbers_that_json_lacks(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "run.jsonl", tensorboard=False) as written:
        written.add(Still(replace(NUMBERS, loss=math.nan, grad_norm=math.inf)))
    (line,) = lines(tmp_path)
    assert (line["loss"], line["grad_norm"]) == ("nan", "inf")


def test_a_log_refuses_what_it_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="cannot write metrics"):
        MetricsLog(tmp_path / "none" / "run.jsonl", tensorboard=False).add(Still(NUMBERS))
    with pytest.raises(UsageError, match="loss is a metric already"):
        MetricsLog(tmp_path / "run.jsonl", tensorboard=False).add(Still(NUMBERS), loss=3.0)
    with pytest.raises(UsageError, match="every is 0"):
        MetricsLog(tmp_path / "run.jsonl", every=0)
    with pytest.raises(UsageError, match="'comet' is no sink") as caught:
        MetricsLog(tmp_path / "run.jsonl", to="comet")
    assert "mlflow, tensorboard, trackio, wandb" in caught.value.fix
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    for asked in ({"tensorboard": True}, {"to": ["wandb"]}):
        with pytest.raises(UsageError, match="is not installed") as caught:
            MetricsLog(tmp_path / "run.jsonl", **asked)
        assert caught.value.fix == f"pip install {'wandb' if 'to' in asked else 'tensorboard'}"


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsLog(tmp_path / "run.jsonl") as written:
        written.add(Still(NUMBERS), lr=0.5)
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    found = {name: events.Scalars(name)[0] for name in events.Tags()["scalars"]}
    assert found["lr"].value == 0.5 and found["mfu"].value == pytest.approx(0.3) and found["loss"].step == 3
    assert "loss_scale" not in found and found["peak_bytes"].value == 2**31


def test_metrics_print_as_one_line() -> None:
    assert str(NUMBERS) == (
        "step 3, loss 2.5, gradient norm 1.25, 200.0 ms (predicted 100.0), 4,000 tokens/s, 3 TFLOP/s, MFU 30.0%, "
        "bubble 20%, peak 2.00 GiB"
    )


def test_the_page_of_metrics_shows_these_lines() -> None:
    page = (Path(__file__).parents[3] / "docs/metrics.md").read_text()
    assert f"```text\n{NUMBERS}\n```" in page and f"```text\n{drift_line(NUMBERS, planned())}\n```" in page
    assert all(f"`{field.name}`" in page for field in fields(Metrics))


def planned() -> Plan:
    """A plan whose forward and backward of a micro-batch take 15 and 40 ms."""
    first, second = example().estimates
    estimates = (replace(first, fwd_ns=5 * 10**6, bwd_ns=10**7), replace(second, fwd_ns=10**7, bwd_ns=3 * 10**7))
    return changed(example(), step_ns=10**8, estimates=estimates)


def test_a_step_that_differs_from_its_prediction_names_the_stage() -> None:
    line = drift_line(NUMBERS, planned())
    assert "now 200.0 ms, +100% against 100.0 ms" in line and "\n" not in line and "pipe.replan()" in line
    assert "stage 0 differs most: forward and backward of a micro-batch take 30.00 ms, not 15.00 ms" in line
    assert drift_line(replace(NUMBERS, step_s=0.115), planned()) == ""
    assert drift_line(replace(NUMBERS, predicted_s=None), planned()) == ""


class Steps:
    """What a meter needs of a session."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.spans, self.road = plan, None, SimpleNamespace(ran_as_planned=True)


def test_a_meter_counts_the_steps_that_differ_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, session = Meter(timed=True), Steps(planned())
    clock = iter([moment for seconds in [0.5] * DRIFT_STEPS + [0.1, 0.5] for moment in (0.0, seconds)])
    monkeypatch.setattr("autopart.extras.metrics.metrics.time.perf_counter", lambda: next(clock))
    counts = []
    for _ in range(DRIFT_STEPS + 2):
        with meter.step(session):  # type: ignore[arg-type]
            session.spans.append(Span(0, parse_action("0F0"), 0, 1))  # type: ignore[attr-defined]
        counts.append(meter.drifting)
        assert len(meter.spans) == 1 and session.spans is None
    assert counts == [*range(1, DRIFT_STEPS + 1), 0, 1]


def test_a_meter_that_is_not_asked_times_no_action() -> None:
    meter, session = Meter(), Steps(planned())
    with meter.step(session):  # type: ignore[arg-type]
        assert session.spans is None
    assert meter.seconds > 0 and meter.drifting == 0 and autopart.MetricsLog is MetricsLog

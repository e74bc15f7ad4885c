"""Metrics reach Weights & Biases, MLflow and trackio by their own clients, without a network."""

from __future__ import annotations

import json
import math
import sqlite3
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from extras.metrics.test_metrics import NUMBERS, Still

import autopart
from autopart.extras.metrics.sinks import SINKS

WRITTEN = {"loss": 2.5, "mfu": 0.3, "lr": 0.5, "peak_bytes": 2**31, "skipped": 0.0}
pytestmark = pytest.mark.filterwarnings("default")  # those of the clients


def records(data: bytes, block: int = 1 << 15) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format, behind a head of 7 bytes."""
    place, whole = 7, b""
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def of_wandb(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, Any], Any]:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")

    def read() -> list[dict[str, float]]:
        from wandb.proto.wandb_internal_pb2 import Record

        rows = []
        for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
            for raw in records(path.read_bytes()):
                history = Record.FromString(raw).history
                items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in history.item}
                rows += [{**items, "step": history.step.num}] if items else []
        return rows

    options = {"project": "demo", "dir": str(folder), "mode": "offline", "reinit": "finish_previous"}
    return read, options, lambda: wandb.init(**options).finish


def of_mlflow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, Any], Any]:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (folder / "mlruns").as_uri())

    def read() -> list[dict[str, float]]:
        client, rows = mlflow.MlflowClient(), []
        for run in sorted(client.search_runs(["0"]), key=lambda run: run.info.start_time):
            metrics = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
            rows.append({**{name: found[0].value for name, found in metrics.items()}, "step": metrics["loss"][0].step})
        return rows

    def begun() -> Any:
        mlflow.start_run()
        return mlflow.end_run

    return read, {"run_name": "own"}, begun


def of_trackio(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, Any], Any]:
    monkeypatch.setenv("TRACKIO_DIR", str(folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    trackio = pytest.importorskip("trackio", reason="trackio is not installed")

    def read() -> list[dict[str, float]]:
        (path,) = folder.glob("*.db")
        rows = sqlite3.connect(path).execute("select step, metrics from metrics order by id").fetchall()
        return [{**json.loads(metrics), "step": step} for step, metrics in rows]

    def begun() -> Any:
        trackio.init(project="demo", auto_log_cpu=False)
        return trackio.finish

    return read, {"project": "demo", "auto_log_cpu": False}, begun


CLIENTS = {"wandb": of_wandb, "mlflow": of_mlflow, "trackio": of_trackio}


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_gets_every_number_in_a_run_of_its_own_and_in_that_of_the_script(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, options, begin = CLIENTS[name](tmp_path, monkeypatch)
    with autopart.MetricsLog(tmp_path / "run.jsonl", tensorboard=False, to={name: options}) as log:
        log.add(Still(NUMBERS), lr=0.5, note="a text")
        later = Still(replace(NUMBERS, step=4, loss=math.nan))
        log.add(later, lr=0.5)
    end = begin()
    with autopart.MetricsLog(tmp_path / "run.jsonl", tensorboard=False, to=name) as log:
        log.add(Still(NUMBERS), lr=0.5)
    end()  # it was left open
    first, again, *later = sorted(read(), key=lambda row: row["step"])
    for row in (first, again):
        assert row.items() >= {**WRITTEN, "step": 3}.items() and "note" not in row
    assert [row["step"] for row in later] == [4] or name == "mlflow"  # of which the first value of each run is read


def test_each_sink_is_tried() -> None:
    assert {*CLIENTS, "tensorboard"} == {*SINKS}

"""Runs of the pairs of scripts in `examples/`: how they are started, what they print and what they leave."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from autopart.cli.main import app

ROOT = Path(__file__).parents[4]
EXAMPLES = ROOT / "examples"
KILLING = ROOT / "tests/support/killed"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
TORCHRUN += ["--local-ranks-filter", "0"]


@dataclass(frozen=True)
class Pair:
    """A plain script, and the one over processes.

    limit: lines of code that the second one may add or change.  sizes: arguments that make both small; the last one
    takes `short` or `long`.  every: steps between two checkpoints.  calls: of `Pipe.step` in a step."""

    limit: int
    sizes: str
    short: int
    long: int
    every: int
    calls: int = 1


_GPT = "--rows 8 --tokens 16 --layers 2 --width 32 --lr 1e-3 --every 2 --steps"
_BERT = "--lines 6 --rows 6 --layers 1 --width 32 --epochs"
PAIRS = {
    "gpt": Pair(16, _GPT, 4, 8, every=2, calls=2),
    "lora": Pair(12, "--samples 20 --rows 8 --layers 2 --width 16 --epochs", 2, 3, every=3),
    "trainer": Pair(12, "--lines 34 --rows 4 --tokens 16 --layers 2 --width 32 --epochs", 1, 3, every=4, calls=2),
    "vision": Pair(12, "--images 32 --rows 8 --blocks 1 --width 4 --epochs", 1, 3, every=4),
    "accelerate": Pair(12, _BERT, 1, 3, every=4),
    "fabric": Pair(12, _GPT, 4, 8, every=2, calls=2),
    "fine_tune": Pair(12, _BERT, 1, 3, every=4),
    "preempted": Pair(12, "--samples 44 --rows 8 --depth 2 --width 8 --every 4 --epochs", 2, 3, every=4),
}


def arguments(name: str, folder: Path, length: int) -> list[str]:
    """Return the arguments of a small run that writes to a folder."""
    folder.mkdir(exist_ok=True)
    checkpoint = [] if name == "trainer" else ["--checkpoint", str(folder / "checkpoint")]
    out = [] if name in ("vision", "preempted") else ["--out", str(folder / "out")]
    return [*checkpoint, *out, *PAIRS[name].sizes.split(), str(length)]


@dataclass(frozen=True)
class Kill:
    """A SIGKILL of a rank at the start of a call of `Pipe.step`.  launcher: its launcher is killed first."""

    rank: int
    call: int
    launcher: bool


def command_run(name: str, kind: str, folder: Path, kill: Kill | None = None) -> subprocess.CompletedProcess[str]:
    """Run a script from the command line, as its docstring says.  kind: "plain" or "pipeline"."""
    env: dict[str, Any] = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(KILLING), str(ROOT)]), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(variable, None)
    if name in ("trainer", "accelerate"):
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if kill is not None:
        env |= {"KILLED_RANK": str(kill.rank), "KILLED_STEP": str(kill.call)}
        env |= {"KILLED_LAUNCHER": "1"} if kill.launcher else {}
    start = TORCHRUN if kind == "pipeline" and name != "gpt" else []
    script = str(EXAMPLES / f"{name}_{kind}.py")
    command = [sys.executable, *start, script, *arguments(name, folder, PAIRS[name].long)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)


def unbroken_run(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a pipeline to its end; again, from nothing, where its plan says that measurements disagree: such costs are
    not kept, so the next start might have another plan."""
    for _ in range(4):
        shutil.rmtree(folder, ignore_errors=True)
        done = command_run(name, "pipeline", folder)
        if done.returncode or not any("disagree" in note for note in plan_of(folder)["outlook"]["notes"]):
            break
    return done


def plan_of(folder: Path) -> dict[str, Any]:
    """Return the plan of the checkpoint that was written last."""
    path = max(folder.glob("**/checkpoint.json"), key=lambda file: file.stat().st_mtime)
    plan: dict[str, Any] = json.loads(path.read_text())["plan"]
    return plan


def losses_of(printed: str) -> dict[int, list[float]]:
    """Return the losses that were printed for each step; several for a step that was taken again after a restart."""
    found: dict[int, list[float]] = {}
    for step, loss in re.findall(r"^step (\d+) loss (\S+)", printed, re.MULTILINE):
        found.setdefault(int(step), []).append(float(loss))
    for loss, epoch in re.findall(r"^\{'loss': '?([^',]+).*'epoch': '?([^'}]+)", printed, re.MULTILINE):
        found.setdefault(round(float(epoch) * PAIRS["trainer"].every), []).append(float(loss))
    return found


def logged(folder: Path) -> list[dict[str, float]]:
    """Return what a Trainer kept of its steps and evaluations, without what is measured in seconds, and without the
    last line, which has the mean loss since the last start."""
    lines = json.loads((folder / "out/history.json").read_text())
    assert "train_loss" in lines.pop()
    return [{k: v for k, v in line.items() if "runtime" not in k and "per_second" not in k} for line in lines]


def step_losses(name: str, folder: Path, printed: str) -> list[float]:
    """Return the loss of each step of a run that was not interrupted, with all digits that there are."""
    if name == "trainer":
        return [line["loss"] for line in logged(folder) if "loss" in line]
    return [loss for losses in losses_of(printed).values() for loss in losses]


def result(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights that a run has left; of vision the averages too."""
    if name in ("gpt", "fabric"):
        return dict(torch.load(folder / "out"))
    files = {"lora": "adapter_model.safetensors", "trainer": "end/model.safetensors"}
    if name not in ("vision", "preempted"):
        return load_file(folder / "out" / files.get(name, "model.safetensors"))
    if (folder / "checkpoint").is_file():
        state = torch.load(folder / "checkpoint")
        averages = {k: v for k, v in state.get("averaged", {}).items() if k != "n_averaged"}
        return state["model"] | averages
    found = exported(folder)
    if name == "vision":
        found |= {f"module.{key}": each for key, each in exported(folder, "--averages").items()}
    return found


def exported(folder: Path, *options: str) -> dict[str, torch.Tensor]:
    """Return the weights of the checkpoints in a folder, by the command."""
    file = folder / f"exported{len(options)}.safetensors"
    done = CliRunner().invoke(app, ["checkpoint", "export", str(folder / "checkpoint"), str(file), *options])
    assert done.exit_code == 0, done.output
    return load_file(file)

"""The training scripts of `examples/`: few lines differ from the plain ones, and the results are equal.

`-m slow` runs them from the command line and kills a rank at a random step.
"""

from __future__ import annotations

import difflib
import importlib
import io
import os
import random
import re
import socket
import subprocess
import sys
import tokenize
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.jobs.failures.fault_runs import environment
from support.workers import Workers
from typer.testing import CliRunner

import autopart
from autopart.cli.main import app


def run_script(name: str, words: Sequence[str]) -> str:
    """Call `train` of a script as its command line does; return what this process printed."""
    module = importlib.import_module(name)
    out = io.StringIO()
    compiled = autopart.compile
    with ExitStack() as stack:

        def noted(*args: Any, **options: Any) -> autopart.Pipe:
            pipe = compiled(*args, **options)
            stack.callback(pipe.close)  # a script ends with its process, which lives on here
            return pipe

        stack.enter_context(redirect_stdout(out))
        stack.enter_context(torch.random.fork_rng())
        stack.enter_context(mock.patch.object(sys, "argv", [name, *words]))
        stack.enter_context(mock.patch.object(autopart, "compile", noted))
        module.train(module.arguments())
    return out.getvalue()


def losses_of(printed: str) -> dict[int, list[float]]:
    """Return the losses that were printed for each step; several for a step that was taken again after a restart."""
    found: dict[int, list[float]] = {}
    for step, loss in re.findall(r"^step (\d+) loss (\S+)", printed, re.MULTILINE):
        found.setdefault(int(step), []).append(float(loss))
    return found


ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
KILLING = Path(__file__).parents[2] / "support" / "killed"
SIZES = {
    "gpt": "--rows 8 --tokens 16 --layers 2 --width 32 --lr 1e-3 --every 2 --steps",
    "fine_tune": "--lines 6 --rows 6 --layers 1 --width 32 --epochs",
    "vision": "--images 32 --rows 8 --blocks 1 --width 4 --epochs",
    "lora": "--samples 20 --rows 8 --layers 2 --width 16 --epochs",
    "preempted": "--samples 44 --rows 8 --depth 2 --width 8 --every 4 --epochs",
}
SHORT = {"gpt": 4, "fine_tune": 1, "vision": 1, "lora": 2, "preempted": 2}
LONG = {"gpt": 8, "fine_tune": 3, "vision": 3, "lora": 3, "preempted": 3}
"""Steps or epochs of a run without and with a kill."""
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "--max-restarts",
    "1",
]


def code_of(script: str) -> list[str]:
    """Return the lines of a script without its docstring, comments and empty lines."""
    text = (EXAMPLES / f"{script}.py").read_text()
    kept: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        documents = token.type == tokenize.STRING and token.line.startswith('"""')
        if token.string.strip() and token.type != tokenize.COMMENT and not documents:
            kept |= set(range(token.start[0], token.end[0] + 1))
    return [line for number, line in enumerate(text.splitlines(), start=1) if number in kept]


@pytest.mark.parametrize(
    ("name", "limit"), [("gpt", 12), ("fine_tune", 6), ("vision", 6), ("lora", 6), ("preempted", 13)]
)
def test_a_script_adds_or_changes_few_lines_of_the_plain_one(name: str, limit: int) -> None:
    """Counted are lines of code that the plain script does not have, new indentation included."""
    plain, piped = code_of(f"{name}_plain"), code_of(f"{name}_pipeline")
    matcher = difflib.SequenceMatcher(None, plain, piped, autojunk=False)
    added = [
        piped[place] for tag, _, _, first, end in matcher.get_opcodes() if tag != "equal" for place in range(first, end)
    ]
    assert "import autopart" in added and len(plain) > 60
    assert len(added) <= limit, "\n".join(added)


def arguments(name: str, folder: Path, kind: str, length: int) -> list[str]:
    out = [] if name in ("vision", "preempted") else ["--out", str(folder / f"{kind}-out")]
    return ["--checkpoint", str(folder / kind), *out, *SIZES[name].split(), str(length)]


def plainly(name: str, folder: Path, length: int) -> dict[int, list[float]]:
    """Run the plain script in this process; return its losses."""
    return losses_of(run_script(f"{name}_plain", arguments(name, folder, "plain", length)))


def assert_same_losses(found: dict[int, list[float]], expected: dict[int, list[float]]) -> None:
    assert len(found) >= 4 and found.keys() == expected.keys()
    for step, losses in found.items():
        assert losses == pytest.approx(expected[step] * len(losses), rel=1e-6), step


def results(name: str, folder: Path) -> list[dict[str, torch.Tensor]]:
    """Return what the plain script and the other one saved: of vision the averages, of the others the weights."""
    if name == "gpt":
        from gpt_plain import GPT

        states = []
        for kind in ("plain", "pipeline"):
            model = GPT(2, 32, 4, 16)
            model.load_state_dict(torch.load(folder / f"{kind}-out"))
            states.append(dict(model.state_dict()))
        return states
    if name == "lora":
        return [load_file(folder / f"{kind}-out" / "adapter_model.safetensors") for kind in ("plain", "pipeline")]
    if name == "fine_tune":
        return [
            transformers.BertForSequenceClassification.from_pretrained(folder / f"{kind}-out").state_dict()
            for kind in ("plain", "pipeline")
        ]
    file = folder / "exported.safetensors"
    averages = ["--averages"] if name == "vision" else []
    done = CliRunner().invoke(app, ["checkpoint", "export", str(folder / "pipeline"), str(file), *averages])
    assert done.exit_code == 0, done.output
    if name == "preempted":
        return [torch.load(folder / "plain")["model"], load_file(file)]
    from vision_plain import network

    plain = torch.optim.swa_utils.AveragedModel(network(4, 1))
    plain.load_state_dict(torch.load(folder / "plain")["averaged"])
    exported = network(4, 1)
    exported.load_state_dict(load_file(file))
    return [plain.module.state_dict(), exported.state_dict()]


def assert_same_results(name: str, folder: Path) -> None:
    plain, piped = results(name, folder)
    assert plain.keys() == piped.keys()
    for key, tensor in plain.items():
        torch.testing.assert_close(piped[key], tensor, rtol=1e-6, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in ("lora", "fine_tune") else []) for name in SIZES]
)
def test_a_script_over_two_processes_equals_the_plain_one(pair: Workers, tmp_path: Path, name: str) -> None:
    expected = plainly(name, tmp_path, SHORT[name])
    words = arguments(name, tmp_path, "pipeline", SHORT[name])
    first, second = pair.run(run_script, f"{name}_pipeline", words)
    assert_same_losses(losses_of(first), expected)
    assert second == ("" if name == "gpt" else first)  # the longest diff has room for `if model.is_main`
    assert_same_results(name, tmp_path)


def test_the_fine_tuning_has_batches_of_several_lengths_and_a_smaller_last_one() -> None:
    import fine_tune_plain as script

    samples = [sample for place, sample in enumerate(script.lines_of_modules(6)) if place % 8]
    loader = torch.utils.data.DataLoader(samples, batch_size=6, shuffle=True, collate_fn=script.collate)
    shapes: list[tuple[int, ...]] = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shapes += [tuple(batch["input_ids"].shape) for batch in loader]
    assert len({length for _, length in shapes}) > 1 and [rows for rows, _ in shapes] == [6, 6, 6, 3]


@pytest.mark.slow
@pytest.mark.timeout(550)
@pytest.mark.parametrize("name", list(SIZES))
def test_a_script_whose_rank_is_killed_at_a_random_step_goes_on_as_the_plain_one(tmp_path: Path, name: str) -> None:
    expected = plainly(name, tmp_path, LONG[name])
    calls = len(expected) * (2 if name == "gpt" else 1)  # it accumulates two batches
    draw = random.Random()
    step, rank = draw.randint(1, calls), draw.randrange(2)
    env: dict[str, Any] = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(KILLING), str(ROOT)]), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "KILLED_RANK": str(rank), "KILLED_STEP": str(step),
    }  # fmt: skip
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(variable, None)
    start = [sys.executable] if name == "gpt" else [*TORCHRUN, "--local-ranks-filter", "0"]
    script = str(EXAMPLES / f"{name}_pipeline.py")
    command = [*start, script, *arguments(name, tmp_path, "pipeline", LONG[name])]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    said = f"rank {rank} was killed in call {step} of step\n{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, said
    assert "SIGKILL" in done.stderr or "Signal 9" in done.stderr or "exitcode: -9" in done.stderr, said
    assert_same_losses(losses_of(done.stdout), expected)
    assert_same_results(name, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(550)
@pytest.mark.parametrize("host", [0, 1])
def test_one_of_two_hosts_is_preempted_and_the_run_goes_on_on_one(tmp_path: Path, host: int) -> None:
    """Two torchruns on the loopback device stand for the hosts."""
    epochs = 60
    expected = plainly("preempted", tmp_path, epochs)
    words = [str(EXAMPLES / "preempted_pipeline.py"), *arguments("preempted", tmp_path, "pipeline", epochs)]
    port = free_port()
    two = [
        torchrun(f"--nnodes 2 --node-rank {number} --master-addr 127.0.0.1 --master-port {port}", words)
        for number in range(2)
    ]
    try:
        printed = [read_until("step 9 ", two[host])]
        two[host].terminate()
        printed += [read_until("saved", process) for process in (two[host], two[1 - host])]
        assert two[host].wait(120) == 1
    finally:
        for process in two:
            process.kill()  # the other torchrun waits 300 s for the one that has ended
            process.communicate()
    assert printed[1].splitlines()[-1] == printed[2].splitlines()[-1] != f"saved after step {len(expected)}"
    rest, _ = (alone := torchrun("--standalone", words)).communicate(timeout=240)
    assert alone.returncode == 0, rest
    before, after = losses_of("".join(printed[:2])), losses_of(rest)
    assert not before.keys() & after.keys()
    assert_same_losses(before | after, expected)
    assert_same_results("preempted", tmp_path)


def torchrun(flags: str, words: list[str]) -> subprocess.Popen[str]:
    """Start torchrun with one rank."""
    command = [sys.executable, "-m", "torch.distributed.run", *flags.split(), "--nproc-per-node", "1", *words]
    return subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    )


def read_until(text: str, process: subprocess.Popen[str]) -> str:
    """Return what a process prints, up to the first line with a text."""
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return "".join(lines)
    raise AssertionError("".join(lines))


def free_port() -> int:
    """Return a port of the loopback device that is free now."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])

"""The training scripts of `examples/`: few lines differ from the plain ones, and the results are equal.

`-m slow` runs them from the command line and kills them at a random step.
"""

from __future__ import annotations

import difflib
import importlib
import io
import os
import random
import re
import signal
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
from support.jobs.failures.fault_runs import environment
from support.jobs.scripts.example_runs import (
    EXAMPLES,
    PAIRS,
    Kill,
    arguments,
    command_run,
    logged,
    losses_of,
    plan_of,
    result,
    step_losses,
    unbroken_run,
)
from support.workers import Workers

import autopart
from autopart.ir.errors import WorkerError


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


def code_of(script: str) -> list[str]:
    """Return the lines of a script without its docstring, comments and empty lines."""
    text = (EXAMPLES / f"{script}.py").read_text()
    kept: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        documents = token.type == tokenize.STRING and token.line.startswith('"""')
        if token.string.strip() and token.type != tokenize.COMMENT and not documents:
            kept |= set(range(token.start[0], token.end[0] + 1))
    return [line for number, line in enumerate(text.splitlines(), start=1) if number in kept]


@pytest.mark.parametrize("name", list(PAIRS))
def test_a_script_adds_or_changes_as_few_lines_of_the_plain_one_as_the_table_says(name: str) -> None:
    """Counted are lines of code that the plain script does not have, new indentation included."""
    plain, piped = code_of(f"{name}_plain"), code_of(f"{name}_pipeline")
    matcher = difflib.SequenceMatcher(None, plain, piped, autojunk=False)
    added = [
        piped[place] for tag, _, _, first, end in matcher.get_opcodes() if tag != "equal" for place in range(first, end)
    ]
    assert any("import" in line and "autopart" in line for line in added) and len(plain) > 30
    row = re.search(rf"^\| \[`{name}_plain.py`\].*\| (\d+) \|$", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert row is not None and len(added) == int(row[1]) <= PAIRS[name].limit, "\n".join(added)


def plainly(name: str, folder: Path, length: int) -> dict[int, list[float]]:
    """Run the plain script in this process; return its losses."""
    return losses_of(run_script(f"{name}_plain", arguments(name, folder, length)))


def assert_same_losses(found: dict[int, list[float]], expected: dict[int, list[float]]) -> None:
    assert len(found) >= 4 and found.keys() == expected.keys()
    for step, losses in found.items():
        assert losses == pytest.approx(expected[step] * len(losses), rel=1e-6), step


def assert_same_results(name: str, folder: Path) -> None:
    plain, piped = result(name, folder / "plain"), result(name, folder / "pipeline")
    assert plain.keys() == piped.keys()
    for key, tensor in plain.items():
        torch.testing.assert_close(piped[key], tensor, rtol=1e-6, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", ["gpt", "vision", "preempted"])
def test_a_script_over_two_processes_equals_the_plain_one(pair: Workers, tmp_path: Path, name: str) -> None:
    expected = plainly(name, tmp_path / "plain", PAIRS[name].short)
    words = arguments(name, tmp_path / "pipeline", PAIRS[name].short)
    first, second = pair.run(run_script, f"{name}_pipeline", words)
    assert_same_losses(losses_of(first), expected)
    assert second == ("" if name == "gpt" else first)  # the longest diff has room for `if model.is_main`
    assert_same_results(name, tmp_path)
    if name == "gpt":
        assert_a_killed_one_goes_on(pair, tmp_path, losses_of(first))


def run_until_killed(name: str, words: Sequence[str], rank: int, call: int) -> str:
    """Run a script of which a rank is killed at the start of a call of `Pipe.step`."""
    step, left = autopart.Pipe.step, call

    def counted(pipe: autopart.Pipe, *args: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and pipe.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(pipe, *args, **options)

    with mock.patch.object(autopart.Pipe, "step", counted):
        return run_script(name, words)


def assert_a_killed_one_goes_on(pair: Workers, tmp_path: Path, unbroken: dict[int, list[float]]) -> None:
    """Kill a rank behind the first checkpoint, and give the same command again."""
    words = arguments("gpt", tmp_path / "again", PAIRS["gpt"].short)
    with pytest.raises(WorkerError, match=r"rank 1 .*died: killed by signal 9"):
        pair.run(run_until_killed, "gpt_pipeline", words, 1, 6)
    found = losses_of(pair.run(run_script, "gpt_pipeline", words)[0])
    assert found == {step: unbroken[step] for step in (3, 4)}
    unhurt, left = result("gpt", tmp_path / "pipeline"), result("gpt", tmp_path / "again")
    assert unhurt.keys() == left.keys() and all(torch.equal(left[key], each) for key, each in unhurt.items())


def test_the_fine_tuning_has_batches_of_several_lengths_and_a_smaller_last_one() -> None:
    import fine_tune_plain as script

    samples = [sample for place, sample in enumerate(script.lines_of_modules(6)) if place % 8]
    loader = torch.utils.data.DataLoader(samples, batch_size=6, shuffle=True, collate_fn=script.collate)
    shapes: list[tuple[int, ...]] = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shapes += [tuple(batch["input_ids"].shape) for batch in loader]
    assert len({length for _, length in shapes}) > 1 and [rows for rows, _ in shapes] == [6, 6, 6, 3]


def near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Whether weights are those of the plain script, up to rounding."""
    return found.keys() == expected.keys() and all(
        torch.allclose(found[key].double(), each.double(), rtol=1e-4, atol=1e-5) for key, each in expected.items()
    )


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", list(PAIRS))
def test_a_run_that_is_killed_goes_on_to_the_last_digit(tmp_path: Path, name: str) -> None:
    """A rank is killed at a random step behind the first checkpoint, perhaps its launcher too.  What follows, by the
    launcher's restart or by the same command given again, has every digit of a run that was not killed."""
    pair, draw = PAIRS[name], random.Random()
    plain = command_run(name, "plain", tmp_path / "plain")
    whole = unbroken_run(name, tmp_path / "whole")
    assert plain.returncode == whole.returncode == 0, f"{plain.stderr}\n{whole.stdout}\n{whole.stderr}"
    expected, unbroken = losses_of(plain.stdout), losses_of(whole.stdout)
    assert list(unbroken) == list(expected) == [*range(1, len(expected) + 1)] and len(expected) >= 8
    both = (step_losses(name, tmp_path / kind, run.stdout) for kind, run in (("whole", whole), ("plain", plain)))
    seen = max(abs(mine - theirs) / theirs for mine, theirs in zip(*both, strict=True))

    step = draw.randint(pair.every + 1, len(expected))
    kill = Kill(draw.randrange(2), (step - 1) * pair.calls + draw.randint(1, pair.calls), draw.random() < 0.5)
    done = command_run(name, "pipeline", tmp_path / "again", kill)
    said = f"{name}: {kill} in step {step} of {len(expected)}"
    printed = done.stdout
    if kill.launcher:
        assert done.returncode == -signal.SIGKILL, f"{said}\n{done.stdout}\n{done.stderr}"
        done = command_run(name, "pipeline", tmp_path / "again")
        printed += done.stdout
    assert done.returncode == 0, f"{said}\n{printed}\n{done.stderr}"
    assert plan_of(tmp_path / "again")["decision"] == plan_of(tmp_path / "whole")["decision"], said
    found = losses_of(printed)
    resumed = (step - 1) // pair.every * pair.every + 1
    assert found == {n: losses * (1 + (resumed <= n < step)) for n, losses in unbroken.items()}, said
    left, unhurt, plainly = (result(name, tmp_path / kind) for kind in ("again", "whole", "plain"))
    assert left.keys() == unhurt.keys() and all(torch.equal(left[key], each) for key, each in unhurt.items()), said
    assert seen <= 1e-6 and near(unhurt, plainly), said
    print(f"{said}, resumed at step {resumed}: equal; losses within {seen:.1e} of the plain script's")
    if name == "trainer":  # which prints four digits, and keeps all
        assert logged(tmp_path / "again") == logged(tmp_path / "whole"), said
        for mine, theirs in zip(logged(tmp_path / "whole"), logged(tmp_path / "plain"), strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5), said


@pytest.mark.slow
@pytest.mark.timeout(550)
@pytest.mark.parametrize("host", [0, 1])
def test_one_of_two_hosts_is_preempted_and_the_run_goes_on_on_one(tmp_path: Path, host: int) -> None:
    """Two torchruns on the loopback device stand for the hosts."""
    epochs = 60
    expected = plainly("preempted", tmp_path / "plain", epochs)
    words = [str(EXAMPLES / "preempted_pipeline.py"), *arguments("preempted", tmp_path / "pipeline", epochs)]
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

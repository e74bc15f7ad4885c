"""The command line: what it prints, where, and with which exit code; and what `verify` and the demo compare."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import autopart
from autopart.cli.demo.run import Outcome, report
from autopart.cli.demo.text import Batches, library_bytes
from autopart.cli.demo.train import Run, Setting, in_one_process, over_ranks
from autopart.cli.main import main
from autopart.cli.model_loader import load_model
from autopart.cli.output import print_json
from autopart.ir.errors import UsageError
from autopart.session.compare import Difference, Verification

PLAIN = "import torch\nfrom torch import nn\n"
DROPOUT = """
def make():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    return model, (torch.randn(10, 8), torch.randint(3, (10,))), nn.functional.cross_entropy
"""
BATCH_NORM = """
def make():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    return model, (torch.randn(10, 8), torch.randint(3, (10,))), nn.functional.cross_entropy
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def command(capsys):
    """Runs a command line; returns exit code, stdout, stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(list(words))
        out = capsys.readouterr()
        return int(end.value.code or 0), out.out, out.err

    return run


def test_version(command):
    code, out, _ = command("version")
    assert code == 0
    assert f"autopart {autopart.__version__}, torch {torch.__version__.split('+')[0]}" in out


def test_versions_are_a_flag_too(command):
    assert command("--version") == command("version")


def test_a_table_is_json_on_request(command, tmp_path):
    path = tmp_path / "plan.json"
    words = ("plan", "mlp", "--costs", "analytic", "--stages", "2", "--out", str(path), "--json")
    code, out, err = command(*words)
    facts = json.loads(out)
    assert code == 0 and "plan written to" in err
    plan = autopart.load_plan(path)
    assert facts["step_ns"] == plan.step_ns and [stage["ranks"] for stage in facts["stages"]] == [[0], [1]]
    assert facts["stages"][0]["modules"].startswith("0") and facts["stages"][0]["params"] > 0
    code, out, _ = command("explain", str(path), "--json")
    assert code == 0 and json.loads(out)["schedule"] == plan.schedule
    code, out, _ = command("cluster", "show", "h200x8", "--json")
    assert code == 0 and json.loads(out)["devices"][0]["count"] == 8
    code, out, _ = command("verify", "mlp", "--cluster", "cpu:1", "--costs", "analytic", "--json")
    assert code == 0 and json.loads(out)["ok"] is True and len(json.loads(out)["gradients"]) == 12


def test_numbers_that_json_does_not_have_are_null(capsys):
    print_json({"error": float("inf"), "all": [1.5, float("nan")]})
    assert json.loads(capsys.readouterr().out) == {"error": None, "all": [1.5, None]}


def test_the_simulated_step_of_a_plan_is_written(command, tmp_path):
    path, trace = tmp_path / "plan.json", tmp_path / "step.json"
    plan = ("plan", "mlp", "--costs", "analytic", "--stages", "2", "--cluster", "cuda:2", "--out", str(path))
    assert command(*plan, "--trace", str(tmp_path / "step.txt"))[0] == 0
    assert "rank 1 |" in (tmp_path / "step.txt").read_text()
    explain = ("explain", str(path), "--model", "mlp", "--trace", str(trace))
    code, _, err = command(*explain, "--cluster", "cuda:2")
    assert code == 0 and "note" not in err
    assert json.loads(trace.read_text())["otherData"]["step_ns"] == autopart.load_plan(path).step_ns
    assert "made for another cluster" in command(*explain)[2]
    code, _, err = command("explain", str(path), "--trace", str(trace))
    assert code == 2 and "add --model" in err


def test_a_plan_is_json_on_stdout_and_a_table_beside_it(command):
    code, out, err = command("plan", "mlp", "--costs", "analytic", "--micro-batches", "4")
    assert code == 0
    assert json.loads(out)["decision"]["micro_rows"] == [4, 4, 4, 4]
    assert "2 stages on 2 ranks" in err


def test_a_plan_file_is_written_explained_and_matched_to_its_model(command, tmp_path):
    path = tmp_path / "plan.json"
    words = ("plan", "mlp", "--costs", "analytic", "--cuts", "4", "--schedule", "gpipe", "--out", str(path))
    code, out, _ = command(*words)
    assert code == 0 and "schedule gpipe" in out and str(path) in out
    assert autopart.load_plan(path).schedule == "gpipe"
    code, out, _ = command("explain", str(path))
    assert code == 0 and "schedule gpipe" in out and "modules" not in out
    code, out, _ = command("explain", str(path), "--model", "mlp")
    assert code == 0 and "0 … 3" in out
    path.write_text(path.read_text().replace('"world": 2', '"world": "two"'))
    code, _, err = command("explain", str(path))
    assert code == 2 and "world" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("plan", "nothing"), "gpt2-tiny"),
        (
            ("plan", "mlp", "--costs", "analytic", "--recompute", "layer.*,none"),
            "'layer.*' of recompute= fits no module",
        ),
        (("plan", "no_such_module_here:make"), "no module"),
        (("plan", "no_such_file.py:make"), "no file"),
        (("plan", "os:no_such_function"), "no function"),
        (("plan", "os:getcwd"), "(model, batch)"),
        (("plan", "mlp", "--stages", "99"), "99 stages"),
        (("plan", "mlp", "--cluster", "tpu:2"), "cpu:2"),
        (("plan", "mlp", "--micro-batches", "99"), "micro_batches=16"),
        (("explain", "no_such_plan.json"), "no_such_plan.json"),
    ],
)
def test_what_cannot_work_is_a_message_and_exit_code_2(command, words, says):
    code, out, err = command(*words)
    assert code == 2 and out == ""
    assert says in err and "Traceback" not in err


def test_traceback_on_request():
    with pytest.raises(UsageError):
        main(["plan", "nothing", "--traceback"])


def test_unknown_options_and_no_command_exit_with_2(command):
    assert command("plan", "mlp", "--colour", "red")[0] == 2
    assert command()[0] == 2


def test_under_a_launcher_only_rank_0_prints(command, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert command("version") == (0, "", "")
    assert command("plan", "mlp") == (0, "", "")
    code, out, err = command("verify", "mlp", "--cluster", "cpu:3")
    assert (code, out) == (2, "") and err == "rank 1: 2 ranks run, but 3 were asked for\n"


def test_names_lead_to_functions(tmp_path, monkeypatch):
    (tmp_path / "subjects.py").write_text(PLAIN + DROPOUT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    first, second = load_model("subjects.py:make"), load_model("subjects:make")
    assert torch.equal(first.model[0].weight, second.model[0].weight)
    assert first.loss_fn is nn.functional.cross_entropy
    assert not torch.equal(load_model("subjects:make", seed=1).model[0].weight, first.model[0].weight)


def test_verify_runs_a_pipeline_and_fails_when_out_of_tolerance(command):
    code, out, _ = command("verify", "mlp", "--costs", "analytic", "--limit", "3")
    assert code == 0, out
    assert "within tolerance 1e-05: 12 gradients and 0 buffers" in out and "on the whole batch" in out
    code, out, _ = command("verify", "mlp", "--cluster", "cpu:1", "--micro-batches", "7", "--tolerance", "0")
    assert code == 1 and "OUT OF tolerance 0" in out


@pytest.mark.parametrize(("source", "reference"), [(DROPOUT, "random keys"), (BATCH_NORM, "same micro-batches")])
def test_verify_chooses_its_reference_by_the_model(command, tmp_path, source, reference):
    path = tmp_path / "subject.py"
    path.write_text(PLAIN + source)
    code, out, err = command(
        "verify", f"{path}:make", "--cluster", "cpu:1", "--micro-batches", "3", "--costs", "analytic"
    )
    assert code == 0, out + err
    assert reference in out


def test_verify_in_one_process_leaves_the_model_alone():
    subject = load_model("mlp")
    before = {k: v.clone() for k, v in subject.model.state_dict().items()}
    found = autopart.verify(
        subject.model, "cpu:1", sample=subject.batch, loss_fn=subject.loss_fn, micro_batches=5, costs="analytic"
    )
    assert found.ok and found.largest <= 1e-6 and len(found.gradients) == 12
    assert all(torch.equal(before[k], v) for k, v in subject.model.state_dict().items())
    assert all(p.grad is None for p in subject.model.parameters())


def test_the_tolerance_follows_the_precision_of_the_model():
    subject = load_model("mlp")
    model, (inputs, target) = subject.model.double(), subject.batch
    options = {"loss_fn": subject.loss_fn, "micro_batches": 3, "costs": "analytic"}
    found = autopart.verify(model, "cpu:1", sample=(inputs.double(), target.double()), **options)
    assert found.tolerance == 1e-10 and found.ok
    with pytest.raises(UsageError, match="needs a sample"):
        autopart.verify(model, "cpu:1", sample=None, **options)


GOOD = Difference("layer.weight", "gradient", 0, 2.0, 1e-8, False, True)
BAD = Difference("layer.bias", "gradient", 1, 1.0, 0.5, False, False)
NOISE = Difference("key.bias", "gradient", 1, 1e-12, 3.0, True, True)


def test_a_verification_says_what_is_wrong():
    good = Verification(1.0, 1.0, 1e-5, "one", (GOOD, NOISE), ())
    assert good.ok and good.largest == 1e-8
    assert "negligible" in good.table() and "1 more" in good.table(limit=1)
    bad = replace(good, gradients=(BAD, GOOD))
    assert not bad.ok and bad.largest == 0.5
    assert re.search(r"layer.bias +gradient +1 .* OUT OF TOLERANCE", bad.table(limit=0))
    assert not replace(good, loss=1.1).ok and not replace(good, loss=float("nan")).ok
    assert not replace(good, buffers=(replace(BAD, kind="buffer"),)).ok


TINY = Setting(stages=1, steps=4, compared=3, every=2, layers=1, width=16, rows=8, seq=16)


def test_the_demo_trains_the_same_way_in_one_stage_and_without(capsys):
    pipeline, alone = over_ranks(TINY), in_one_process(TINY)
    outcome = Outcome(pipeline, alone)
    assert len(pipeline.losses) == 4 and len(alone.losses) == 3
    assert outcome.drift < 1e-5 and outcome.gradients_agree
    assert outcome.ok and not outcome.judges_loss  # four steps cannot bring the loss below the bar
    printed = capsys.readouterr().out
    assert "step    1   loss 5." in printed and "step    4   loss 5." in printed and "tokens/s" in printed
    text = report(outcome)
    assert text.endswith("OK") and "the mean of the last 4 steps (not judged: that takes 200 steps)" in text


def test_the_demo_trains_on_after_its_check_where_all_ranks_share_weights(pair):
    """The pipe of the check is closed beside the one that trains."""
    first, second = pair.run(over_ranks, replace(TINY, stages=2))
    assert first.losses == second.losses and len(first.losses) == 4
    assert first.first_step.ok


def test_the_demo_passes_when_runs_agree_and_the_loss_fell():
    check = Verification(5.0, 5.0, 1e-5, "one", (GOOD,), ())
    run = Run((5.0, *[2.5] * 199), 1.0, check)
    assert Outcome(run, Run((5.0, 2.5), 1.0)).ok
    assert not Outcome(run, Run((5.0, 2.6), 1.0)).ok
    assert not Outcome(replace(run, first_step=replace(check, gradients=(BAD,))), Run((5.0,), 1.0)).ok
    high = Outcome(replace(run, losses=(5.0, *[3.1] * 199)), Run((5.0,), 1.0))
    assert not high.ok and report(high).endswith("FAILED: the loss did not fall")
    assert not Outcome(replace(run, losses=(5.0, float("nan"))), Run((5.0, 2.5), 1.0)).ok


def test_batches_are_the_same_wherever_they_are_asked_for():
    text = library_bytes(200_000)
    assert len(text) == 200_000 and int(text.max()) < 256
    first, again = Batches(text, 4, 16), Batches(text, 4, 16)
    assert torch.equal(first[7]["input_ids"], again[7]["input_ids"])
    assert not torch.equal(first[7]["input_ids"], first[8]["input_ids"])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_demo_itself():
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    result = subprocess.run([sys.executable, "-m", "autopart", "demo"], capture_output=True, text=True, env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.rstrip().endswith("OK")

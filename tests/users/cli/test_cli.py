"""The command line: what it prints, where, and with which exit code; and what `verify` compares."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import autopart
from autopart.cli.main import main
from autopart.cli.model_loader import load_model
from autopart.cli.output import print_json
from autopart.ir.errors import UsageError
from autopart.pipe.compare import Difference, Verification

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


def test_a_table_is_json_on_request(command, tmp_path, pair):
    pair.run(int)  # the rank of `verify` is forked from where those of the pool come from
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
    assert command(*plan, "--trace", str(tmp_path / "step.svg"))[0] == 0
    assert (tmp_path / "step.svg").read_text().startswith("<svg ")
    assert command(*plan, "--trace", "-")[1].splitlines()[-1].startswith("rank 1 |")
    explain = ("explain", str(path), "--model", "mlp", "--trace", str(trace))
    code, _, err = command(*explain, "--cluster", "cuda:2")
    assert code == 0 and "note" not in err
    assert json.loads(trace.read_text())["otherData"]["step_ns"] == autopart.load_plan(path).step_ns
    assert "made for another cluster" in command(*explain)[2]
    code, _, err = command("explain", str(path), "--trace", str(trace))
    assert code == 2 and "add --model" in err


def test_the_schedule_of_a_plan_is_written_and_read(command, tmp_path):
    plan, saved = str(tmp_path / "plan.json"), str(tmp_path / "saved.csv")
    sizes = ("--stages", "2", "--micro-batches", "2", "--replicas", "1", "--costs", "analytic", "--out", plan)
    command("plan", "mlp", "--cluster", "cuda:2", "--schedule", "gpipe", *sizes)
    lines = "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
    assert command("schedule", plan) == (0, lines, "")
    assert command("schedule", plan, "--csv", saved) == (0, "", f"schedule written to {saved}\n")
    assert (tmp_path / "saved.csv").read_text() == lines
    assert "0SEND_F0" in command("schedule", plan, "--messages")[1]
    code, _, _ = command("plan", "mlp", "--cluster", "cuda:2", "--schedule", saved, *sizes)
    assert code == 0 and autopart.load_plan(plan).schedule == "saved"
    assert command("schedule", plan) == (0, lines, "")


def test_a_plan_is_printed_as_a_table_alone(command):
    code, out, err = command("plan", "mlp", "--costs", "analytic", "--micro-batches", "4")
    assert code == 0 and "2 stages on 2 ranks" in out and "{" not in out
    assert err.endswith("--out plan.json writes the plan to a file\n")


def test_a_plan_file_is_written_explained_and_matched_to_its_model(command, tmp_path):
    path = tmp_path / "plan.json"
    words = ("plan", "mlp", "--costs", "analytic", "--cuts", "4", "--schedule", "gpipe", "--out", str(path))
    code, out, _ = command(*words)
    assert code == 0 and "schedule gpipe" in out and str(path) in out
    assert autopart.load_plan(path).schedule == "gpipe"
    code, out, _ = command("explain", str(path))
    assert code == 0 and "schedule gpipe" in out and "0 … 3" in out and "params" not in out
    code, out, _ = command("explain", str(path), "--model", "mlp")
    assert code == 0 and "0 … 3" in out and "params" in out
    code, out, _ = command("report", str(path))
    assert code == 0 and str(path.with_suffix(".html")) in out
    assert "<h1>autopart: plan</h1>" in path.with_suffix(".html").read_text()
    path.write_text(path.read_text().replace('"world": 2', '"world": "two"'))
    code, _, err = command("explain", str(path))
    assert code == 2 and "world" in err


def test_options_of_several_modules_are_merged_and_may_be_repeated(command):
    words = ("plan", "mlp", "--costs", "analytic", "--stages", "2", "--cuts", "4", "--pin", "2=0", "--pin", "6=1")
    code, out, err = command(*words, "--json", "--json")
    assert code == 0, err
    assert len(json.loads(out)["stages"]) == 2


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
        (("explain", "plan.json", "--cluster", "cpu:2"), "--cluster needs the model"),
        (("report", "plan.json", "--tokens", "8"), "--tokens needs the model"),
        (("plan", "mlp", "--stages", "2", "--stages", "4"), "--stages is given twice"),
        (("plan", "mlp", "--cluster", "cpu:2", "--stages=2", "--cluster=cpu:4"), "--cluster is given twice"),
        (("plan", "mlp", "--pin", "2=0", "--pin", "4=1", "--pin", "2=1"), "--pin 2= is given twice"),
        (("plan", "mlp", "--rows-axis", "x=1", "--rows-axis", "x=none"), "--rows-axis x= is given twice"),
        (("verify", "mlp", "--seed", "1", "--seed", "2"), "--seed is given twice"),
        (("explain", "plan.json", "--model", "mlp", "--model", "mlp"), "--model is given twice"),
        (("cluster", "show", "cpu:2", "--out", "a.yaml", "--out", "b.yaml"), "--out is given twice"),
    ],
)
def test_what_cannot_work_is_a_message_and_exit_code_2(command, words, says):
    code, out, err = command(*words)
    assert code == 2 and out == ""
    assert says in err and "Traceback" not in err


def test_traceback_on_request():
    with pytest.raises(UsageError):
        main(["plan", "nothing", "--traceback"])


def test_flags_are_read_into_options(command, tmp_path):
    path = tmp_path / "plan.json"
    text = "plan mlp --cluster cpu:4 --costs analytic --no-cache --cuts 2,4 --pin 0=0 --replicas 1,2,1 --recompute 0,2"
    words = [*text.split(), "--zero", "0", "--bucket-bytes", "2MiB", "--out", str(path)]
    code, out, err = command(*words)
    assert code == 0, out + err
    plan = autopart.load_plan(path)
    assert [len(stage.ranks) for stage in plan.stages] == [1, 2, 1] and plan.decision.bucket_bytes == 2 << 20
    assert command("plan", "mlp", "--pin", "lm_head")[2].startswith("autopart: --pin 'lm_head' is not understood")
    assert "replicas is '8,x'" in command("plan", "mlp", "--replicas", "8,x")[2]
    assert "stages is 0" in command("plan", "mlp", "--stages", "0")[2]
    assert 'or None or "auto"' in command("plan", "mlp", "--stages", "many")[2]
    for given in ("--stages auto --micro-batches auto --replicas auto", "--stages-per-rank 1"):
        assert command(*f"plan mlp --costs analytic {given}".split())[0] == 0


def test_help_groups_the_flags_and_names_the_values(command):
    code, out, _ = command("plan", "--help")
    assert code == 0
    places = [out.index(word) for word in ("matter first", "--stages", "Cuts and schedule", "1f1b-deep", "--no-cache")]
    assert places == sorted(places)


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


@pytest.mark.slow
def test_verify_runs_a_pipeline_and_fails_when_out_of_tolerance(command):
    code, out, _ = command("verify", "mlp", "--costs", "analytic", "--limit", "3")
    assert code == 0, out
    assert "within tolerance 1e-05: 12 gradients and 0 buffers" in out and "on the whole batch" in out
    code, out, _ = command(
        "verify", "mlp", "--cluster", "cpu:1", "--micro-batches", "7", "--tolerance", "0", "--costs", "analytic"
    )
    assert code == 1 and "OUT OF tolerance 0" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "reference"),
    [(DROPOUT, "random keys"), (BATCH_NORM, "same micro-batches")],
)
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

"""Plans in the words of other trainers: read back by their grammars, and an expert's plan beside ours."""

from __future__ import annotations

import json
import random
import re
import tomllib
from dataclasses import replace

import pytest
import torch
import yaml
from torch import nn

import autopart
from autopart import api
from autopart.batch.batch import flatten
from autopart.cli.main import main
from autopart.cli.model_loader import load_model
from autopart.extras.export.formats import FORMATS, exported, layout_text, read_layout
from autopart.extras.export.hand import hand_options
from autopart.ir.errors import UsageError
from autopart.options import read_options


class Layers(nn.Module):
    """An embedding, eight layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(8))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x)).logsumexp(-1).mean()


WORDS = torch.arange(48).reshape(16, 3) % 11


def planned(cluster: str = "cpu:4", **options: object) -> tuple[autopart.Plan, autopart.Graph]:
    return api.planned(Layers(), cluster, WORDS, read_options(costs="analytic", cache=False, **options))


def as_megatron_reads(layout: str) -> list[str]:
    """The letters of each stage, by the rules of Megatron's documentation, one letter at a time."""
    text = layout.replace(",", "")
    while found := re.search(r"\(([^()]*)\)\*(\d+)|([^()|*])\*(\d+)", text):
        times = int(found[2] or found[4])
        text = text[: found.start()] + (found[1] or found[3]) * times + text[found.end() :]
    return text.split("|")


def test_layouts_mean_the_same_to_both_readers():
    draw = random.Random(0)
    for _ in range(200):
        counts = [draw.randrange(5) for _ in range(draw.randrange(1, 7))]
        text = layout_text([range(count) for count in counts])
        stages = as_megatron_reads(text)
        assert stages[0][0] == "E" and stages[-1][-1] == "L" and set("".join(stages)) <= set("EtL")
        assert [stage.count("t") for stage in stages] == counts == list(read_layout(text))
    assert read_layout("Et*3|(tt|)*29,L") == (3, *[2] * 29, 0)
    for wrong in ("Et|m|L", "tt|L", "Et*3|t", "E(t|)*99999L", "Et||x|L"):
        with pytest.raises(UsageError):
            read_layout(wrong)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "gpipe", "zb-h1"])
def test_a_plan_says_the_same_in_every_word(schedule: str) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    cuts = [f"layers.{i}" for i in ((2, 3, 6) if chunks == 2 else (3,))]
    options = {"schedule": schedule, "stages_per_rank": chunks, "cuts": cuts, "replicas": 2, "micro_batches": 4}
    plan, graph = planned(recompute="all", **options)
    text = {name: exported(plan, graph, name) for name in FORMATS}
    flags = dict(
        line.removeprefix("--").split(" ", 1)
        for line in text["megatron"].splitlines()
        if " " in line[2:] and line[0] == "-"
    )
    counts = [2, 1, 3, 2] if chunks == 2 else [3, 5]
    assert [
        stage.count("t") for stage in as_megatron_reads(json.loads(flags["pipeline-model-parallel-layout"]))
    ] == counts
    assert (flags["pipeline-model-parallel-size"], flags["tensor-model-parallel-size"]) == ("2", "1")
    assert (flags["micro-batch-size"], flags["global-batch-size"]) == ("2", "16")
    assert (flags["recompute-method"], flags["recompute-num-layers"]) == ('"block"', str(max(counts)))
    overrides = yaml.safe_load(text["primus"])["modules"]["pre_trainer"]["overrides"]
    assert overrides["pipeline_model_parallel_layout"] == json.loads(flags["pipeline-model-parallel-layout"])
    assert overrides["recompute_layer_ids"] == list(range(8)) and ("patch_zero_bubble" in overrides) == (
        schedule == "zb-h1"
    )
    titan = tomllib.loads(text["torchtitan"])
    parts = titan["parallelism"]["module_fqns_per_model_part"]
    assert [len([path for path in part if path.startswith("layers.")]) for part in parts] == counts
    assert sorted(path for part in parts for path in part) == sorted(
        ["embed", "norm", "head", *(f"layers.{i}" for i in range(8))]
    )
    assert titan["training"] == {"local_batch_size": 8, "global_batch_size": 16}
    assert titan["parallelism"]["data_parallel_replicate_degree"] == 2
    assert ("no word for schedule" in text["megatron"]) == (schedule in ("gpipe", "zb-h1"))
    assert ("pipeline_parallel_schedule_csv" in titan["parallelism"]) == (schedule == "zb-h1")


def test_what_has_no_word_is_named_or_refused():
    plan, graph = planned("cpu:2", cuts=["layers.3.2"], micro_batches=4, replicas=1)
    text = exported(plan, graph, "megatron")
    assert "# no word for layers.3 is cut between stages 0 and 1" in text
    (first, second) = plan.stages
    unlike = replace(plan, decision=replace(plan.decision, world=3, stages=(first, replace(second, ranks=(1, 2)))))
    with pytest.raises(UsageError, match="1 and 2 replicas"):
        exported(unlike, graph, "primus")
    with pytest.raises(UsageError, match="deepspeed"):
        exported(plan, graph, "deepspeed")


def test_ranks_that_compute_together_are_no_replicas():
    plan, graph = planned("cpu:8", tensor_parallel=2, cuts=["layers.3"], replicas=2, micro_batches=4)
    assert [stage.replicas for stage in plan.stages] == [2, 2] and len(plan.stages[0].ranks) == 4
    flags = exported(plan, graph, "megatron").splitlines()
    assert {"--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--micro-batch-size 2"} <= {*flags}
    overrides = yaml.safe_load(exported(plan, graph, "primus"))["modules"]["pre_trainer"]["overrides"]
    assert (overrides["tensor_model_parallel_size"], overrides["pipeline_model_parallel_size"]) == (2, 2)
    titan = tomllib.loads(exported(plan, graph, "torchtitan"))
    degrees = {name: value for name, value in titan["parallelism"].items() if name.endswith("_degree")}
    assert degrees == {
        "tensor_parallel_degree": 2,
        "pipeline_parallel_degree": 2,
        "data_parallel_replicate_degree": 2,
        "data_parallel_shard_degree": 1,
    }
    assert titan["training"] == {"local_batch_size": 8, "global_batch_size": 16}


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (((0, 1, 2, 3), (4, 5, 6, 7)), ""),
        (((0, 1, 4, 5), (2, 3, 6, 7)), "--use-tp-pp-dp-mapping"),
        (((0, 2, 1, 3), (4, 5, 6, 7)), "# no word for which rank"),
        (((1, 2, 3, 4), (5, 6, 7, 0)), "# no word for which rank"),
        (((0, 1, 6, 7), (2, 3, 4, 5)), "# no word for which rank"),
    ],
)
def test_groups_of_ranks_are_numbered_as_megatron_numbers_them(ranks: tuple[tuple[int, ...], ...], said: str) -> None:
    plan, graph = planned("cpu:8", tensor_parallel=2, cuts=["layers.3"], replicas=2, micro_batches=4)
    stages = tuple(replace(stage, ranks=own) for stage, own in zip(plan.stages, ranks, strict=True))
    text = exported(replace(plan, decision=replace(plan.decision, stages=stages)), graph, "megatron")
    assert "# no word for how 2 ranks divide the ops" in text and said in text
    assert ("which rank" in text) == ("which rank" in said) and ("mapping" in text) == ("mapping" in said)


def test_an_experts_plan_becomes_the_options_that_give_it_back():
    asked = hand_options("layout=Et*3|t*5L,dp=2,mbs=2,recompute=full", Layers(), 16)
    plan, graph = planned(**asked)
    assert '"Et*3|t*5L"' in exported(plan, graph, "megatron") and plan.decision.copies == 2
    assert plan.micro_rows == (4, 4, 4, 4)
    plan, graph = planned("cpu:8", **hand_options("layout=Et*3|t*5L,dp=2,mbs=2,tp=2", Layers(), 16))
    flags = exported(plan, graph, "megatron").splitlines()
    assert {"--tensor-model-parallel-size 2", '--pipeline-model-parallel-layout "Et*3|t*5L"'} <= {*flags}
    assert "--micro-batch-size 2" in flags and plan.micro_rows == (4, 4, 4, 4)
    assert hand_options("pp=2,tp=4", Layers(), 16)["tensor_parallel"] == 4
    for wrong in ("layout=Et*3|t*4L", "tp=0", "mbs=5", "pp=0", "speed=9", "layout=Et*8|L", "layout=Et*3|t*5L,pp=4"):
        with pytest.raises(UsageError):
            hand_options(wrong, Layers(), 16)


def test_the_command_line_prints_both(capsys, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def run(*words: str) -> str:
        with pytest.raises(SystemExit) as end:
            main(["plan", "gpt2-tiny", "--costs", "analytic", "--cluster", "cpu:2", *words])
        assert not end.value.code
        return capsys.readouterr().out

    assert run("--export", "megatron", "--stages", "2").startswith("--tensor-model-parallel-size 1")
    subject = load_model("gpt2-tiny")
    layers = max(len(m) for m in subject.model.modules() if isinstance(m, nn.ModuleList))
    rows = flatten(subject.batch).rows or 1
    text = f"layout=Et|t*{layers - 1}L,mbs={rows // 2}"
    answers = json.loads(run("--hand", text, "--json"))["answers"]
    assert [answer["name"] for answer in answers] == ["chosen", "by hand"] and answers[1]["stages"] == 2


def test_a_plan_without_words_is_written_before_it_is_refused(capsys, tmp_path):
    asked = ["--stages", "2", "--replicas", "1,2", "--micro-batches", "2", "--optimizer", "sgd"]
    written = ["--out", str(tmp_path / "plan.json"), "--export", "megatron"]
    with pytest.raises(SystemExit) as end:
        main(["plan", "gpt2-tiny", "--costs", "analytic", "--cluster", "cpu:3", *asked, *written])
    assert end.value.code == 2 and "1 and 2 replicas" in capsys.readouterr().err
    assert len(autopart.load_plan(tmp_path / "plan.json").stages) == 2

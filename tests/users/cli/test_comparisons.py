"""`autopart plan --compare` and `--what-if`: a line for each plan, equal to the plan that is made alone."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from torch import nn

import autopart
from autopart.cli.flags import wished
from autopart.cli.main import main
from autopart.cli.model_loader import load_model
from autopart.files.clusters import cluster_to_dict, parse_cluster
from autopart.passes.ops.flops import model_flops
from autopart.report.comparison import Answer

PRICED = """
devices:
  - {kind: cuda, count: 2, memory: 80GiB, flops: {float32: 1e13}, memory_bandwidth: 2e12, price_per_hour: 3.6}
levels:
  - {size: 2, latency_us: 5, bandwidth: 3e11}
"""


@pytest.fixture
def command(capsys, monkeypatch):
    """Runs `autopart plan mlp` with more words; returns exit code, stdout, stderr."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["plan", "mlp", "--costs", "analytic", *words])
        out = capsys.readouterr()
        return int(end.value.code or 0), out.out, out.err

    return run


def alone(cluster: str, **options: object) -> autopart.Plan:
    subject = load_model("mlp")
    return autopart.plan(
        subject.model, cluster, sample=subject.batch, loss_fn=subject.loss_fn, costs="analytic", **options
    )


def test_clusters_are_compared_by_the_plans_that_each_gets_alone(command, tmp_path):
    path = tmp_path / "priced.yaml"
    path.write_text(PRICED)
    code, out, _ = command("--compare", f"cpu:2,{path},cpu:2", "--json")
    first, second = json.loads(out)["answers"]
    assert code == 0 and (first["name"], second["name"]) == ("cpu:2", str(path))
    for answer in (first, second):
        plan = alone(answer["name"])
        assert answer["step_s"] == plan.step_ns / 1e9 and answer["schedule"] == plan.schedule
        assert answer["rows_per_s"] == 16 / answer["step_s"]
    assert first["price_per_step"] == 0
    assert second["price_per_step"] == pytest.approx(2 * 3.6 / 3600 * second["step_s"])
    code, out, _ = command("--compare", f"cpu:2,{path}")
    assert code == 0 and len(out.splitlines()) == 6 and "price of 1M rows" in out.splitlines()[0]


def test_a_wish_stands_beside_the_chosen_plan(command):
    code, out, _ = command("--what-if", "stages=2", "replicas=1", "--json")
    chosen, wish = json.loads(out)["answers"]
    assert code == 0 and wish["name"] == "stages=2 replicas=1"
    assert chosen["step_s"] == alone("cpu:2").step_ns / 1e9
    assert wish["step_s"] == alone("cpu:2", stages=2, replicas=1).step_ns / 1e9 and wish["stages"] == 2
    code, out, _ = command("--what-if", "stages=1", "--what-if", "stages=2 micro-batches=4", "--json")
    assert [answer["name"] for answer in json.loads(out)["answers"]] == [
        "chosen",
        "stages=1",
        "stages=2 micro-batches=4",
    ]
    code, out, _ = command("--what-if", "stages=1", "--what-if", "replicas=1", "--json")
    assert [answer["name"] for answer in json.loads(out)["answers"]] == ["chosen", "stages=1", "replicas=1"]


def test_what_cannot_be_planned_is_a_line_with_its_reason(command):
    code, out, _ = command("--what-if", "stages=9")
    assert code == 0 and "no plan" in out and "stages=9: " in out
    code, _, err = command("--stages", "9", "--compare", "cpu:2,cpu:1")
    assert code == 2 and "stages" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--what-if", "stages"), "not an option with a value"),
        (("--what-if", "stages=x"), "stages is 'x'"),
        (("--what-if", "num_stages=2"), "stages= is their number"),
        (("--what-if", "timeout=2"), "cannot be asked on a command line"),
        (("--what-if", "stages=2", "--compare", "cpu:2"), "both --compare and --what-if"),
        (("--what-if", "stages=1", "--what-if", "stages=2", "replicas=1"), "in quotes"),
        (("--what-if", "stages=1", "--hand", "pp=2"), "both --what-if and --hand"),
        (("--compare", "cpu:2", "--hand", "pp=2"), "both --compare and --hand"),
        (("--compare", ","), "names no cluster"),
        (("--what-if", "stages=1 stages=2"), "stages= is given twice"),
        (("--what-if", "pin=2=0 pin=2=1"), "--pin 2= is given twice"),
        (("--hand", "pp=1,pp=2"), "gives a word twice"),
        (("--export", "megatron", "--json"), "both --json and --export"),
        (("--export", "megatron", "--what-if", "stages=1"), "--export writes one plan"),
        (("--compare", "cpu:2", "--out", "plan.json"), "--out writes one plan"),
        (("replicas=2",), "belongs to no option"),
        (("--rows", "4"), "makes its own batch"),
    ],
)
def test_words_that_mean_nothing_are_refused(command, words, said):
    code, _, err = command(*words)
    assert code == 2 and said in err


def test_words_of_several_modules_are_merged():
    assert wished(["pin=2=0", "stages=2", "--pin=6=1"]) == {"pins": {"2": 0, "6": 1}, "stages": 2}
    assert wished(["cuts=2,4", "cuts=6"]) == {"cuts": ["2", "4", "6"]}


def test_utilisation_counts_the_products_of_forward_and_backward():
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    subject = load_model("mlp")
    batch = (subject.batch[0], subject.batch[0])
    loss_fn = nn.MSELoss()
    plan = autopart.plan(model, "cpu:2", sample=batch, loss_fn=loss_fn, costs="analytic", stages=2, micro_batches=4)
    products = 4 * 2 * 64 * 64 * 16
    cluster, graph = parse_cluster("cpu:2"), _graph(model, batch, loss_fn)
    found = Answer("", cluster, None, plan, graph, model_flops(graph)).delivered()
    assert found is not None
    assert 0.9 * 3 * products <= found["flops"] <= 1.05 * 3 * products  # the first input leads to nothing that learns
    peak = sum(device.flops_per_s for device in cluster.devices)
    assert found["mfu"] == pytest.approx(found["flops"] / (plan.step_ns / 1e9) / peak)
    assert found["peak_bytes"] == max(estimate.peak_bytes for estimate in plan.estimates)


def _graph(model, batch, loss_fn):
    from autopart.api import planned
    from autopart.options import read_options

    return planned(model, "cpu:1", batch, read_options(loss_fn=loss_fn, costs="analytic"))[1]


def test_a_price_is_read_written_and_changes_no_plan(tmp_path):
    path = tmp_path / "priced.yaml"
    path.write_text(PRICED)
    cluster = parse_cluster(path)
    assert cluster_to_dict(cluster)["devices"][0]["price_per_hour"] == 3.6
    free = replace(cluster, devices=tuple(replace(device, price_per_hour=0.0) for device in cluster.devices))
    assert repr(free) == repr(cluster)  # the key of kept plans
    path.write_text(PRICED.replace("3.6", "-1"))
    with pytest.raises(autopart.UsageError, match="price_per_hour"):
        parse_cluster(path)

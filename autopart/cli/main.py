"""The command line: demo, plan, explain, verify, cluster, version.

Exit codes: 0 all is well; 1 a check failed or something failed while ranks ran; 2 the request cannot be met (bad
argument, a model that is refused, a plan that does not fit).  An error of ours is its message on stderr, without a
traceback unless --traceback is given.  Under torchrun this process is one rank, and rank 0 alone prints results.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Sequence
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from autopart import api
from autopart.cli.cluster import app as cluster_app
from autopart.cli.demo.models import BUILTIN
from autopart.cli.model_loader import load_model
from autopart.costs.sources import COST_SOURCES
from autopart.files.plans import diff_plans, load_plan, plan_to_json, save_plan
from autopart.ir.errors import AutopartError, RunError, UsageError
from autopart.report.plan_table import stage_table
from autopart.session.compare import Verification

TRACEBACK = "--traceback"

app = typer.Typer(
    name="autopart",
    help="Compile an unmodified PyTorch model into a planned, running training pipeline.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(cluster_app)


class Schedule(StrEnum):
    """In which order a stage runs its micro-batches."""

    AUTO = "auto"
    ONE_F_ONE_B = "1f1b"
    DEEP = "1f1b-deep"
    GPIPE = "gpipe"
    PIPEDREAM = "pipedream"


class Recompute(StrEnum):
    """Whether activations are computed again in the backward."""

    AUTO = "auto"
    OFF = "off"
    ALL = "all"


ModelName = Annotated[
    str, typer.Argument(help=f"{', '.join(BUILTIN)}, or module:function or file.py:function -> (model, batch)")
]
ClusterName = Annotated[
    str, typer.Option("--cluster", help='"cpu:2", "cuda:8", "h200x8", or a .yaml, .toml or .json file')
]
Stages = Annotated[int | None, typer.Option(help="Stages; by default the planner chooses")]
MicroBatches = Annotated[int | None, typer.Option(help="Micro-batches; by default the planner chooses")]
ScheduleName = Annotated[Schedule, typer.Option(help="Order of the micro-batches")]
Cuts = Annotated[
    list[str] | None, typer.Option("--cuts", help="Module path at which a stage begins; repeat, or separate by commas")
]
Seed = Annotated[int, typer.Option(help="Of the weights and of dropout")]
CostsName = Annotated[
    str,
    typer.Option(
        metavar=f"[{'|'.join(COST_SOURCES)}]", help="Times of ops: measured on this machine, or from FLOPs and bytes"
    ),
]
Optimizer = Annotated[
    str | None, typer.Option(help="sgd, momentum, adam or adamw, each also with +masters; decides the memory")
]
Replicas = Annotated[str | None, typer.Option(help="Devices of every stage, or one number for each: 8,8,4")]
Together = Annotated[
    list[str] | None, typer.Option(help="Module path in which no stage begins, or several joined by +; repeat")
]
Pins = Annotated[list[str] | None, typer.Option("--pin", help="MODULE=STAGE: a module on a stage; repeat")]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="Use this plan instead of making one")]


@app.callback()
def _root(
    traceback: Annotated[bool, typer.Option(TRACEBACK, help="Show the Python traceback of an error")] = False,
) -> None:
    """Compile an unmodified PyTorch model into a planned, running training pipeline."""


@app.command()
def demo(
    stages: Annotated[int, typer.Option(min=1, help="Stages, each a local process")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Training steps")] = 200,
) -> None:
    """Train a small GPT-2 on the standard library's source files over local processes; compare with one process."""
    from autopart.cli.demo.run import tour
    from autopart.cli.demo.train import Setting

    outcome = tour(Setting(stages=stages, steps=steps))
    raise typer.Exit(0 if outcome is None or outcome.ok else 1)


@app.command("plan")
def make_plan(
    model: ModelName,
    cluster: ClusterName = "cpu:2",
    stages: Stages = None,
    micro_batches: MicroBatches = None,
    schedule: ScheduleName = Schedule.AUTO,
    cuts: Cuts = None,
    seed: Seed = 0,
    costs: CostsName = "auto",
    optimizer: Optimizer = None,
    replicas: Replicas = None,
    recompute: Annotated[Recompute, typer.Option(help="Compute activations again to save memory")] = Recompute.AUTO,
    together: Together = None,
    pins: Pins = None,
    prove: Annotated[float, typer.Option(min=0.0, help="Seconds for a proof of how much faster a plan can be")] = 0.0,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Plan anew, even what was planned before")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the plan here; without it the JSON goes to stdout")] = None,
) -> None:
    """Plan a model, without running it: the stage table, what else was considered, and the plan as JSON."""
    if not _speaks():
        return
    options = _options(stages, micro_batches, schedule, cuts, seed, costs, None)
    options |= {
        "optimizer": optimizer, "replicas": _counts(replicas), "recompute": recompute.value, "pins": _pins(pins),
        "together": [tuple(text.split("+")) for text in together or ()], "watch": Progress(),
        "prove": prove, "cache": not no_cache,
    }  # fmt: skip
    subject = load_model(model, seed)
    made = api.planned(subject.model, cluster, sample=subject.batch, loss_fn=subject.loss_fn, **options)
    table = stage_table(made.plan, made.captured.graph)
    if out is None:
        typer.echo(table, err=True)
        typer.echo(plan_to_json(made.plan), nl=False)
    else:
        save_plan(made.plan, out)
        typer.echo(table)
        typer.echo(f"plan written to {out}")


@app.command()
def explain(
    plan: Annotated[Path, typer.Argument(help="A plan file")],
    model: Annotated[
        str | None, typer.Option(help="The model it is for, by name: adds module paths and parameter counts")
    ] = None,
    seed: Seed = 0,
) -> None:
    """The stage table of a plan file."""
    if not _speaks():
        return
    found = load_plan(plan)
    graph = None
    if model is not None:
        subject = load_model(model, seed)
        made = api.planned(
            subject.model, f"cpu:{found.world}", sample=subject.batch, loss_fn=subject.loss_fn, plan=found
        )
        graph = made.captured.graph
    typer.echo(stage_table(found, graph))


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(help="A plan file")],
    after: Annotated[Path, typer.Argument(help="Another one")],
) -> None:
    """What changes from one plan file to another.  Exit code 1 when they differ."""
    if not _speaks():
        return
    old, new = load_plan(before), load_plan(after)
    typer.echo(diff_plans(old, new))
    raise typer.Exit(0 if old == new else 1)


@app.command()
def verify(
    model: ModelName,
    cluster: ClusterName = "cpu:2",
    stages: Stages = None,
    micro_batches: MicroBatches = None,
    schedule: ScheduleName = Schedule.AUTO,
    cuts: Cuts = None,
    seed: Seed = 0,
    costs: CostsName = "auto",
    plan: PlanFile = None,
    tolerance: Annotated[
        float | None, typer.Option(min=0.0, help="Largest relative error; by default 1e-5 in fp32, 1e-10 in fp64")
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Lines of the table")] = 20,
) -> None:
    """One step of the pipeline against one process: every gradient compared.  Exit code 1 when out of tolerance."""
    options = _options(stages, micro_batches, schedule, cuts, seed, costs, plan)
    found = api.launch(_verify_on_rank, cluster, model, cluster, options, tolerance)[0]
    if _speaks():
        typer.echo(found.table(limit))
    raise typer.Exit(0 if found.ok else 1)


@app.command()
def version() -> None:
    """Versions of autopart, torch and Python."""
    if _speaks():
        typer.echo(
            f"autopart {metadata.version('autopart')}, torch {metadata.version('torch')}, "
            f"Python {platform.python_version()}"
        )


def _verify_on_rank(model: str, cluster: str, options: dict[str, Any], tolerance: float | None) -> Verification:
    """What `verify` runs on every rank."""
    subject = load_model(model, options["seed"])
    return api.verify(
        subject.model, cluster, sample=subject.batch, loss_fn=subject.loss_fn, tolerance=tolerance, **options
    )


def _options(
    stages: int | None,
    micro_batches: int | None,
    schedule: Schedule,
    cuts: list[str] | None,
    seed: int,
    costs: str,
    plan: Path | None,
) -> dict[str, Any]:
    """Keywords of `compile`, as plain data."""
    paths = tuple(path.strip() for text in cuts or () for path in text.split(","))
    return {
        "stages": stages, "micro_batches": micro_batches, "schedule": schedule.value, "cuts": paths, "seed": seed,
        "costs": costs, "plan": None if plan is None else str(plan),
    }  # fmt: skip


def _counts(text: str | None) -> int | tuple[int, ...] | None:
    """ "8" or "8,8,4" as the option wants it."""
    if text is None:
        return None
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise UsageError(f"--replicas {text!r} is no list of numbers", fix="write --replicas 8 or --replicas 8,8,4")
    return int(text) if len(words) == 1 else tuple(int(word) for word in words)


def _pins(texts: list[str] | None) -> dict[str, int]:
    pins = {}
    for text in texts or ():
        path, _, stage = text.rpartition("=")
        if not path or not stage.isdecimal():
            raise UsageError(f"--pin {text!r} is not understood", fix="write --pin lm_head=3")
        pins[path] = int(stage)
    return pins


class Progress:
    """Tells on stderr what a search does that takes longer than a second."""

    def __init__(self) -> None:
        self._began = self._told = time.monotonic()

    def __call__(self, what: str, best_ns: int, bound_ns: int) -> None:
        """A line at most every half second: what is being done, the best plan so far, the bound."""
        now = time.monotonic()
        if now - self._began < 1.0 or now - self._told < 0.5:
            return
        self._told = now
        best = f", best step {best_ns / 1e6:.2f} ms" if best_ns else ""
        bound = f", bound {bound_ns / 1e6:.2f} ms" if bound_ns else ""
        print(f"{now - self._began:6.1f} s  {what}{best}{bound}", file=sys.stderr)


def _speaks() -> bool:
    """Whether this process prints: always, but under a launcher on rank 0 alone."""
    return os.environ.get("RANK", "0") == "0"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; always ends with SystemExit."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        app(args=[word for word in words if word != TRACEBACK], prog_name="autopart")
    except AutopartError as error:
        if TRACEBACK in words:
            raise
        print(f"autopart: {error}" if _speaks() else f"rank {os.environ['RANK']}: {error.what}", file=sys.stderr)
        sys.exit(1 if isinstance(error, RunError) else 2)

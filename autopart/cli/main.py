"""The command line: plan, explain, report, schedule, diff, verify, checkpoint, cluster, version.

Under torchrun this process is one rank, and only rank 0 prints results.
"""

from __future__ import annotations

import platform
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from autopart import api
from autopart.cli import plans
from autopart.cli.checkpoints import app as checkpoint_app
from autopart.cli.entry import TRACEBACK, main
from autopart.cli.flags import ClusterName, ModelName, takes_option_flags
from autopart.cli.host_costs import detect_all
from autopart.cli.model_loader import load_model
from autopart.cli.once import Commands
from autopart.cli.output import Json, print_json, prints_results, say
from autopart.files.clusters import cluster_to_dict, cluster_to_yaml, parse_cluster, require_yaml, save_cluster
from autopart.files.presets import NODES
from autopart.ir.cluster import Cluster
from autopart.options import OPTIONS, read_options
from autopart.pipe.compare import Verification, verify_step
from autopart.report.cluster_table import cluster_table

__all__ = ["app", "main"]

app = Commands(
    name="autopart",
    help="Compile an unmodified PyTorch model into a planned, running training pipeline.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
cluster_app = Commands(
    name="cluster", help="Measure this machine, or show a preset or a cluster file.", no_args_is_help=True
)
app.add_typer(cluster_app)
app.add_typer(checkpoint_app)
_ON_EVERY_RANK = ("verify", "cluster")
"""Commands that ranks other than 0 run too."""


def _print_versions(wanted: bool) -> None:
    if wanted:
        if prints_results():
            version()
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    traceback: Annotated[bool, typer.Option(TRACEBACK, help="Show the Python traceback of an error")] = False,
    versions: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_versions, help="Show versions and exit")
    ] = False,
) -> None:
    """Compile an unmodified PyTorch model into a planned, running training pipeline."""
    if not prints_results() and context.invoked_subcommand not in _ON_EVERY_RANK:
        raise typer.Exit


app.command()(plans.plan)
app.command()(plans.explain)
app.command()(plans.report)
app.command()(plans.schedule)
app.command()(plans.diff)


@app.command()
@takes_option_flags
def verify(
    model: ModelName,
    flags: dict[str, Any],
    cluster: ClusterName = "cpu:2",
    plan: Annotated[Path | None, typer.Option("--plan", help="Use this plan instead of making one")] = None,
    tolerance: Annotated[
        float | None, typer.Option(min=0.0, help="Largest relative error; by default 1e-5 in fp32, 1e-10 in fp64")
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Lines of the table")] = 20,
    transport: Annotated[
        str,
        typer.Option(
            metavar="|".join(OPTIONS["transport"].values.choices()), help="Transport of messages between ranks"
        ),
    ] = "auto",
    as_json: Json = False,
) -> None:
    """Compare every gradient of one step of the pipeline with one process.  Exit code 1 when out of tolerance."""
    found = api.launch(_verify_on_rank, cluster, model, cluster, flags, plan, tolerance, transport)[0]
    if prints_results():
        if as_json:
            print_json({"ok": found.ok, "loss_error": found.loss_error, "largest": found.largest, **asdict(found)})
        else:
            say(found.table(limit))
    raise typer.Exit(0 if found.ok else 1)


@app.command()
def version() -> None:
    """Print the versions of autopart, torch and Python."""
    found = [f"{package} {metadata.version(package)}" for package in ("autopart", "torch")]
    say(", ".join([*found, f"Python {platform.python_version()}"]))


def _verify_on_rank(
    model: str, cluster: str, flags: dict[str, Any], plan: Path | None, tolerance: float | None, transport: str
) -> Verification:
    """Run `verify` on a rank."""
    subject = load_model(model, flags.get("seed", 0))
    options = read_options(loss_fn=subject.loss_fn, plan=plan, transport=transport, **flags)
    machines = parse_cluster(cluster, cuda_devices=torch.cuda.device_count())
    return verify_step(subject.model, machines, subject.batch, options, tolerance)


# ---- clusters -------------------------------------------------------------------------------------------------------

Described = Annotated[
    str, typer.Argument(help=f"{', '.join(NODES)} (h200x8:2 is two nodes), cpu:2, or a .yaml, .toml or .json file")
]
Out = Annotated[Path | None, typer.Option(help="Write the cluster here; without it the YAML goes to stdout")]


@cluster_app.command()
def detect(
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Local processes; by default one for each GPU, without a GPU two")
    ] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Measure devices, links and hosts of this machine, or under torchrun of all; print a table and the YAML."""
    if out is not None:
        require_yaml(out)
    found = detect_all(ranks)
    if prints_results():
        _print_cluster(found, out, as_json)


@cluster_app.command()
def show(cluster: Described, out: Out = None, as_json: Json = False) -> None:
    """Check a preset, a short description or a file; print a table and the cluster as YAML."""
    if prints_results():
        _print_cluster(parse_cluster(cluster), out, as_json)


def _print_cluster(cluster: Cluster, out: Path | None, as_json: bool) -> None:
    """Print the table and the YAML, or the cluster as JSON in the format of cluster files."""
    if out is not None:
        save_cluster(cluster, out)
    if as_json:
        print_json(cluster_to_dict(cluster))
    else:
        say(cluster_table(cluster), err=out is None)
    if out is not None:
        say(f"cluster written to {out}", err=as_json)
    elif not as_json:
        typer.echo(cluster_to_yaml(cluster), nl=False)

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
from autopart.cli.cluster import app as cluster_app
from autopart.cli.entry import TRACEBACK, main
from autopart.cli.flags import ClusterName, ModelName, takes_option_flags
from autopart.cli.model_loader import load_model
from autopart.cli.output import Json, print_json, prints_results, say
from autopart.files.clusters import parse_cluster
from autopart.options import OPTIONS, read_options
from autopart.pipe.compare import Verification, verify_step

__all__ = ["app", "main"]

app = typer.Typer(
    name="autopart",
    help="Compile an unmodified PyTorch model into a planned, running training pipeline.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(cluster_app)
app.add_typer(checkpoint_app)


def _print_versions(wanted: bool) -> None:
    if wanted:
        if prints_results():
            say(_versions())
        raise typer.Exit


@app.callback()
def _root(
    traceback: Annotated[bool, typer.Option(TRACEBACK, help="Show the Python traceback of an error")] = False,
    versions: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_versions, help="Show versions and exit")
    ] = False,
) -> None:
    """Compile an unmodified PyTorch model into a planned, running training pipeline."""


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
    if prints_results():
        say(_versions())


def _versions() -> str:
    found = [f"{package} {metadata.version(package)}" for package in ("autopart", "torch")]
    return ", ".join([*found, f"Python {platform.python_version()}"])


def _verify_on_rank(
    model: str, cluster: str, flags: dict[str, Any], plan: Path | None, tolerance: float | None, transport: str
) -> Verification:
    """Run `verify` on a rank."""
    subject = load_model(model, flags.get("seed", 0))
    options = read_options(loss_fn=subject.loss_fn, plan=plan, transport=transport, **flags)
    machines = parse_cluster(cluster, cuda_devices=torch.cuda.device_count())
    return verify_step(subject.model, machines, subject.batch, options, tolerance)

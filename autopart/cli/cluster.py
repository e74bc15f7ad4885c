"""`autopart cluster`: machines measured, and descriptions of machines shown."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from autopart.files.clusters import cluster_to_yaml, parse_cluster, require_yaml, save_cluster
from autopart.files.presets import NODES
from autopart.ir.cluster import Cluster
from autopart.report.cluster_table import cluster_table
from autopart.session.detect import detect as detect_cluster

app = typer.Typer(name="cluster", help="Machines: measure this one, or show a description.", no_args_is_help=True)

Described = Annotated[
    str, typer.Argument(help=f"{', '.join(NODES)} (h200x8:2 is two nodes), cpu:2, or a .yaml, .toml or .json file")
]
Out = Annotated[Path | None, typer.Option(help="Write the cluster here; without it the YAML goes to stdout")]


@app.command()
def detect(
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Local processes; by default one for each GPU, without a GPU two")
    ] = None,
    out: Out = None,
) -> None:
    """Measure devices and links of this machine, or under torchrun of all; the table, and the cluster as YAML."""
    if out is not None:
        require_yaml(out)
    found = detect_cluster(ranks)
    if os.environ.get("RANK", "0") == "0":
        _tell(found, out)


@app.command()
def show(
    cluster: Described,
    out: Out = None,
) -> None:
    """A preset, a short description or a file, checked; the table, and the cluster as YAML."""
    if os.environ.get("RANK", "0") == "0":
        _tell(parse_cluster(cluster), out)


def _tell(cluster: Cluster, out: Path | None) -> None:
    if out is None:
        typer.echo(cluster_table(cluster), err=True)
        typer.echo(cluster_to_yaml(cluster), nl=False)
    else:
        save_cluster(cluster, out)
        typer.echo(cluster_table(cluster))
        typer.echo(f"cluster written to {out}")

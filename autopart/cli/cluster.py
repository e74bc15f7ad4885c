"""`autopart cluster`: measure machines, and show their descriptions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopart.cli.host_costs import detect_all
from autopart.cli.output import Json, print_json, prints_results, say
from autopart.files.clusters import cluster_to_dict, cluster_to_yaml, parse_cluster, require_yaml, save_cluster
from autopart.files.presets import NODES
from autopart.ir.cluster import Cluster
from autopart.report.cluster_table import cluster_table

app = typer.Typer(
    name="cluster", help="Measure this machine, or show a preset or a cluster file.", no_args_is_help=True
)

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
    as_json: Json = False,
) -> None:
    """Measure devices, links and hosts of this machine, or under torchrun of all; print a table and the YAML."""
    if out is not None:
        require_yaml(out)
    found = detect_all(ranks)
    if prints_results():
        _print_cluster(found, out, as_json)


@app.command()
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

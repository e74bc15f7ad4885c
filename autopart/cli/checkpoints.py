"""The commands about folders of checkpoints: show, verify, export.  Only what reads tensors loads torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopart.cli.output import Json, print_json, prints_results
from autopart.files.checkpoints.document import AVERAGES, COMPANION, Document, problems_with, read_document
from autopart.files.checkpoints.folders import checkpoint_at
from autopart.ir.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    import torch

app = typer.Typer(name="checkpoint", help="Show and verify checkpoints, and export their weights.")

Folder = Annotated[Path, typer.Argument(help="The folder given to pipe.save, or the one of a single checkpoint")]


def _facts(path: Path, document: Document) -> dict[str, object]:
    from autopart.files.checkpoints.tensor_files import open_tensors

    optimizer = document.optimizer
    weights = open_tensors(path).by_name
    return {
        "folder": str(path),
        "step": document.step,
        "ranks": document.world,
        "precision": document.precision,
        "seed": document.seed,
        "torch": document.torch,
        "autopart": document.autopart,
        "weights": len(weights),
        "optimizer": None if optimizer is None else optimizer.kind,
        "parameter groups": 0 if optimizer is None else len(optimizer.groups),
        "scheduler": document.scheduler is not None,
        "files": {name: written.size_bytes for name, written in document.files.items()},
        "bytes": sum(written.size_bytes for written in document.files.values()),
        "extra": document.extra,
    }


@app.command()
def show(folder: Folder, as_json: Json = False) -> None:
    """Print what a checkpoint holds, without reading its tensors."""
    if not prints_results():
        return
    path = checkpoint_at(folder)
    facts = _facts(path, read_document(path))
    if as_json:
        print_json(facts)
        return
    for name, value in facts.items():
        if isinstance(value, dict) and name == "files":
            typer.echo("files")
            for file, size in value.items():
                typer.echo(f"  {size:>15,d} bytes  {file}")
        else:
            typer.echo(f"{name:17s}{value}")


@app.command()
def verify(folder: Folder) -> None:
    """Compare every file of a checkpoint with its size and SHA-256 when it was written; exit code 1 if one differs."""
    if not prints_results():
        return
    path = checkpoint_at(folder)
    document = read_document(path)
    problems = problems_with(path, document.files)
    for found in problems:
        typer.echo(str(found), err=True)
    size = sum(written.size_bytes for written in document.files.values())
    typer.echo(f"{path}: {len(document.files)} files, {size:,d} bytes, {len(problems)} of them changed")
    if problems:
        raise typer.Exit(1)


def _averages(path: Path, document: Document) -> dict[str, torch.Tensor]:
    """Return the averages that a checkpoint holds, by the names of the weights."""
    from autopart.files.checkpoints.tensor_files import TensorFiles

    stored = TensorFiles([path / name for name in document.files if name.startswith("state-")])
    home = f"{COMPANION}/{AVERAGES}/"
    names = [name for name in stored.by_name if name.startswith(home)]
    if not names:
        raise CheckpointError(
            "the checkpoint holds no averages",
            where=str(path),
            fix="make an autopart.AveragedModel(pipe) before pipe.save, or export without --averages",
        )
    return {name.removeprefix(home): tensor for name, tensor in stored.mapped(names)}


@app.command()
def export(
    folder: Folder,
    out: Annotated[Path, typer.Argument(help="The safetensors file to write, such as model.safetensors")],
    averages: Annotated[
        bool, typer.Option("--averages", help="The averages of an AveragedModel, not the weights")
    ] = False,
) -> None:
    """Write the weights of a checkpoint into one safetensors file, by their original names."""
    from autopart.files.checkpoints.tensor_files import open_tensors, write_tensors

    if not prints_results():
        return
    path = checkpoint_at(folder)
    document = read_document(path)
    if out.exists():
        raise UsageError(f"{out} exists", fix="pass the name of a new file")
    read = {name: written for name, written in document.files.items() if name.startswith("model-") or averages}
    for problem in problems_with(path, read):
        raise problem
    weights = open_tensors(path)
    tensors = dict(weights.mapped(weights.by_name))
    if averages:
        tensors |= _averages(path, document)
    draft = out.with_name(f".{out.name}.tmp")
    try:
        write_tensors(draft, tensors)
        draft.replace(out)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise CheckpointError("the weights cannot be written", where=str(out), why=str(error)) from error
    typer.echo(f"{len(weights.by_name)} tensors written to {out}")

"""The commands about folders of checkpoints: show, verify, export, convert.  Only what reads tensors loads torch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopart.cli.once import Commands
from autopart.cli.output import Json, print_json, prints_results, say
from autopart.files.checkpoints.document import AVERAGES, COMPANION, problems_with, read_document, require_unchanged
from autopart.files.checkpoints.folders import read_at
from autopart.ir.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    import torch

    from autopart.files.checkpoints.tensor_files import Stored

app = Commands(name="checkpoint", help="Show, verify and convert checkpoints, and export their weights.")

Folder = Annotated[Path, typer.Argument(help="The folder given to pipe.save, or the one of a single checkpoint")]


def _facts(path: Path) -> dict[str, object]:
    from autopart.files.checkpoints.tensor_files import opened

    document = read_document(path)
    optimizer = document.optimizer
    weights = opened(path, document).weights.by_name
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
    facts = read_at(folder, _facts)
    if as_json:
        print_json(facts)
        return
    for name, value in facts.items():
        if isinstance(value, dict) and name == "files":
            say("files")
            for file, size in value.items():
                say(f"  {size:>15,d} bytes  {file}")
        else:
            say(f"{name:17s}{value}")


@app.command()
def verify(folder: Folder) -> None:
    """Compare every file of a checkpoint with its size and SHA-256 when it was written; exit code 1 if one differs."""
    if not prints_results():
        return
    path, document = read_at(folder, lambda path: (path, read_document(path)))
    problems = problems_with(path, document.files)
    for found in problems:
        say(str(found), err=True)
    size = sum(written.size_bytes for written in document.files.values())
    say(f"{path}: {len(document.files)} files, {size:,d} bytes, {len(problems)} of them changed")
    if problems:
        raise typer.Exit(1)


def _averages(stored: Stored) -> dict[str, torch.Tensor]:
    """Return the averages that a checkpoint holds, by the names of the weights."""
    home = f"{COMPANION}/{AVERAGES}/"
    found = {n.removeprefix(home): each.mapped() for n, each in stored.more.by_name.items() if n.startswith(home)}
    if not found:
        raise CheckpointError(
            "the checkpoint holds no averages",
            where=str(stored.folder),
            fix="make an autopart.AveragedModel(pipe) before pipe.save, or export without --averages",
        )
    return found


def _exported(averages: bool, path: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint, after comparing the files that they are in with their hashes."""
    from autopart.files.checkpoints.tensor_files import opened

    document = read_document(path)
    stored = opened(path, document)
    read = {name: written for name, written in document.files.items() if name.startswith("model-") or averages}
    require_unchanged(path, read)
    weights = {name: each.mapped() for name, each in stored.weights.by_name.items()}
    return weights | (_averages(stored) if averages else {})


@app.command()
def export(
    folder: Folder,
    out: Annotated[Path, typer.Argument(help="The safetensors file to write, such as model.safetensors")],
    averages: Annotated[
        bool, typer.Option("--averages", help="The averages of an AveragedModel, not the weights")
    ] = False,
) -> None:
    """Write the weights of a checkpoint into one safetensors file, by their original names."""
    from autopart.files.checkpoints.tensor_files import write_tensors

    if not prints_results():
        return
    if out.exists():
        raise UsageError(f"{out} exists", fix="pass the name of a new file")
    tensors = read_at(folder, partial(_exported, averages))
    draft = out.with_name(f".{out.name}.tmp")
    try:
        draft.unlink(missing_ok=True)
        write_tensors(draft, tensors)
        draft.replace(out)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise CheckpointError("the weights cannot be written", where=str(out), why=str(error)) from error
    say(f"{len(tensors)} tensors written to {out}")


@app.command()
def convert(
    source: Annotated[
        Path, typer.Argument(help="A checkpoint, a folder of torch.distributed.checkpoint, or one of Hugging Face")
    ],
    out: Annotated[Path, typer.Argument(help="A new folder for DCP, or the folder of checkpoints to add one to")],
    optimizer: Annotated[
        str, typer.Option(help="Class of the optimizer of a DCP folder, such as AdamW; none leaves its state out")
    ] = "",
    step: Annotated[int | None, typer.Option(help="Training steps taken, where the source does not say", min=0)] = None,
) -> None:
    """Convert a checkpoint into a folder of torch.distributed.checkpoint, and such a folder, or one of Hugging Face,
    into a checkpoint, a few tensors at a time."""
    from autopart.extras.checkpoints.convert import convert as converted

    if not prints_results():
        return
    path, left = converted(source, out, optimizer=optimizer, step=step)
    say(f"written to {path}")
    if left:
        say(f"left out, since a checkpoint has no place for it: {', '.join(sorted(left)[:10])}")

"""All of a checkpoint that is not a tensor: what each rank tells, and the document made of that."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import torch

from autopart.files.checkpoints.document import Document, OptimizerState
from autopart.files.checkpoints.values import encoded
from autopart.ir.errors import CheckpointError, UsageError
from autopart.state.companions import refusal
from autopart.state.core import Core
from autopart.state.extra_state import EXTRA_STATE
from autopart.state.optimizers import Optimizers, joined
from autopart.state.scaler import LossScaler
from autopart.state.schedulers import HasState, scheduler_state


@dataclass(frozen=True, slots=True)
class Kept:
    """What belongs to a run, as it was last loaded or saved (`Pipe.load`, `Pipe.save`).  extra: of the user."""

    folder: str | os.PathLike[str]
    optimizers: Optimizers
    schedulers: Sequence[HasState]
    extra: Any = None


@dataclass(frozen=True, slots=True)
class Told:
    """What each rank tells the others before a checkpoint is written; `alike` has to be alike.  extra_state: of the
    modules for which this rank's counts."""

    optimizer: OptimizerState | None
    alike: dict[str, Any]
    extra_state: Mapping[str, Any]


def report_of(
    core: Core, kept: Kept, optimizer: OptimizerState | None, states: Mapping[str, Any] = MappingProxyType({})
) -> Told:
    """Return what this rank tells.  optimizer: what its optimizers hold."""
    alike = {
        "scaler": core.scaler.state_dict() if core.scaler is not None else None,
        "scheduler": scheduler_state(kept.schedulers, kept.optimizers),
        "companions": {title: encoded(each.state(), title) for title, each in core.companions.items()},
        "extra": encoded(kept.extra, "extra"),
    }
    return Told(optimizer, alike, dict(states))


def document_of(core: Core, every: Sequence[Told]) -> Document:
    """Return the document of a checkpoint, without its files; raises on all ranks alike if the ranks differ."""
    session = core.running
    assert session is not None
    try:
        for rank, each in enumerate(every):
            differing = [key for key, value in every[0].alike.items() if each.alike[key] != value]
            if differing and differing[0] != "extra":
                raise CheckpointError(
                    f"the {differing[0]} of ranks 0 and {rank} differ", fix="make and step it alike on every rank"
                )
        optimizer = joined([each.optimizer for each in every])
    except CheckpointError as error:
        raise session.world.known(error) from None
    alike = dict(every[0].alike)
    if states := {name: state for each in every for name, state in each.extra_state.items()}:
        alike["companions"] = {**alike["companions"], EXTRA_STATE: states}
    return Document(
        core.steps,
        torch.__version__,
        version(),
        {},
        seed=session.options.seed,
        world=session.world.size,
        precision=session.plan.provenance.precision,
        optimizer=optimizer,
        plan=json.loads(json.dumps(asdict(session.plan))),
        **alike,
    )


def require_scaler(document: Document) -> None:
    """Raise CheckpointError if the saved state of the loss scaler is not one."""
    try:
        LossScaler().load_state_dict(document.scaler or LossScaler().state_dict())
    except UsageError as error:
        raise refusal("the state of the loss scaler", document.scaler, error.what) from error


def version() -> str:
    """Return the version of autopart."""
    return str(sys.modules["autopart"].__version__)

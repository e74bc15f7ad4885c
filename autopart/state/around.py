"""All of a checkpoint that is not a tensor: the report of each rank, and the document made of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from autopart.files.checkpoints.document import Document
from autopart.files.checkpoints.values import encoded
from autopart.ir.errors import CheckpointError, UsageError
from autopart.session.session import Session
from autopart.state.companions import Companion, refusal
from autopart.state.extra_state import EXTRA_STATE
from autopart.state.optimizers import OptimizerPart, Optimizers, joined
from autopart.state.scaler import LossScaler
from autopart.state.schedulers import HasState, scheduler_state


@dataclass(frozen=True, slots=True)
class Around:
    """What is saved beside the tensors of the model, on this rank.

    step: training steps taken.  scaler: state of the loss scaler, None without one.  placeholder: the parameter of a
    rank without any."""

    step: int
    scaler: dict[str, Any] | None
    optimizers: Optimizers
    schedulers: Sequence[HasState]
    companions: Mapping[str, Companion]
    placeholder: nn.Parameter


@dataclass(frozen=True, slots=True)
class Told:
    """What each rank tells the others before a checkpoint is written; `alike` has to be alike.  extra_state: of the
    modules for which this rank's counts."""

    optimizer: OptimizerPart | None
    alike: dict[str, Any]
    extra_state: dict[str, Any]

    @classmethod
    def of(
        cls, part: OptimizerPart | None, around: Around, extra: Any, states: Mapping[str, Any] = MappingProxyType({})
    ) -> Told:
        alike = {
            "scaler": around.scaler,
            "scheduler": scheduler_state(around.schedulers, around.optimizers),
            "companions": {title: encoded(each.state(), title) for title, each in around.companions.items()},
            "extra": encoded(extra, "extra"),
        }
        return cls(part and part.without_tensors(), alike, dict(states))


def document_of(session: Session, told: Sequence[Told], step: int) -> Document:
    """Return the document of a checkpoint, without its files; raises on all ranks alike if the ranks differ."""
    try:
        for rank, each in enumerate(told):
            differing = [key for key, value in told[0].alike.items() if each.alike[key] != value]
            if differing and differing[0] != "extra":
                raise CheckpointError(
                    f"the {differing[0]} of ranks 0 and {rank} differ", fix="make and step it alike on every rank"
                )
        optimizer = joined([each.optimizer for each in told])
    except CheckpointError as error:
        raise session.world.known(error) from None
    alike = dict(told[0].alike)
    if states := {name: state for each in told for name, state in each.extra_state.items()}:
        alike["companions"] = {**alike["companions"], EXTRA_STATE: states}
    return Document(
        step,
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

"""The whole model's values in the model that was compiled, for a while: for averages, logging and generation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from autopart.ir.errors import UsageError
from autopart.session.session import Session
from autopart.state.state_dict import gather_state, require_values


@contextmanager
def full_parameters(session: Session) -> Iterator[None]:
    """Let the model's tensors point to gathered values inside, and to their own memory again afterwards.  The gathering
    is collective.  Bytes: those of the model, on every rank, while it lasts.

    What the pipeline trains is untouched, so writes inside are lost: UsageError names one at the end, if torch counted
    it (a write through `.data` is not).
    """
    with session.call("full_parameters"):
        require_values(session)
        values = gather_state(session)
    own = session.captures.trained.tensors()
    trained = {name: tensor.data for name, tensor in own.items()}
    try:
        for name, tensor in own.items():
            if name in values and values[name].shape == tensor.shape:
                tensor.data = values[name].to(tensor.device)
        versions = {name: tensor._version for name, tensor in own.items()}
        del values
        yield
        written = next((name for name, tensor in own.items() if tensor._version != versions[name]), None)
    finally:
        for name, tensor in own.items():
            tensor.data = trained[name]
    session.tensors.masters.accept()
    if written is not None:
        raise UsageError(
            f"{written} was written to inside pipe.full_parameters()",
            why="the model has copies of the values there, so the write is lost; training goes on with those before",
            fix="change a state and load it: state = pipe.state_dict(); ...; pipe.load_state_dict(state)",
        )

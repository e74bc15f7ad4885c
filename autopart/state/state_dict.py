"""State and gradients of the whole model, gathered from and loaded into the ranks that hold them."""

from __future__ import annotations

import functools
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from autopart.capture.python.guards import EMPTIED
from autopart.capture.trained import Trained
from autopart.ir.errors import UsageError
from autopart.runtime.masters import HALF, needs_master
from autopart.runtime.tensors import gather_tensors
from autopart.session.ranks.agreement import together
from autopart.session.session import Session
from autopart.state.extra_state import counting_here, gather_extra_state, key_of, sync_extra_state

_REMEMBERED = "autopart"  # key in the metadata of a state


def gather_state(session: Session) -> dict[str, torch.Tensor]:
    """Return the model's parameters and saved buffers by their own names, on every rank, on the CPU, without those that
    the model got after its capture.  Collective."""
    session.calls.require_healthy()
    session.tensors.masters.write()
    held, tied = session.tensors.held, session.tied
    captures = session.captures
    whole = {n: t for n, t in captures.trained.tensors().items() if captures.is_own(n, t)}
    first = {tied.get(name, name): name for name in reversed(whole)}
    gathered = gather_tensors(
        session.world,
        session.standing.context.placement.owned(first),
        {name: whole[original] for name, original in first.items()},
        lambda name: held.get(name, whole[first[name]]),
    )
    values = {name: tensor for name, tensor in gathered.items() if tensor is not None}
    return {name: values[tied.get(name, name)] for name in whole}


def local_state(session: Session, steps: int) -> dict[str, Any]:
    """Return this rank's part of the values, by their own names, on the CPU: what it trains or updates, and what no
    rank does; and the extra state that counts here.  Local."""
    session.tensors.masters.write()
    held, tied, captures = session.tensors.held, session.tied, session.captures
    kept: OrderedDict[str, Any] = OrderedDict()
    for name, own in captures.trained.tensors().items():
        first = tied.get(name, name)
        if first in held and session.standing.keeps(first):
            kept[str(replace(session.tensors.piece(first), name=name))] = held[first].detach().cpu().clone()
        elif session.standing.context.placement.owner(first) is None and captures.is_own(name, own):
            kept[name] = own.detach().cpu().clone()
    kept.update((key_of(name), module.get_extra_state()) for name, module in counting_here(session).items())
    kept._metadata = {_REMEMBERED: {"steps": steps}}  # type: ignore[attr-defined]
    return kept


def gather_masters(session: Session) -> dict[str, torch.Tensor]:
    """Return the master weights of the whole model, tied ones once, on every rank, on the CPU.  Collective."""
    wanted = {
        name: torch.empty_like(tensor, dtype=torch.float32, device="meta")
        for name, tensor in session.captures.trained.named_parameters()
        if session.options.master_weights and tensor.dtype in HALF
    }
    owners = session.standing.context.placement.owned(wanted)
    found = gather_tensors(session.world, owners, wanted, session.tensors.masters.by_name.get)
    return {name: master for name, master in found.items() if master is not None}


def sync_state(session: Session, *, at_the_end: bool = False) -> None:
    """Copy what other ranks hold into this rank's model.  Collective.  Bytes sent: the size of the model.

    A model on the meta device keeps no values, at the end too; before that UsageError is raised.
    at_the_end: warn about a parameter that was written to, and is overwritten by its fp32 master weight."""
    if session.captures.trained.without_values:
        if not at_the_end:
            require_values(session)
        return
    if at_the_end and (written := session.tensors.masters.written()) is not None:
        warnings.warn(
            f"{written} was written to in the model since the last run; this is lost, as its fp32 master weight counts",
            stacklevel=4,
        )
    state = gather_state(session)
    own = session.captures.trained.tensors()
    with torch.no_grad():
        for name, tensor in state.items():
            if own[name].shape == tensor.shape:
                own[name].copy_(tensor)
    session.tensors.masters.accept()  # of a tied parameter this may be the value of another rank
    sync_extra_state(session)


def require_values(session: Session) -> None:
    """Raise UsageError, on all ranks alike, if the model was built on the meta device, without memory for values."""
    if first := session.captures.trained.without_values:
        raise session.world.known(
            UsageError(
                f"{first} is on the meta device in the model",
                why="the model was built without memory for its values, which the ranks keep in parts",
                fix="pipe.save(folder) writes them, with the index that from_pretrained reads; pipe.state_dict() "
                "returns them all; autopart.load_into(model, folder) loads them into a model with values",
            )
        )


def empty_foreign(session: Session) -> None:
    """Empty the parameters and updated buffers of this rank's model that other ranks trained, since they are stale."""
    model, held, tied = session.captures.trained, session.tensors.held, session.tied
    session.tensors.masters.write()
    updated = {buffer for buffer, _ in session.graph.updates}
    trained = {param.name for param in session.graph.params if param.trainable} | updated
    owned = {piece.name for piece in session.standing.context.placement.owners}
    trained |= owned - {param.name for param in session.graph.params}
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            first = tied.get(name, name)
            newest = first in held and session.standing.keeps(first) and session.tensors.piece(first).is_whole
            if tensor.is_meta or first not in trained or (newest and held[first] is tensor):
                continue
            if newest and tensor.shape != held[first].shape:
                continue  # put there by the user, which is why the pipe has failed
            if newest:
                tensor.copy_(held[first])  # trained here, on another device
            else:
                tensor.data = tensor.data.new_empty(0)
                setattr(tensor, EMPTIED, True)


def whole_state(session: Session, **more: Any) -> dict[str, Any]:
    """Return what the model's own `state_dict` makes of the values of all ranks, with `more` and the master weights in
    its metadata, where torch keeps the versions of modules.  Collective."""
    trained, values, states = session.captures.trained, gather_state(session), gather_extra_state(session)
    if masters := gather_masters(session):
        more["masters"] = masters
    with together(session.world, "making the state of the model"), trained.holding(values, states):
        kept = trained.state_dict()
        for name in trained.tensors().keys() - values.keys():  # the model got it after its capture
            kept.pop(name, None)
    kept._metadata[_REMEMBERED] = more  # type: ignore[attr-defined]
    return kept


def remembered(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return what a state holds besides tensors, as far as it is there: steps, scaler, and masters by name."""
    metadata = getattr(state, "_metadata", None)
    found = metadata.get(_REMEMBERED) if isinstance(metadata, Mapping) else None
    if not isinstance(found, Mapping):
        return {}
    kinds = {"steps": int, "scaler": Mapping, "masters": Mapping}
    return {name: found[name] for name, kind in kinds.items() if isinstance(found.get(name), kind)}


def load_state(
    model: Trained, session: Session | None, state: Mapping[str, Any], *, strict: bool = True
) -> tuple[list[str], list[str]]:
    """Load a state of the unpartitioned model, through its own `load_state_dict`, into the model and into what this
    rank of a session holds.

    Returns the missing and the unexpected names; with strict both are refused.  Nothing changes when a name or a shape
    does not fit (UsageError).
    """
    own = model.tensors()
    if not isinstance(state, Mapping):
        raise UsageError(f"the state is a {type(state).__name__}", fix=_THIS_MODELS)
    if session is None and model.without_values:
        raise UsageError(
            f"{model.without_values} is on the meta device", fix="pass sample= to compile, and load the state after it"
        )
    held: Mapping[str, torch.Tensor] = {}
    if session is not None:
        here, tied = session.tensors.held, session.tied
        held = {name: here[first] for name in own if (first := tied.get(name, name)) in here}
        if session.standing.context.placement.cuts:
            state = _pieces_of(session, state)
    with warnings.catch_warnings(), model.holding(held):
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")  # values are with the pipe
        wrong = _loaded(model, state, strict=strict)
    if session is None:
        return wrong
    masters, kept, own_way = session.tensors.masters, remembered(state).get("masters", {}), model.own_loading()
    with torch.no_grad():
        for name, target in held.items():
            first = session.tied.get(name, name)
            if own[name] is not target and not own[name].is_meta:
                session.tensors.write(first, own[name], target)
            given = state.get(name)
            if own_way and not (isinstance(given, torch.Tensor) and torch.equal(given.to(target), target)):
                given = target
            if given is not None:
                master = kept.get(first)
                masters.take_over(first, given, master if master is None else session.tensors.cut(first, master))
    masters.write()
    return wrong


def _pieces_of(session: Session, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state with pieces in place of the whole tensors of which this rank holds no more."""
    found, tensors = OrderedDict(state), session.tensors
    found._metadata = getattr(state, "_metadata", {})  # type: ignore[attr-defined]
    for name, own in session.captures.trained.tensors().items():
        first, given = session.tied.get(name, name), state.get(name)
        if first in tensors.held and isinstance(given, torch.Tensor) and given.shape == own.shape:
            found[name] = tensors.cut(first, given)
    return found


def _loaded(model: Trained, state: Mapping[str, Any], *, strict: bool) -> tuple[list[str], list[str]]:
    """Load a state, or change nothing and raise UsageError if it does not fit.  Only a model that loads in its own way
    knows what fits: its tensors are copied before, to be set back."""
    own = model.tensors()
    if not model.own_loading():
        wrong = _check_state({**own, **dict.fromkeys(map(key_of, model.stateful()))}, state, strict=strict)
        model.load_state_dict(state, strict=False)
        return wrong
    before = {name: tensor.detach().clone() for name, tensor in own.items()}
    try:
        return model.load_state_dict(state, strict=strict)
    except Exception as error:
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(before[name])
        raise UsageError(
            "the model's own load_state_dict does not take this state", why=f"{error}", fix=_THIS_MODELS
        ) from error


def take_masters(session: Session, masters: Mapping[str, torch.Tensor]) -> None:
    """Load master weights of a state that was loaded into the model before there was a session."""
    tensors = session.tensors
    for name, master in masters.items():
        if name in tensors.held:
            tensors.masters.take_over(name, tensors.held[name], tensors.cut(name, master))


def gather_gradients(session: Session) -> dict[str, torch.Tensor | None]:
    """Return the gradient of every trainable parameter, tied ones once, on every rank, on the CPU.  Collective."""
    session.calls.require_healthy()
    driven = session.tensors.driven
    trainable = {name: p for name, p in session.captures.trained.named_parameters() if p.requires_grad}
    wide = [name for name, p in trainable.items() if session.options.master_weights and needs_master(p)]
    like = trainable | {name: torch.empty_like(trainable[name], dtype=torch.float32, device="meta") for name in wide}
    return gather_tensors(
        session.world,
        session.standing.context.placement.owned(trainable),
        like,
        lambda name: driven.get(name, trainable[name]).grad,
    )


def gradient_norm(session: Session, norm_type: float, limit: float = 0.0) -> float | None:
    """Return the norm of all gradients over all stages, None if no rank has one.  limit: that is the same on all ranks,
    or UsageError is raised on all.  Collective."""
    norms = list(own_norms(session, norm_type).values())
    rows = session.world.gather_numbers([_norm_of(norms, norm_type), float(bool(norms)), limit])
    for rank, (*_, other) in enumerate(rows):
        if other != rows[0][2]:
            error = UsageError(
                f"max_norm is {rows[0][2]:g} on rank 0 and {other:g} on rank {rank}",
                why="each rank would scale its gradients by another factor",
                fix="pass the same number on every rank",
            )
            raise session.world.known(error)
    return _norm_of([row[0] for row in rows], norm_type) if any(row[1] for row in rows) else None


def own_norms(session: Session, norm_type: float) -> dict[str, float]:
    """Return the norm of each gradient whose parameter this rank owns a piece of, by name: a piece counts on one rank
    alone."""
    owned = session.standing.context.placement.owned_by(session.world.rank)
    found = {}
    for name, gradient in _gradients_here(session).items():
        if name in owned:
            own = gradient if gradient.layout == torch.strided else gradient.coalesce().values()  # others are zeros
            wide = own.to(torch.promote_types(own.dtype, torch.float64))
            found[name] = float(torch.linalg.vector_norm(wide, norm_type))
    return found


def _gradients_here(session: Session) -> dict[str, torch.Tensor]:
    """Return the gradients that this rank holds, by name."""
    return {name: t.grad for name, t in session.tensors.driven.items() if t.grad is not None}


def clip_gradients(session: Session, max_norm: float, norm_type: float) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most max_norm, and return the norm before.  Collective."""
    total = gradient_norm(session, norm_type, float(max_norm)) or 0.0
    scale = max_norm / (total + 1e-6)
    if not scale >= 1.0:  # includes NaN
        for gradient in _gradients_here(session).values():
            gradient.mul_(scale)
    dtypes = [
        p.dtype for _, p in session.captures.trained.named_parameters() if p.requires_grad and p.is_floating_point()
    ]
    return torch.tensor(total, dtype=functools.reduce(torch.promote_types, dtypes, torch.float32))


def _norm_of(norms: Sequence[float], norm_type: float) -> float:
    """Return the norm of tensors with these norms; 0 without any."""
    return float(torch.linalg.vector_norm(torch.tensor([0.0, *norms], dtype=torch.float64), norm_type))


_THIS_MODELS = "pass a state of this model, as its state_dict() returns it"


def _check_state(
    own: Mapping[str, torch.Tensor | None], state: Mapping[str, Any], *, strict: bool
) -> tuple[list[str], list[str]]:
    """Return the missing and the unexpected names.  own: tensors, and None for extra state.  Raises UsageError."""
    missing, unexpected = sorted(set(own) - set(state)), sorted(set(state) - set(own))
    if (strict and (missing or unexpected)) or (own and len(missing) == len(own)):
        raise _foreign_state(missing, unexpected)
    for name, tensor in own.items():
        if name in missing or tensor is None:
            continue
        if not isinstance(state[name], torch.Tensor):
            raise UsageError(f"{name} is a {type(state[name]).__name__} in the state", fix="pass tensors")
        if tuple(state[name].shape) != tuple(tensor.shape):
            raise UsageError(
                f"{name} has shape {tuple(state[name].shape)} in the state and {tuple(tensor.shape)} in the model",
                fix=_THIS_MODELS,
            )
        if state[name].is_complex() and not tensor.is_complex():
            raise UsageError(f"{name} is complex in the state and real in the model", fix=_THIS_MODELS)
    return missing, unexpected


def _foreign_state(missing: Sequence[str], unexpected: Sequence[str]) -> UsageError:
    what = "the state does not belong to this model"
    for name in missing[:1]:
        prefix = next((other.removesuffix(name) for other in unexpected if other.endswith(f".{name}")), "")
        if prefix and all(f"{prefix}{each}" in unexpected for each in missing):
            return UsageError(
                what,
                why=f"its names begin with {prefix!r}, as those of a wrapped model do",
                fix=f"load {{name.removeprefix({prefix!r}): tensor for name, tensor in state.items()}}",
            )
    wrong = [
        f"{len(names)} {kind}, such as {names[0]}"
        for kind, names in (("missing", missing), ("unexpected", unexpected))
        if names
    ]
    return UsageError(what, why="; ".join(wrong), fix=_THIS_MODELS)


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

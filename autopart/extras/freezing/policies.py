"""Policies: which layers are frozen in an epoch, decided on one rank from the norms of gradients, and done on all.

May enter: a rule that was published, as a `Policy`.  What a prefix of a model is stands in `passes.graph.prefixes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from autopart.ir.errors import UsageError
from autopart.passes.graph.prefixes import Layer, layers_of, prefix_of
from autopart.session.ranks.agreement import from_rank
from autopart.session.session import Session
from autopart.state.misuse_guards import short_tracebacks
from autopart.state.state_dict import own_norms

Prefix = int | Collection[str]
"""The number of first layers that are frozen, or their names."""
Rule = Callable[[int, Mapping[str, float]], Prefix]
"""From the epoch and the norm of each layer's gradient, in the order of layers, to what is frozen."""


@runtime_checkable
class HasSession(Protocol):
    """A pipe, which stands above this room."""

    @property
    def session(self) -> Session:
        """The session of this rank."""


@short_tracebacks
class Policy:
    """Freezes the layers that a function says.

    `rule(epoch, norms)` returns how many of the first layers are frozen in this epoch, or their names.  norms: of the
    gradients that the pipe holds now, by layer; 0 of a layer without any, as when it is frozen.  Layers are in the
    order of the data flow; with a layer everything before it is frozen, in layers or not.
    """

    def __init__(self, rule: Rule, *, layers: str | Iterable[str] = ()) -> None:
        """layers: patterns of the paths of modules that are layers, as "encoder.layer.*"; without any, the outermost
        modules with a number as their name."""
        if not callable(rule):
            raise UsageError(f"the rule is {rule!r}", fix="pass a function of (epoch, norms), or PipeTransformer()")
        self._rule = rule
        self._patterns = (layers,) if isinstance(layers, str) else tuple(layers)
        self._own: frozenset[str] = frozenset()

    def layers(self, pipe: HasSession) -> tuple[str, ...]:
        """Return the layers of a pipe's model, in the order in which they freeze.  Not collective."""
        return tuple(layer.name for layer in self._layers(pipe.session))

    def norms(self, pipe: HasSession) -> dict[str, float]:
        """Return the norm of each layer's gradient, as in one process: over all stages, each parameter once.
        Collective."""
        with pipe.session.call("freeze") as session:
            return _layer_norms(session, self._layers(session))

    def apply(self, pipe: HasSession, epoch: int) -> bool:
        """Freeze what the rule says for this epoch, and return whether that is another prefix than before.

        Call it on every rank between two steps, before `zero_grad`, so that there are gradients whose norms the rule
        can see.  The rule is called on rank 0.  What this policy froze and the rule no longer names learns again; what
        the user froze stays frozen.  Tied parameters freeze with the first layer that uses them.

        Raises UsageError for layers that are no prefix, and what the rule raises.  Collective.
        """
        with pipe.session.call("freeze") as session:
            layers = self._layers(session)
            norms = _layer_norms(session, layers)

            def decided() -> tuple[frozenset[str], dict[str, float]]:
                wanted = self._rule(epoch, norms)
                chosen = prefix_of(layers, wanted if isinstance(wanted, int) else _names_of(wanted))
                return frozenset[str]().union(*(layer.frozen for layer in chosen)), self.state_dict()

            frozen, state = from_rank(session.world, 0, "choosing the layers that freeze", decided)
            self.load_state_dict(state)
            return self._freeze(session, frozen)

    def state_dict(self) -> dict[str, float]:
        """Return what the rule remembers of earlier epochs: numbers, for a checkpoint.  Equal on all ranks."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a state; `apply` then freezes as many layers again."""

    def _layers(self, session: Session) -> tuple[Layer, ...]:
        return layers_of(session.whole_graph, self._patterns)

    def _freeze(self, session: Session, names: frozenset[str]) -> bool:
        """Give the parameters of the model their flags; return whether any changed.  Local."""
        parameters = dict(session.captures.trained.named_parameters())
        fresh = {name for name in names if parameters[name].requires_grad}
        again = self._own - names
        for name in fresh | again:
            parameters[name].requires_grad_(name in again)
            held = session.tensors.driven.get(name)
            if name in fresh and held is not None:
                held.grad = None  # so that no optimizer moves it
        self._own = (self._own & names) | fresh
        return bool(fresh or again)


def _layer_norms(session: Session, layers: Sequence[Layer]) -> dict[str, float]:
    """Return the 2-norm of each layer's gradient, 0 without any.  Collective; equal on all ranks.

    Replicas and tied copies count once; a parameter that two layers share counts in both.  Sends a number for each
    layer.
    """
    squares = {name: norm**2 for name, norm in own_norms(session, 2.0).items()}
    own = [math.fsum([squares[name] for name in layer.params if name in squares]) for layer in layers]
    sums = map(math.fsum, zip(*session.world.gather_numbers(own), strict=True))
    return {layer.name: math.sqrt(total) for layer, total in zip(layers, sums, strict=True)}


def _names_of(wanted: object) -> Sequence[str]:
    if isinstance(wanted, str) or not isinstance(wanted, Collection):
        raise UsageError(
            f"the rule returned {wanted!r}", fix="return the number of layers that are frozen, or a list of their names"
        )
    return [str(name) for name in wanted]


_ROUNDING = 1e-9


def closed_form(layers: int, alpha: float, epoch: int) -> int:
    """Return how many of the layers are frozen in an epoch (from 0) if gradients do not count: the first term alone,
    which is what the published code of PipeTransformer uses."""
    return math.ceil(layers * (1 - (1 - alpha) ** epoch) - _ROUNDING)


@short_tracebacks
class PipeTransformer(Policy):
    """Freezes a part `alpha` of the layers that still learn before every epoch but the first, and no layer behind the
    one with the smallest gradient norm (He et al., ICML 2021, section 3.1):

        L_frozen(T) = min( L_frozen(T-1) + alpha (L - L_frozen(T-1)),  argmin of ||g_l|| over the active layers l )

    Layers count from 1; a number of layers is rounded up, as in the published code.  The embeddings freeze with the
    first layer, and what comes behind the last layer never does.
    """

    def __init__(self, alpha: float = 1 / 3, *, gradients: bool = True, layers: str | Iterable[str] = ()) -> None:
        """alpha: between 0 and 1.  gradients: whether norms of gradients count; else the closed form is used.  layers:
        as for `Policy`."""
        if not 0 < alpha < 1:
            raise UsageError(f"alpha is {alpha!r}", fix="use a number between 0 and 1, such as 1/3")
        super().__init__(self._frozen, layers=layers)
        self.alpha, self.gradients = alpha, gradients
        self._bound, self._epoch = 0.0, 0

    def _frozen(self, epoch: int, norms: Mapping[str, float]) -> int:
        """Return how many layers are frozen in an epoch: none in epoch 0, and as many as before in one that was asked
        for."""
        if not self.gradients:
            return closed_form(len(norms), self.alpha, epoch)
        if epoch > self._epoch:
            active = list(norms.values())[self._rounded :]
            calmest = self._rounded + _smallest(active) if active else len(norms)
            self._bound = min(self._bound + self.alpha * (len(norms) - self._bound), calmest)
            self._epoch = epoch
        return self._rounded

    @property
    def _rounded(self) -> int:
        return math.ceil(self._bound - _ROUNDING)

    def state_dict(self) -> dict[str, float]:
        """Return the bound on the number of layers, and its epoch."""
        return {"bound": self._bound, "epoch": self._epoch}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a state; `apply` then freezes as many layers again."""
        self._bound, self._epoch = float(state["bound"]), int(state["epoch"])


def _smallest(norms: Sequence[float]) -> int:
    """Return the place, from 1, of the smallest norm, the first of equal ones, where there is a gradient.

    Raises UsageError if there is none.
    """
    known = [(norm, place) for place, norm in enumerate(norms, 1) if norm and math.isfinite(norm)]
    if not known:
        raise UsageError(
            "no layer has a gradient whose norm could be compared",
            fix="call apply() after pipe.step() and before zero_grad(), or use PipeTransformer(gradients=False)",
        )
    return min(known)[1]

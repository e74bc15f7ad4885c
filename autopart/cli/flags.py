"""The flags that several commands take, each declared once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from autopart.cli.demo.models import BUILTIN
from autopart.costs.sources import COST_SOURCES
from autopart.ir.errors import UsageError
from autopart.ir.shares import POLICIES
from autopart.options import COMPRESS, PRECISIONS, RECOMPUTE, ZERO, Options, read_options
from autopart.passes.program.schedules import names
from autopart.passes.search.space import Watch
from autopart.runtime.world import transports

ModelName = Annotated[
    str, typer.Argument(help=f"{', '.join(BUILTIN)}, or module:function or file.py:function -> (model, batch)")
]
ClusterName = Annotated[
    str, typer.Option("--cluster", help='"cpu:2", "cuda:8", "h200x8", or a .yaml, .toml or .json file')
]
Seed = Annotated[int, typer.Option(help="Seed of the weights and of dropout")]
TransportName = Annotated[
    str, typer.Option("--transport", metavar="|".join(transports()), help="What carries messages between ranks")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")]
TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", help="Write the simulated step here: .json for a trace viewer, .txt as a picture in text"),
]


def _one_of(*names: str) -> str:
    return "|".join(names)


@dataclass(frozen=True)
class PlanFlags:
    """How to plan; what is left out is for the planner to choose."""

    stages: Annotated[int | None, typer.Option(help="Number of stages")] = None
    micro_batches: Annotated[int | None, typer.Option(help="Number of micro-batches")] = None
    schedule: Annotated[
        str, typer.Option(metavar=_one_of("auto", *names()), help="Order of forwards and backwards")
    ] = "auto"
    cuts: Annotated[
        list[str] | None,
        typer.Option("--cuts", help="Module path at which a stage begins; repeat, or separate by commas"),
    ] = None
    together: Annotated[
        list[str] | None,
        typer.Option(help="Module path inside which no stage begins, or several joined by +; repeat"),
    ] = None
    pins: Annotated[
        list[str] | None, typer.Option("--pin", metavar="MODULE=STAGE", help="Stage of a module; repeat")
    ] = None
    replicas: Annotated[str | None, typer.Option(help="Devices of every stage, or one number for each: 8,8,4")] = None
    replica_policy: Annotated[
        str | None,
        typer.Option(metavar=_one_of(*POLICIES), help="Replicas split the rows, or take micro-batches in turn"),
    ] = None
    token_slices: Annotated[
        str | None, typer.Option(metavar="auto|K|LENGTHS", help="Cut sequences into slices: 4, or 512,512,256")
    ] = None
    recompute: Annotated[
        list[str] | None,
        typer.Option(
            metavar=f"{_one_of(*RECOMPUTE)}|PATTERN",
            help="Compute activations again to save memory: as needed, never, everywhere, or of these modules; repeat",
        ),
    ] = None
    precision: Annotated[
        str | None, typer.Option(metavar=_one_of(*PRECISIONS), help="Run the model as it is, or under an autocast")
    ] = None
    zero: Annotated[
        str, typer.Option(metavar=_one_of(*map(str, ZERO)), help="Let replicas of a stage share the optimizer state")
    ] = "auto"
    master_weights: Annotated[
        bool, typer.Option("--master-weights", help="fp32 masters of parameters in half precision")
    ] = False
    bucket_bytes: Annotated[
        int | None, typer.Option(help="Gradients that replicas sum together; 25 MiB unless said otherwise")
    ] = None
    compress: Annotated[
        str | None,
        typer.Option(metavar=_one_of(*COMPRESS), help="Round gradients for sums over replicas: faster, not exact"),
    ] = None
    optimizer: Annotated[
        str | None, typer.Option(help="sgd, momentum, adam or adamw, each also with +masters; decides the memory")
    ] = None
    costs: Annotated[
        str,
        typer.Option(
            metavar=_one_of(*COST_SOURCES), help="Times of ops: measured on this machine, or from FLOPs and bytes"
        ),
    ] = "auto"
    prove: Annotated[float, typer.Option(min=0.0, help="Seconds for a proof of how much faster a plan can be")] = 0.0
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Plan anew, even what was planned before")] = False
    seed: Seed = 0

    def options(
        self, *, loss_fn: Any, plan: Path | None = None, watch: Watch | None = None, transport: str = "auto"
    ) -> Options:
        """The options of `autopart.plan` that these flags stand for.  Raises UsageError."""
        return read_options(
            loss_fn=loss_fn,
            stages=self.stages,
            micro_batches=self.micro_batches,
            schedule=self.schedule,
            cuts=[path.strip() for text in self.cuts or () for path in text.split(",")],
            together=[tuple(text.split("+")) for text in self.together or ()],
            pins=_pins(self.pins),
            replicas=_replicas(self.replicas),
            replica_policy=self.replica_policy,
            token_slices=_token_slices(self.token_slices),
            recompute=_recompute(self.recompute or ["auto"]),
            precision=self.precision,
            zero=int(self.zero) if self.zero.isdecimal() else self.zero,
            master_weights=self.master_weights,
            bucket_bytes=self.bucket_bytes,
            compress=self.compress,
            optimizer=self.optimizer,
            costs=self.costs,
            prove=self.prove,
            cache=not self.no_cache,
            watch=watch,
            plan=plan,
            seed=self.seed,
            transport=transport,
        )


Result = TypeVar("Result")


def takes_plan_flags(command: Callable[..., Result]) -> Callable[..., Result]:
    """Give a command every flag of `PlanFlags`; it gets them as one argument, `flags`."""
    flags = inspect.signature(PlanFlags, eval_str=True).parameters
    own = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def with_flags(**given: Any) -> Result:
        chosen = PlanFlags(**{name: given.pop(name) for name in flags})
        return command(flags=chosen, **given)

    parameters = [p for p in own.parameters.values() if p.name != "flags"]
    parameters += [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in flags.values()]
    with_flags.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_flags.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_flags


def _replicas(text: str | None) -> int | tuple[int, ...] | None:
    """ "8" or "8,8,4" as the option takes it."""
    if text is None:
        return None
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise UsageError(f"--replicas {text!r} is not a list of numbers", fix="write --replicas 8 or --replicas 8,8,4")
    return int(text) if len(words) == 1 else tuple(int(word) for word in words)


def _token_slices(text: str | None) -> str | int | tuple[int, ...] | None:
    words = (text or "").split(",")
    if text is None or not all(word.strip().isdecimal() for word in words):
        return text
    return int(text) if len(words) == 1 else tuple(int(word) for word in words)


def _recompute(given: list[str]) -> str | list[str]:
    found = [pattern.strip() for text in given for pattern in text.split(",")]
    return found[0] if len(found) == 1 and found[0] in RECOMPUTE else found


def _pins(texts: list[str] | None) -> dict[str, int]:
    pins = {}
    for text in texts or ():
        path, _, stage = text.rpartition("=")
        if not path or not stage.isdecimal():
            raise UsageError(f"--pin {text!r} is not understood", fix="write --pin lm_head=3")
        pins[path] = int(stage)
    return pins

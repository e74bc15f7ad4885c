"""One training step of an architecture of the zoo in stages, compared with one process."""

from __future__ import annotations

import re
import time
import traceback
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopart.batch.batch import flatten
from autopart.files.clusters import parse_cluster
from autopart.ir.errors import AutopartError
from autopart.options import Options, read_options
from autopart.pipe.compare import Outcome, Verification, plain_outcome, verify_step
from benchmarks.shared.in_process import ALIKE, verify_here
from benchmarks.zoo.models import find

ROWS, STAGES, MICROS = 8, 3, 4
EXACT, REFUSED, WRONG, CRASHED, BROKEN = "exact", "refused", "wrong", "crashed", "not run"


@dataclass(frozen=True)
class Row:
    """The result of one architecture.

    verdict: "exact"; "refused" by an error of autopart; "wrong"; "crashed" by any other error, a timeout or a signal;
    "not run" if the unpartitioned model itself failed. error: largest relative error of a gradient. precision: errors
    above 1e-5 in single precision are checked again in double precision, where only rounding is below 1e-10.
    """

    name: str
    kind: str
    model: str
    verdict: str
    error: float = 0.0
    loss_error: float = 0.0
    cause: str = ""
    why: str = ""
    where: str = ""
    fix: str = ""
    reference: str = ""
    stages: int = 0
    parameters: int = 0
    precision: str = "single"
    seconds: float = 0.0


def step(name: str, *, processes: bool = False) -> Row:
    """Run one step, planned for three stages that this process runs one after another, or for two real processes."""
    arch = find(name)
    began = time.perf_counter()
    row = Row(name, arch.kind, arch.model, BROKEN)
    try:
        model, sample = arch.make(), arch.batch(ROWS)
        batch = flatten(sample, with_target=arch.loss is not None)
        plain = plain_outcome(model, batch, arch.loss, (ROWS,), [1.0])
        row = replace(row, parameters=len(plain.gradients))
    except Exception as error:
        return _ended(replace(row, **_cause_of(error)), began)
    try:
        run = _in_processes if processes else _in_process
        found = run(model, sample, arch.loss, plain)
        if not found.ok and precision_is_single(model):
            found = _in_double(run, model, sample, arch.loss)
            row = replace(row, precision="double")
        verdict = replace(row, verdict=EXACT if found.ok else WRONG, stages=2 if processes else STAGES)
        verdict = replace(verdict, error=found.largest, loss_error=found.loss_error, reference=found.reference)
        if not found.ok:
            worst = [f"{d.kind} {d.name}: {d.error:.1e}" for d in (*found.gradients, *found.buffers) if not d.ok]
            losses = f"loss {found.loss:.6g} for {found.expected_loss:.6g}"
            verdict = replace(verdict, cause=losses, why="; ".join(worst[:3]))
    except AutopartError as error:
        cause_of_error = {
            "cause": f"{type(error).__name__}: {error.what}",
            "why": error.why,
            "where": _without_folders(error.where),
            "fix": error.fix,
        }
        verdict = replace(row, verdict=REFUSED, **cause_of_error)
    except Exception as error:
        verdict = replace(row, verdict=CRASHED, **_cause_of(error))
    return _ended(verdict, began)


def _ended(row: Row, began: float) -> Row:
    return replace(row, seconds=round(time.perf_counter() - began, 2))


def _without_folders(where: str) -> str:
    """Return a place in a package without the folders of this machine."""
    return re.sub(r"\S*/site-packages/", "", where)


def _cause_of(error: BaseException) -> dict[str, str]:
    first = (str(error).splitlines() or [""])[0]
    place = traceback.extract_tb(error.__traceback__)[-1]
    return {"cause": f"{type(error).__name__}: {first}", "where": _without_folders(f"{place.filename}:{place.lineno}")}


def precision_is_single(model: nn.Module) -> bool:
    """Return whether the weights are fp32."""
    return all(p.dtype == torch.float32 for p in model.parameters())


def _in_double(run: Any, model: nn.Module, sample: Any, loss: Any) -> Verification:
    """Repeat the step with weights and inputs in fp64."""

    def widened(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    model, sample = model.double(), pytree.tree_map(widened, sample)
    batch = flatten(sample, with_target=loss is not None)
    plain = plain_outcome(model, batch, loss, (ROWS,), [1.0])
    return run(model, sample, loss, plain)


def _options(loss: Any, stages: int) -> Options:
    return read_options(loss_fn=loss, stages=stages, micro_batches=MICROS, **ALIKE)


def _in_processes(model: Any, sample: Any, loss: Any, plain: Outcome) -> Verification:
    """Run on two ranks, as a user would call verify."""
    import autopart

    return autopart.launch(_rank, "cpu:2", model, sample, loss)[0]


def _rank(model: Any, sample: Any, loss: Any) -> Verification:
    torch.set_num_threads(1)
    return verify_step(model, parse_cluster("cpu:2"), sample, _options(loss, 2))


def _in_process(model: Any, sample: Any, loss: Any, plain: Outcome) -> Verification:
    """Plan, split and run in this process."""
    return verify_here(model, sample, _options(loss, STAGES), plain)

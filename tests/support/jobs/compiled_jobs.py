"""Steps of compiled stages, beside the same steps run eagerly."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from autopart.extras.compiled.inductor import CompileWarning
from support.jobs.replica_jobs import Counts, replica_options
from support.jobs.step_jobs import EVERY, compiled, fresh
from support.oracles.one_process import Difference, Expected, difference


def beside_eager(
    name: str, counts: Counts, micros: int, rows: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype
) -> tuple[list[Difference], list[str]]:
    """Return the difference of compiled from eager stages after each of some accumulating steps, and the warnings."""
    runs = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", CompileWarning)
        for backend in ("eager", "inductor"):
            asked = replica_options(counts, micros, backend=backend, **options)
            batches = [EVERY[name].data(count, dtype) for count in rows]
            captures = fresh(name, dtype, options.get("precision", "fp32"))
            with compiled(EVERY[name], captures, batches[0], **asked) as pipe:
                runs.append([(pipe.step(batch).item(), pipe.gradients(), pipe.state_dict()) for batch in batches])
    texts = [str(w.message) for w in seen if issubclass(w.category, CompileWarning)]
    return [difference(*own, Expected(*eager), dtype) for eager, own in zip(*runs, strict=True)], texts

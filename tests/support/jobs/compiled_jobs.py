"""Steps of compiled stages, beside the same steps run eagerly."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from autopart.session.code.inductor import CompileWarning
from support.jobs.replica_jobs import Counts, replica_options
from support.jobs.step_jobs import EVERY, compiled, fresh

Tensors = Mapping[str, torch.Tensor | None]


def beside_eager(
    name: str, counts: Counts, micros: int, rows: tuple[int, ...], options: dict[str, Any]
) -> dict[str, Any]:
    """Return the largest error of a loss, of a gradient and of a buffer over accumulating steps, and the warnings."""
    found: dict[str, Any] = {"loss": 0.0, "gradient": 0.0, "state": 0.0}
    runs = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", CompileWarning)
        for backend in ("eager", "inductor"):
            asked = replica_options(counts, micros, backend=backend, **options)
            with compiled(EVERY[name], fresh(name), EVERY[name].data(rows[0]), **asked) as pipe:
                losses = [pipe.step(EVERY[name].data(count)).item() for count in rows]
                runs.append((losses, pipe.gradients(), pipe.state_dict()))
    found["warnings"] = [str(w.message) for w in seen if issubclass(w.category, CompileWarning)]
    (losses, gradients, state), (own_losses, own_gradients, own_state) = runs
    assert gradients.keys() == own_gradients.keys()
    found["loss"] = max(abs(a - b) / abs(a) for a, b in zip(losses, own_losses, strict=True))
    found["gradient"] = _error(own_gradients, gradients)
    found["state"] = _error(own_state, state)
    return found


def _error(found: Tensors, expected: Tensors) -> float:
    """Return the largest error relative to the norm of its tensor.  A tensor below 1e-4 of the largest one holds
    rounding errors alone, such as the gradient of a bias of attention keys, which is 0.
    """
    assert all((found[key] is None) == (value is None) for key, value in expected.items())
    norms = {key: value.double().norm().item() for key, value in expected.items() if value is not None}
    least = 1e-4 * max(norms.values(), default=0.0) or 1.0
    return max(
        (found[key].double() - expected[key].double()).norm().item() / max(norm, least)  # type: ignore[union-attr]
        for key, norm in norms.items()
    )

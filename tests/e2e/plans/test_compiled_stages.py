"""Compiled stages: gradients within rounding of eager stages, and the same random numbers.  Compiling takes minutes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.jobs.step_jobs import EVERY, Counts, compiled, fresh, replica_options
from support.oracles.one_process import Difference, Expected, difference
from support.workers import Workers

from autopart.extras.compiled.inductor import CompileWarning


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


# -- tests -----------------------------------------------------------------------------------------------------------


TOLERANCE = 1e-5
"""Relative to the norm of each tensor, in fp32."""


@pytest.fixture(scope="module")
def patient_pair(own_cache: None) -> Iterator[Workers]:
    """A pool of two processes that may compile for a while."""
    with Workers(2, timeout=1200) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "counts", "options"),
    [
        ("gpt2", (1, 1), {}),
        ("llama_tied", (1, 1), {}),
        ("bert", (1, 1), {}),
        ("vit", (2,), {}),
        ("resnet", (1, 1), {}),
        ("mixtral", (1, 1), {}),
        ("t5", (1, 1), {}),
        ("dropped", (1, 1), {"recompute": "all"}),
        ("dropped", (2,), {}),
        ("gpt2", (1, 1), {"recompute": "all"}),
        ("tied", (2,), {"zero": 1}),
        ("gpt2", (1, 1), {"precision": "bf16"}),
        ("gpt2", (1, 1), {"schedule": "zb-h1"}),
        ("tied", (2,), {"schedule": "zb-h1", "zero": 1, "recompute": "all"}),
        ("llama_tied", (1, 1), {"schedule": "zb-h1", "precision": "bf16"}),
        ("llama_tied", (1,), {"tensor_parallel": 2}),
        ("dropped", (1,), {"tensor_parallel": 2, "recompute": "all"}),
    ],
)
def test_compiled_stages_give_the_gradients_of_eager_ones(
    patient_pair: Workers, name: str, counts: tuple[int, ...], options: dict[str, object]
) -> None:
    dtype = torch.float64 if name == "resnet" else torch.float32  # batch norms amplify the rounding of fp32
    tolerance = 2e-2 if "precision" in options else TOLERANCE
    for differences, warned in patient_pair.run(beside_eager, name, counts, 2, (8, 6), options, dtype):
        assert not warned
        for found in differences:
            assert max(abs(found.loss), found.gradient, found.buffer) <= tolerance, found

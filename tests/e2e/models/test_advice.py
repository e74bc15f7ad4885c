"""A refused model trains exactly after following the advice of its error."""

from __future__ import annotations

from typing import Any

import pytest
from support.documents.advice import ADVICE, Trial

from autopart.ir.errors import AutopartError
from autopart.options import read_options
from benchmarks.shared.in_process import ALIKE, verify_here


def verified(trial: Trial) -> Any:
    """Compare one step with one process, in two stages and four micro-batches unless the trial sets them."""
    options = {"stages": 2, "micro_batches": 4, **ALIKE, **trial.options}
    return verify_here(trial.model().train(), trial.sample, read_options(**options))


@pytest.mark.slow
@pytest.mark.parametrize("name", ADVICE)
def test_a_model_that_was_refused_runs_exactly_as_advised(name):
    advice = ADVICE[name]
    with pytest.raises(AutopartError) as refused:
        verified(advice.refused)
    error = refused.value
    assert type(error) is advice.error, repr(error)
    assert advice.advises in error.fix, str(error)
    assert (error.why or isinstance(error, advice.error)) and len(error.what.splitlines()) == 1
    found = verified(advice.followed)
    assert found is None or found.ok, found.table()

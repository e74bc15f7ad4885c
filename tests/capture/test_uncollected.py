"""The garbage collector rests while passes run, and is left as it was found."""

from __future__ import annotations

import gc

import pytest

from autopart.ir.uncollected import uncollected


@pytest.mark.parametrize("working", [True, False])
def test_collector_is_left_as_it_was_found_whatever_happens(working: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if working else gc.disable)()
        with pytest.raises(ValueError), uncollected():
            assert not gc.isenabled()
            raise ValueError
        assert gc.isenabled() == working
    finally:
        (gc.enable if before else gc.disable)()

"""Large masks are computed row by row, and answer like whole ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopart.capture.python.reads import late as room
from autopart.capture.python.reads.late import Late, different_rows, late, whole
from autopart.capture.python.reads.masks import _Hide

TOKENS = 3
_eq, _and = torch.ops.aten.eq.Tensor, torch.ops.aten.bitwise_and.Tensor


@given(st.lists(st.lists(st.integers(0, 1), min_size=TOKENS, max_size=TOKENS), min_size=2, max_size=4), st.booleans())
def test_late_masks_answer_like_whole_ones(documents: list[list[int]], hides: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "LARGE", 1)
        ids = torch.tensor(documents)
        same = late(_eq, (ids[:, None, :, None], ids[:, None, None, :]), {})
        causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None]
        assert isinstance(same, Late) and same.shape == (len(documents), 1, TOKENS, TOKENS)
        both = late(_and, (same, causal), {})
        assert isinstance(both, Late)
        known = whole(both)
        assert torch.equal(known, _and(_eq(*same.args), causal))
        for question in (_Hide(0, (hides,)), _Hide(TOKENS, (hides,))):
            assert question(both) == question(known)
        pair = (hides, False)
        assert _Hide(TOKENS, pair)(same, causal) == _Hide(TOKENS, pair)(whole(same), causal)


def test_equal_rows_are_computed_once() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "LARGE", 1)
        ids = torch.tensor([[0, 0, 1]] * 60 + [[0, 1, 1]])
        mask = late(_eq, (ids[:, :, None], ids[:, None, :]), {})
        assert len(list(different_rows([mask]))) == 2


def test_small_results_and_writes_are_not_late() -> None:
    small, ones = torch.ones(2, 2), torch.ones(2, 1 << 23)
    assert late(torch.ops.aten.add.Tensor, (small, small), {}) is None
    assert late(torch.ops.aten.add_.Tensor, (ones, ones), {}) is None
    assert late(torch.ops.aten.cumsum.default, (ones, 0), {}) is None
    assert late(torch.ops.aten.add.Tensor, (ones, ones), {}) is not None

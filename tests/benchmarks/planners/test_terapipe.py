"""Tests of the command that simulates TeraPipe's evaluation: its rows, its quick tables, and its claims."""

from __future__ import annotations

import pytest

from benchmarks.papers import terapipe


def lengths_of(scheme: str) -> list[int]:
    pairs = [part.split("x") for part in scheme.split()]
    return [int(pair[0]) for pair in pairs for _ in range(int(pair[1]) if len(pair) > 1 else 1)]


def test_every_published_row_is_complete() -> None:
    assert [row.name for row in terapipe.ROWS] == [str(n) for n in range(1, 11)]
    assert [row.tokens for row in terapipe.LENGTHS] == [2048, 4096, 6144, 8192]
    for row in (*terapipe.ROWS, *terapipe.LENGTHS):
        assert sum(lengths_of(row.scheme)) == row.tokens
        assert row.batch % row.layout[0] == 0
        assert terapipe.MODELS[row.model][0] % row.layout[1] == 0


def test_the_claims_hold_for_the_quick_rows() -> None:
    shown: list[str] = []
    rows = terapipe.table((terapipe.ROWS[2], terapipe.ROWS[8]), shown.append)
    lengths = terapipe.table(terapipe.LENGTHS[:2], shown.append)
    assert rows["3"]["ours"]["scheme"] == "2048" and "96x7" in shown[2]
    tables = {case.row.name: terapipe.ablation(case) for case in terapipe.ablations()}
    claims = terapipe.judged(rows, lengths, tables)
    assert [claim for claim, holds in claims.items() if not holds] == [
        "rows 2 and 3 are not sliced, all others are (not sliced: 3)"  # row 2 was not computed
    ]


@pytest.mark.parametrize(("lengths", "text"), [((8,), "8"), ((8, 8, 4), "8x2 4"), ((4, 8, 8, 8), "4 8x3")])
def test_equal_neighbours_are_counted(lengths: tuple[int, ...], text: str) -> None:
    assert terapipe.runs(lengths) == text
    assert tuple(lengths_of(text)) == lengths

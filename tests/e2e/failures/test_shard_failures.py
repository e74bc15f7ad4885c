"""A rank that fails inside of an exchange, in the middle of a compute, ends the others and is named with its group."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.jobs.failures.failing_jobs import die_in_a_call, train_together
from support.models.tokens.by_hand import Gpt
from support.oracles.ended import failed
from support.workers import Workers

import autopart
from autopart.ir.errors import WorkerError

pytestmark = pytest.mark.timeout(120)
SAID = {"kill": "died.*SIGKILL", "stop": "is stopped", "hang": "made no progress for 2 s"}
NAMED_S = 15.0


@pytest.fixture(scope="module")
def four() -> Iterator[Workers]:
    with Workers(4, timeout=90) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize("how", SAID)
@pytest.mark.parametrize(
    ("where", "words"), [("1F1", "forward of micro-batch 1"), ("1B0", "backward of micro-batch 0")]
)
def test_a_rank_that_fails_in_an_exchange_is_named_with_its_group(
    four: Workers, tmp_path: Path, where: str, words: str, how: str
) -> None:
    clock = tmp_path / "clock"
    error = failed(four, train_together, where, how, str(clock))
    took_s = time.monotonic() - float(clock.read_text())
    print(f"{how} in {where}: named after {took_s:.1f} s")
    assert took_s <= NAMED_S and type(error) is WorkerError
    assert re.search(rf"rank 3 \(stage 1, ranks 2, 3 together\).*{SAID[how]}", str(error)), error
    assert words in str(error), error


CALLS = {"save": ": save", "load": ": load", "adopt": "moving the weights to another plan"}


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_is_killed_in_a_call_is_named_with_it_and_the_checkpoint_stays(
    four: Workers, tmp_path: Path, call: str
) -> None:
    folder, clock = tmp_path / "run", tmp_path / "clock"
    error = failed(four, die_in_a_call, call, str(folder), str(clock))
    assert time.monotonic() - float(clock.read_text()) <= NAMED_S and type(error) is WorkerError
    assert re.search(r"rank 3 \(stage 1, ranks 2, 3 together\) died.*SIGKILL", str(error)), error
    assert CALLS[call] in str(error), error
    plain = Gpt()
    autopart.load_into(plain, folder, torch.optim.AdamW(plain.parameters()))
    assert str(autopart.latest(folder)).endswith("step-00000001")

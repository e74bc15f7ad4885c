"""The figures in docs/schedules.md are what the simulator says: 8 workers, 32 micro-batches, messages without time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.languages.orderings import Case, Times, even

from autopart.passes.ordering.lists import RULES
from autopart.passes.ordering.pipeline import Pipeline, bound_ns
from autopart.passes.program.orders import LOOP, ONE, V
from autopart.passes.simulation.simulate import simulate

PAGE = (Path(__file__).parents[3] / "docs/schedules.md").read_text()
WORKERS, MICROS = 8, 32
ALIKE, UNLIKE = (1, 1, 1), (1, 1.2, 0.8)
NAMED = {
    "gpipe": ((1, ONE), (2, LOOP)),
    "1f1b": ((1, ONE),),
    "1f1b-deep": ((1, ONE),),
    "interleaved": ((2, LOOP), (4, LOOP)),
    "zb-h1": ((1, ONE),),
    "zb-h2": ((1, ONE),),
    "zb-v": ((2, V),),
}
"""Stages on a worker, and their placement, of each row of the table."""


def rows() -> Iterator[tuple[str, list[float], list[float], list[float]]]:
    """Yield the name and the numbers of the last three columns of each row of the table."""
    for line in PAGE.splitlines():
        cells = line.strip("| ").split(" | ")
        if re.match(r"`[\w-]+`", cells[0]) and len(cells) == 6:
            bubbles = ([float(n) for n in re.findall(r"([\d.]+) %", cell)] for cell in cells[3:5])
            equal, unequal = bubbles
            yield cells[0].split("`")[1], equal, unequal, [float(n) for n in re.findall(r"[\d.]+", cells[5])]


def bubble(step_ns: int, each: int, times: Times) -> float:
    """Return the idle share of the workers in percent, as the page shows it."""
    return round(100 * (1 - MICROS * sum(times) * 1000 * each / step_ns), 1)


def named(name: str, each: int, placement: str, times: Times) -> tuple[float, float]:
    """Return bubble and memory, in micro-batches of all stages of a worker."""
    case = even(WORKERS, each, MICROS, times, placement=placement, room=MICROS)
    timeline = simulate(case.program(name), case.work)
    return bubble(timeline.step_ns, each, times), max(timeline.peak_bytes) / each


def searched(each: int, times: Times, room: float = 0) -> tuple[Case, int, float]:
    case = even(WORKERS, each, MICROS, times, room=room)
    found = case.search()
    return case, found.step_ns, bubble(found.step_ns, each, times)


def test_the_table_names_every_row_that_is_checked() -> None:
    assert [name for name, *_ in rows()] == [*NAMED, "searched"]


@pytest.mark.parametrize("name", NAMED)
def test_bubbles_and_memory_of_a_named_schedule_are_those_of_the_table(name: str) -> None:
    equal, unequal, memory = next(numbers for row, *numbers in rows() if row == name)
    found = [named(name, each, placement, ALIKE) for each, placement in NAMED[name]]
    assert equal == [share for share, _ in found]
    assert unequal == [named(name, each, placement, UNLIKE)[0] for each, placement in NAMED[name]]
    assert memory == sorted({held for _, held in found}, reverse=True)


def test_bubbles_of_searched_orders_are_those_of_the_page() -> None:
    equal, unequal, memory = next(numbers for row, *numbers in rows() if row == "searched")
    case, step_ns, share = searched(4, ALIKE)
    assert equal == [share] and unequal == [searched(4, UNLIKE)[2]] and memory == [WORKERS]
    assert bound_ns(Pipeline.of(case.shape, case.links, case.work, case.room_bytes)) == step_ns
    halves = [searched(each, times, WORKERS / 2)[2] for each in (2, 4) for times in (ALIKE, UNLIKE)]
    said = re.search(r"half of 1F1B's memory\s+the bubble of a V is (\d+) to (\d+) %", PAGE)
    assert said is not None and [round(min(halves)), round(max(halves))] == [int(n) for n in said.groups()]
    assert f"{len(RULES)} sets of rules are tried" in PAGE

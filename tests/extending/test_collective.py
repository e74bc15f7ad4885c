"""A collective from outside: one row of the table and its doing are planned, verified, simulated and run like ours."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.extending import own_collective
from support.languages.programs import program
from support.workers import Workers

from autopart.ir.actions import ALL, COLLECTIVE, FORWARD, LOCAL, ActionKind, parse_action, register_action
from autopart.ir.errors import ProgramError
from autopart.passes.program.messages import check_messages
from autopart.passes.program.verify import check_program
from autopart.passes.simulation.simulate import Work, simulate
from autopart.passes.simulation.traffic import NO_PORTS


@pytest.fixture
def norm() -> Iterator[None]:
    own_collective.register_norm()
    yield
    own_collective.forget_norm()


@pytest.mark.usefixtures("norm")
def test_a_row_of_the_table_is_routed_verified_proven_and_simulated() -> None:
    p = program("1f1b", 2, "a b | c d")
    assert str(p).endswith("0N 0A 0O 1O") and str(parse_action("0N")) == "0N"
    check_program(p, "1f1b")
    check_messages(p)
    timeline = simulate(p, Work((1, 1), (1, 1), (1, 1), {}, tied=(((0, 1), 0, NO_PORTS),)))
    assert {span.rank for span in timeline.spans if span.action.kind == "N"} == {0, 1}


def test_its_doing_gives_every_rank_the_norm_of_all_gradients(pair: Workers) -> None:
    for actions, found, expected in pair.run(own_collective.played):
        assert "0N" in actions
        assert found == pytest.approx(expected, rel=1e-5)


def test_what_is_no_collective_or_has_a_name_that_is_taken_is_refused() -> None:
    row = ActionKind(COLLECTIVE, FORWARD, "norm", needs="B", meets=ALL)
    with pytest.raises(ProgramError, match="cannot be called"):
        register_action("T", row)
    with pytest.raises(ProgramError, match="cannot be added"):
        register_action("N", ActionKind(LOCAL, FORWARD, "norm", needs="B"))

"""A report from outside, in a few lines, of a simulated and of a measured step."""

from __future__ import annotations

from support.extending.own_report import idle_table
from support.languages.refusals import batch, net, planned
from torch.nn import functional as F

import autopart


def test_a_report_of_a_user_reads_simulated_and_measured_steps_alike() -> None:
    step = autopart.simulate(planned("cpu:2", stages=2), net(), "cpu:2", sample=batch(), loss_fn=F.cross_entropy)
    lines = idle_table(step).splitlines()
    assert lines[0].split() == ["rank", "idle", "ms", "share"] and len(lines) == 4
    assert all(line.endswith("%") for line in lines[2:])
    with autopart.compile(net(), "cpu:1", sample=batch(), loss_fn=F.cross_entropy, costs="analytic") as pipe:
        assert idle_table(pipe.timeline(batch())).count("\n") == 3

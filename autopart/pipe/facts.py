"""What a pipe tells of itself: its plan, its cluster, this rank, and the data that this rank needs."""

from __future__ import annotations

from autopart.ir.cluster import Cluster
from autopart.ir.errors import UsageError
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.report.plan_table import stage_table
from autopart.runtime.activity import current
from autopart.session.session import Session
from autopart.session.step.data import own_rows
from autopart.session.step.parts import micro_cut
from autopart.state.core import Part
from autopart.state.scaler import LossScaler


class Facts(Part):
    """What a pipe tells of itself.  Nothing here is collective or changes anything."""

    def session(self) -> Session:
        """The session of this rank, for tools and checks.  Raises UsageError before the pipeline has been planned."""
        return self.core.session

    def plan(self) -> Plan:
        """The plan that runs; after `close` the last one."""
        return self.core.facts[1]

    def cluster(self) -> Cluster:
        """The cluster that was planned for."""
        return self.core.cluster

    def program(self) -> Program:
        """The actions of every rank in one training step."""
        return self.core.session.standing.program()

    def explain(self) -> str:
        """Return the stage table: what runs where, with simulated times and memory; then the captures of this rank."""
        _, plan, graph = self.core.facts
        captures = self.core.captures
        return f"{stage_table(plan, graph)}captures of this rank: {captures.kept}, {captures.made} made\n"

    def rank(self) -> int:
        """This process's rank; also after `close`."""
        return self.core.facts[0]

    def is_main(self) -> bool:
        """Whether this is rank 0, for what should be printed or written once; also after `close`."""
        return self.rank() == 0

    def world_size(self) -> int:
        """The number of ranks."""
        return self.core.cluster.world

    def needs_data(self) -> bool:
        """Whether this rank needs the batch of a step; others may pass None."""
        return self.rank() in self.plan().stages[0].ranks

    def data_shard(self) -> tuple[int, int]:
        """Return (number, of) for a sampler that gives each replica of the first stage the same number of rows:
        `DistributedSampler(dataset, num_replicas=of, rank=number)`.  A rank that needs no data has the number 0."""
        first = self.plan().stages[0]
        return (first.ranks.index(self.rank()) // first.shards if self.needs_data() else 0), first.replicas

    def data_rows(self, rows: int) -> tuple[int, ...]:
        """Return the places of this rank's rows in a batch of `rows` rows, in the order of its shard.  A step over all
        shards equals the step over the whole batch."""
        if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
            raise UsageError(f"a batch of {rows!r} rows", fix="pass the number of rows of the whole batch")
        if not self.needs_data():
            return ()
        plan = self.plan()
        first = plan.stages[0]
        return own_rows(micro_cut(rows, plan.micro_rows), first.division, first.ranks.index(self.rank()))

    def scaler(self) -> LossScaler | None:
        """The loss scaler in fp16, equal on every rank and kept by `state_dict`; None in another precision."""
        return self.core.scaler

    def skipped(self) -> bool:
        """Whether the last step added no gradients, because some on any rank were not finite."""
        return self.core.skipped > 0

    def stop_requested(self) -> bool:
        """Whether a rank was asked to stop by SIGTERM or SIGUSR1, or all to make room for ranks that join; True on all
        ranks after the same call, also after `close`.  While a pipe runs, the first SIGTERM does not end its process:
        save, and leave the loop."""
        running = self.core.running
        stopped = self.core.stopped if running is None else running.world.stop_requested
        if stopped and current().asked:
            current().heeded = 1
        return stopped

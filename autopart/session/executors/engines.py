"""What plays the program of one kind of batch: an engine for each number of micro-batches, made at first use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from autopart.ir.graph import Graph
from autopart.ir.plan import Decision
from autopart.ir.program import Program
from autopart.passes.program.messages import check_messages
from autopart.passes.program.stream import ring_programs, ring_ticks
from autopart.runtime.engine import Engine
from autopart.runtime.messages.mailbox import Mailbox
from autopart.runtime.messages.stream_mailbox import StreamMailbox
from autopart.runtime.player import Player
from autopart.runtime.stages.stage import StageRunner
from autopart.runtime.stream import StreamEngine, Update
from autopart.runtime.sums.replicas import ReplicaSums, open_sums
from autopart.runtime.sums.shared_values import SharedValues
from autopart.session.executors.context import RankContext
from autopart.session.executors.evaluation import evaluation_program
from autopart.session.step.parts import of_micros, replicated_of, training_program
from autopart.session.step.synced import open_statistics
from autopart.stagecode.stage_code import StageCode


class Engines:
    """The engines of one kind of batch on one rank.

    mode: "step", "loss" or "predict".  graph: of the planned capture.  synced: stages that share batch statistics.
    """

    def __init__(
        self,
        mode: str,
        context: RankContext,
        graph: Graph,
        decision: Decision,
        code: StageCode,
        synced: tuple[int, ...],
    ) -> None:
        self._mode, self._context, self._world = mode, context, context.world
        self._graph, self._decision, self._code, self._synced = graph, decision, code, synced
        self._stages = decision.stages_of_rank(context.world.rank)
        self._made: dict[int, Engine] = {}
        self._runners: dict[int, StageRunner] = {}

    def __contains__(self, micros: int) -> bool:
        """Return whether the engine for this number of micro-batches is made."""
        return micros in self._made

    def program(self, micros: int) -> Program:
        """Return the verified program for this number of micro-batches."""
        decision, graph = of_micros(self._decision, micros), self._graph
        if self._mode == "step":
            program = training_program(decision, graph, self._code.prologue, self._context.placement, self._synced)
        else:
            program = evaluation_program(decision, graph)
        return program if self._world.carrier is None else check_messages(program)

    def engine(self, micros: int, *, steady: frozenset[str]) -> Engine:
        """Return the engine that plays this number of micro-batches.  Collective when it is made.

        steady: buffers that a step updates once (`BatchRule.steady`)."""
        if micros not in self._made:
            program = self.program(micros)
            if not self._made:
                open_statistics(self._world, self._decision, self._code.rewrites)
                self._runners = {stage: self._runner(program, stage, steady=steady) for stage in self._stages}
            player = self._player(program, self._runners, Mailbox, self._sums(program), self._context.values)
            self._made[micros] = Engine(self._world, player)
        return self._made[micros]

    def stream(
        self, micros: int, update: Update, parameters: Mapping[str, nn.Parameter], *, steady: frozenset[str]
    ) -> StreamEngine:
        """Return an engine for asynchronous training with batches of this number of micro-batches.  Collective.

        update: steps the optimizer of this rank's parameters.  Raises PlanError (`streaming_of`)."""
        decision = replace(self._decision, micro_rows=(1,) * micros)
        rhythm, turn, turns = ring_programs(decision, self._graph, self._code.prologue)
        runners = {stage: self._runner(turn, stage, steady=steady) for stage in self._stages}
        player = self._player(turn, runners, StreamMailbox, {}, None)
        ticks = ring_ticks(rhythm, turns, self._world.rank)
        return StreamEngine(player, rhythm, ticks, self._sums(turn), parameters, update)

    def _player(
        self,
        program: Program,
        runners: Mapping[int, StageRunner],
        mailbox: type[Mailbox],
        sums: Mapping[int, ReplicaSums],
        values: SharedValues | None,
    ) -> Player:
        code, ops = self._code, self._graph.op_map()
        loss = None if self._mode == "predict" else self._graph.outputs[0]
        messages = mailbox(self._world, program, code.specs, code.layouts)
        return Player(self._world, program, runners, code.specs, ops, loss, messages, sums, values)

    def _sums(self, program: Program) -> dict[int, ReplicaSums]:
        owners, placement = self._context.values.owners, self._context.placement
        kept = {stage: replicated_of(self._graph, self._decision, stage, owners, placement) for stage in self._stages}
        return open_sums(self._world, program, kept)

    def _runner(self, program: Program, stage: int, *, steady: frozenset[str]) -> StageRunner:
        back = frozenset(name for e in program.edges if e.dst == stage for name in e.grads)
        out = frozenset(name for e in program.edges if e.src == stage for name in e.grads)
        given = self._code.modules[stage], self._context.tensors.held, back, out | {self._graph.outputs[0]}
        return StageRunner(*given, synced=stage in self._synced, steady=steady)

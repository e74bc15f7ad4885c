"""The archive of a search: what was evaluated, and the best of it."""

from __future__ import annotations

from dataclasses import dataclass

from autopart.passes.search.evaluation import Candidate, Evaluation, Evaluator
from autopart.passes.search.space import SearchSpace


@dataclass(frozen=True)
class SearchResult:
    """best: the fastest that fits, if any.  nearest: of those that do not fit the one that lacks least.
    seen: the fastest of every (number of stages, replicas of the first stage) that fits, for explanations."""

    best: Evaluation | None
    nearest: Evaluation | None
    seen: tuple[Evaluation, ...]


class Archive:
    """Everything that one search has evaluated.  fitting: what fits, by plan.  nearest: of the others the one that
    lacks least."""

    def __init__(self) -> None:
        self.evaluator = Evaluator()
        self.fitting: dict[tuple[object, ...], Evaluation] = {}
        self.nearest: Evaluation | None = None

    def evaluate(self, space: SearchSpace, candidate: Candidate) -> Evaluation:
        """The evaluation of a candidate, which is noted."""
        evaluation = self.evaluator(space, candidate)
        self._note(evaluation)
        return evaluation

    def _note(self, evaluation: Evaluation) -> None:
        if evaluation.fits:
            self.fitting[evaluation.key] = evaluation
        elif self.nearest is None or evaluation.over_bytes < self.nearest.over_bytes:
            self.nearest = evaluation

    @property
    def ranked(self) -> list[Evaluation]:
        """Those that fit, fastest first; of equals the fewest stages, then the one that was evaluated first."""
        return sorted(self.fitting.values(), key=lambda e: (e.step_ns, e.candidate.partition.stages))

    @property
    def best_ns(self) -> int:
        """Step of the fastest that fits, 0 while there is none."""
        return min((e.step_ns for e in self.fitting.values()), default=0)

    def finalists(self, most: int) -> list[Evaluation]:
        """The fastest with different numbers of stages, pipelines or rows; the nearest when none fits."""
        chosen: dict[tuple[object, ...], Evaluation] = {}
        pool = self.ranked or ([self.nearest] if self.nearest else [])
        for evaluation in pool:
            candidate = evaluation.candidate
            shape = candidate.partition.stages, candidate.layout.pipeline_replicas, len(candidate.micro_rows)
            chosen.setdefault(shape, evaluation)
        return list(chosen.values())[:most]

    @property
    def preferred(self) -> list[Evaluation]:
        """Of each number of stages the fastest that fits, in the order of `preference`."""
        found: dict[int, Evaluation] = {}
        for evaluation in self.ranked:
            found.setdefault(evaluation.stages, evaluation)
        return sorted(found.values(), key=lambda e: e.preference)

    def result(self) -> SearchResult:
        """What the search returns."""
        ranked = self.ranked
        seen: dict[tuple[int, int], Evaluation] = {}
        for evaluation in ranked:
            shape = evaluation.candidate.partition.stages, len(evaluation.candidate.ranks[0])
            seen.setdefault(shape, evaluation)
        return SearchResult(ranked[0] if ranked else None, self.nearest, tuple(seen.values()))

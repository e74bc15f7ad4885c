"""Every error a user can meet, in one tree.

    AutopartError
    ├── UsageError            an argument, option, batch or cluster that cannot work
    │   ├── BatchError        a batch that does not fit the model, the plan or the micro-batches
    │   └── ClusterError      a cluster description that cannot be read or is not what runs
    ├── CaptureError          the model cannot be captured at all
    │   ├── ControlFlowError  data-dependent Python control flow
    │   └── LossError         no scalar loss can be found in what the model returns
    ├── RefusedError          captured, but running it would not be exact
    │   ├── CoupledLossError  the loss couples the rows of the batch: it cannot be micro-batched
    │   └── TokenRefusal      some op needs tokens that a slice does not have: it cannot be cut into slices of tokens
    ├── PlanError             a plan that is malformed, or made for something else
    │   ├── PlanFileError     text that is not a plan; names the JSON path
    │   └── InfeasibleError   no plan within the limits; names the limit and by how much
    ├── GraphError            our own invariant of `Graph` is broken (a bug: please report)
    ├── ProgramError          a program that would hang, lose a value or exceed its limit
    └── RunError              something failed while ranks were running
        ├── StageError        user code (an op) raised inside a stage
        └── WorkerError       a process died or a peer stopped answering

Every message has the same order: what failed, where (module path, file:line), why, what to do.
"""

from __future__ import annotations

from autopart.ir.printable import printable


class AutopartError(Exception):
    """Base of all errors raised on purpose.

    what: one line, no full stop; where: module path and user file:line; why: the reason; fix: a remedy that can be
    pasted or typed.  Whatever a file or a model says in them, a terminal shows as it stands (`ir.printable`).
    """

    def __init__(self, what: str, *, where: str = "", why: str = "", fix: str = "") -> None:
        self.what, self.where, self.why, self.fix = (printable(text, keep="\n\t") for text in (what, where, why, fix))
        super().__init__(self._text())

    def _text(self) -> str:
        lines = [self.what]
        for label, text in (("where", self.where), ("why", self.why), ("fix", self.fix)):
            if text:
                lines.append(f"  {label}: {text}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.where, self.why, self.fix)


def _rebuild(kind: type[AutopartError], what: str, where: str, why: str, fix: str) -> AutopartError:
    return kind(what, where=where, why=why, fix=fix)


class UsageError(AutopartError, ValueError):
    """An argument, option, batch or cluster that cannot work."""


class BatchError(UsageError):
    """A batch that does not fit the model, the plan or the micro-batches."""


class ClusterError(UsageError):
    """A cluster description that cannot be read, or is not the one that runs."""


class CaptureError(AutopartError):
    """The model cannot be captured."""


class ControlFlowError(CaptureError):
    """Python control flow that depends on tensor data."""


class LossError(CaptureError):
    """No scalar loss can be found in what the model returns."""


class RefusedError(AutopartError):
    """Captured, but running it as a pipeline would not be exact."""


class UndividedError(RefusedError):
    """A value that replicas cannot divide would pass between stages that have other replicas.

    value: its name, where the refusal is raised.
    """

    value: str = ""


class CoupledLossError(RefusedError):
    """The loss couples the rows of the batch, so that micro-batches cannot reproduce it."""


class TokenRefusal(RefusedError):
    """The model cannot be run slice by slice of its tokens.  A decision, returned by who looks: it still runs whole."""


class PlanError(AutopartError):
    """A plan that is malformed or made for something else."""


class PlanFileError(PlanError):
    """Text that is not a valid plan; `where` is the JSON path."""


class InfeasibleError(PlanError):
    """No plan exists within the limits."""


class GraphError(AutopartError):
    """An invariant of `Graph` is broken: a bug of ours, not of the user."""


class ProgramError(AutopartError):
    """A program that would hang, lose a value or exceed its in-flight limit."""


class RunError(AutopartError, RuntimeError):
    """Something failed while the ranks were running."""


class StageError(RunError):
    """An op of the user's model raised inside a stage."""


class NonFiniteError(RunError):
    """Gradients of a step are infinite or NaN; it has changed nothing, and the pipe goes on."""


class WorkerError(RunError):
    """A process died or a peer stopped answering."""

"""What runs the ops of a stage, where `backend="auto"` leaves that to the planner.

Compiling takes seconds once and shortens every step.  It pays if what it saves in the steps to come (`steps=`) is more
than what it takes; both are measured: the step is simulated with times of eager and of compiled code, and the seconds
are those of compiling the program on this machine (where its code lay on disk already, those of reading it).  Wrong
where a stage holds other shapes than the program that was measured: its code is made again.

Compiling to find out costs as much as compiling to run.  So it is not tried where it cannot pay: where all the steps to
come, eagerly, take less than the least time of compiling.
"""

from __future__ import annotations

from autopart.ir.plan import Plan
from autopart.options import Options

LEAST_COMPILE_NS = 5 * 10**9
"""Nanoseconds that compiling a program takes at least, with the import of the compiler: measured on CPUs, 20 s for
models of 8 equal layers."""
_MEASURED, _COMPILED = "measured", "compiled"
"""Sources of costs."""


def runs_compiled(options: Options, plan: Plan) -> bool:
    """Return whether the stages of a plan are compiled; with backend="auto" if it was made for compiled code."""
    return options.backend == "inductor" or (options.backend == "auto" and plan.provenance.costs == _COMPILED)


def cannot_pay(options: Options, eager: Plan) -> str:
    """Return why compiling is not tried, as a note; "" if it may pay.  eager: the best plan without."""
    if options.costs not in ("auto", "measured"):
        return "backend: eager, since costs= decides what is measured, and compiled code is not"
    if options.steps is None:
        return "backend: eager, since steps= does not say how many steps are to come"
    if eager.provenance.costs != _MEASURED:
        return "backend: eager, since nothing can be measured here"
    all_ns = options.steps * eager.outlook.step_ns
    if all_ns < LEAST_COMPILE_NS:
        return (
            f"backend: eager, since {options.steps:,} steps take {_seconds(all_ns)}, and compiling at least "
            f"{_seconds(LEAST_COMPILE_NS)}"
        )
    return ""


def pays(steps: int, eager: Plan, compiled: Plan, compile_ns: int) -> tuple[bool, str]:
    """Return whether the steps to come pay for compiling, and a note on what it takes and saves.

    compiled: the best plan with costs of compiled code, if they could be measured.  compile_ns: of its program.
    """
    if compiled.provenance.costs != _COMPILED:
        return False, "backend: eager, since compiled code cannot be measured here"
    saved_ns = eager.outlook.step_ns - compiled.outlook.step_ns
    if saved_ns <= 0:
        return False, "backend: eager, since compiled code makes no step shorter"
    needed = -(-compile_ns // saved_ns)
    choice = "inductor" if needed <= steps else "eager"
    return needed <= steps, (
        f"backend: {choice}; compiled code saves {_seconds(saved_ns)} a step and takes {_seconds(compile_ns)} to make, "
        f"which {needed:,} steps pay"
    )


def _seconds(ns: int) -> str:
    return f"{ns * 1e-9:.3g} s" if ns >= 10**9 else f"{ns * 1e-6:.3g} ms"

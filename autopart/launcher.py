"""What started this process as one of several: torchrun's variables, which are the contract, or those of others.

srun, mpirun and mpiexec say in variables of their own which rank a process is.  Where these are enough they become
torchrun's; where a part is missing, such as the address of rank 0, nothing is guessed: each process would train alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from autopart.ir.cluster import script_line, torchrun_line
from autopart.ir.errors import ClusterError

PORT = 29500
"""Where rank 0 listens when MASTER_PORT does not say: torch's own choice."""


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The variables of one launcher.  start: its command line but for the script."""

    start: str
    size: str
    rank: str
    local_rank: str
    local_size: str


_LAUNCHERS = (
    _Launcher("srun --ntasks {size}", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE"),
    _Launcher(
        "mpirun -n {size}", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher("mpiexec -n {size}", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)  # fmt: skip


def launcher_variables(env: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables, where another launcher than torchrun started this process; empty without one.

    Raises ClusterError when a launcher says that there are several processes and not enough to connect them, and for
    RANK without WORLD_SIZE.
    """
    if "RANK" in env and not env.get("WORLD_SIZE"):
        raise ClusterError(
            f"RANK is {env['RANK']} and WORLD_SIZE is not set",
            where="WORLD_SIZE",
            why="each process would train alone",
            fix=f"start the script by a launcher that sets both, such as {torchrun_line(2, 2)}; for one process alone, "
            "unset RANK",
        )
    if "RANK" in env or "WORLD_SIZE" in env:
        return {}
    for launcher in _LAUNCHERS:
        size = _number(env, launcher.size)
        if size is not None and size > 1:
            return _variables(launcher, size, env)
    return {}


def adopt_launcher(env: MutableMapping[str, str]) -> None:
    """Set torchrun's variables where another launcher said the same in its own."""
    env.update(launcher_variables(env))


def adopt_task(env: MutableMapping[str, str]) -> None:
    """The same where srun, mpirun or mpiexec started this very process.  A shell in a SLURM allocation is no such task,
    though it has SLURM's variables."""
    if any(name in env for name in ("SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")):
        adopt_launcher(env)


def _variables(launcher: _Launcher, size: int, env: Mapping[str, str]) -> dict[str, str]:
    rank, local_rank = _number(env, launcher.rank), _number(env, launcher.local_rank)
    local = _number(env, launcher.local_size)
    one_host = local == size or "1" in (env.get("SLURM_NNODES"), env.get("SLURM_JOB_NUM_NODES"))
    address = env.get("MASTER_ADDR") or ("127.0.0.1" if one_host else "")
    missing = [name for name, value in ((launcher.rank, rank), (launcher.local_rank, local_rank)) if value is None]
    if not address:
        missing.append("MASTER_ADDR")
    if missing or rank is None or local_rank is None or rank >= size:
        raise _incomplete(launcher, size, size if one_host else local, missing, env)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(size if one_host or local is None else local),
        "MASTER_ADDR": address,
        "MASTER_PORT": env.get("MASTER_PORT") or str(PORT),
    }


def _incomplete(
    launcher: _Launcher, size: int, local: int | None, missing: list[str], env: Mapping[str, str]
) -> ClusterError:
    slurm = launcher is _LAUNCHERS[0]
    hosts = (
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) ' if slurm else "MASTER_ADDR=HOST "
    )
    line = hosts + launcher.start.format(size=size) + f" python {script_line()}"
    return ClusterError(
        f"{launcher.size} says that {size} processes run, and this one cannot find the others",
        where=launcher.size,
        why=f"{' and '.join(missing)} not set: each process would train alone" if missing else
        f"{launcher.rank} is {env.get(launcher.rank)}",
        fix=f"{line}   (or {torchrun_line(size, local)}; for one process alone, unset {launcher.size})",
    )  # fmt: skip


def _number(env: Mapping[str, str], name: str) -> int | None:
    """A variable's number; of SLURM's "4(x2)", tasks of each node, the first, where all are alike."""
    found = re.fullmatch(r"(\d{1,9})(\(x\d+\))?", env.get(name, "").strip())
    return int(found[1]) if found else None

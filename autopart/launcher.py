"""What launched this process as one of several: torchrun's variables, or those of srun, mpirun and mpiexec.

The other launchers pass the rank of a process in variables of their own.  If these are complete, they are translated to
torchrun's; if one is missing, such as the address of rank 0, the launch is refused, since each process would train
alone.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

from autopart.ir.errors import ClusterError

PORT = 29500
"""Port of rank 0 if MASTER_PORT is not set: torch's default."""

RESTART_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
"""How often the ranks were restarted: set by torchrun, and by our own launcher."""
DEVICES_VARIABLE = "AUTOPART_DEVICES"
"""Under an elastic launch, the devices of its cluster that have ranks now, as `Living.text` writes them."""
RESCUE_VARIABLE = "AUTOPART_RESCUE"
"""Under an elastic launch on one host, a folder in memory where ranks that live keep the state of a run."""


class Living(NamedTuple):
    """The devices of a cluster of `of` devices on which ranks run, in the order of their ranks."""

    devices: tuple[int, ...]
    of: int

    def text(self) -> str:
        """Return it as text, such as "0,1,3/4"."""
        return f"{','.join(map(str, self.devices))}/{self.of}"


def living_devices(env: Mapping[str, str] = os.environ) -> Living | None:
    """Return which devices of the cluster have ranks now; None if the launch is not elastic."""
    found = re.fullmatch(r"(\d{1,9}(?:,\d{1,9})*)/(\d{1,9})", env.get(DEVICES_VARIABLE, ""))
    if not found:
        return None
    return Living(tuple(int(number) for number in found[1].split(",")), int(found[2]))


def rescue_folder(env: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder in memory that outlives the ranks, None without one."""
    return Path(env[RESCUE_VARIABLE]) if env.get(RESCUE_VARIABLE) else None


def torchrun_line(world: int, local: int | None = None) -> str:
    """Return the command that runs this script on `world` ranks, `local` of them on each host (None: all on one)."""
    if local is None or local >= world:
        return f"torchrun --standalone --nproc-per-node {world} {_script_line()}"
    return (
        f"torchrun --nnodes {-(-world // local)} --nproc-per-node {local} --rdzv-backend c10d "
        f"--rdzv-endpoint $MASTER_ADDR:{PORT} {_script_line()}"
    )


def restart_count() -> int:
    """Return how often the launcher has restarted the ranks.  torchrun keeps its store across restarts, with addresses
    of ranks that are gone, so each generation of ranks reads and writes keys of its own."""
    count = os.environ.get(RESTART_VARIABLE, "")
    return int(count) if count.isdigit() else 0


def _script_line() -> str:
    words = [word for word in sys.argv if word]
    no_file = not words or words[0] == "-c" or "ipykernel_launcher" in words[0]
    return "train.py" if no_file else shlex.join(words)


class _Launcher(NamedTuple):
    """The variables of one launcher.  start: the command in front of `python script`."""

    start: str
    size: str
    rank: str
    local_rank: str
    local_size: str


_OPEN_MPI = "OMPI_COMM_WORLD"
_LAUNCHERS = (
    _Launcher("srun --ntasks {size}", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE"),
    _Launcher("mpirun -n {size}", *(f"{_OPEN_MPI}_{name}" for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE"))),
    _Launcher("mpiexec -n {size}", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def launcher_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables if another launcher started this process, else {}.

    Raises ClusterError if that launcher started several processes but does not tell how to connect them, and for RANK
    without WORLD_SIZE, or not below it.
    """
    if "RANK" in env and not env.get("WORLD_SIZE"):
        raise ClusterError(
            f"RANK is {env['RANK']} and WORLD_SIZE is not set",
            where="WORLD_SIZE",
            why="each process would train alone",
            fix=f"start the script by a launcher that sets both, such as {torchrun_line(2, 2)}; for one process alone, "
            "unset RANK",
        )
    if "RANK" in env:
        rank, size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
        if rank is None or size is None or rank >= size:
            raise ClusterError(
                f"RANK is {env['RANK']} and WORLD_SIZE is {env['WORLD_SIZE']}",
                where="RANK",
                why="ranks have the numbers from 0 to WORLD_SIZE - 1",
                fix=f"let a launcher set both: {torchrun_line(size or 2)}",
            )
    if "RANK" in env or "WORLD_SIZE" in env:
        return {}
    for launcher in _LAUNCHERS:
        size = _number(env, launcher.size)
        if size is not None and size > 1:
            return _variables(launcher, size, env)
    return {}


def adopt_task(env: MutableMapping[str, str]) -> None:
    """Set torchrun's variables if srun, mpirun or mpiexec started this very process.

    A shell inside a SLURM allocation has SLURM's variables too, but is not such a process.
    """
    if any(name in env for name in ("SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")):
        env.update(launcher_variables(env))


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
    line = hosts + launcher.start.format(size=size) + f" python {_script_line()}"
    return ClusterError(
        f"{launcher.size} says that {size} processes run, and this one cannot find the others",
        where=launcher.size,
        why=f"{' and '.join(missing)} not set: each process would train alone" if missing else
        f"{launcher.rank} is {env.get(launcher.rank)}",
        fix=f"{line}   (or {torchrun_line(size, local)}; for one process alone, unset {launcher.size})",
    )  # fmt: skip


def _number(env: Mapping[str, str], name: str) -> int | None:
    """Return the number in a variable; 4 for SLURM's "4(x2)", four tasks on each of two nodes."""
    found = re.fullmatch(r"(\d{1,9})(\(x\d+\))?", env.get(name, "").strip())
    return int(found[1]) if found else None

"""Launchers other than torchrun: their variables are used where they are enough, and refused where they are not."""

from __future__ import annotations

import pytest

from autopart.files.clusters import parse_cluster
from autopart.ir.errors import ClusterError
from autopart.launcher import launcher_variables, torchrun_line

SRUN = {"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_TASKS_PER_NODE": "2(x2)"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
PMI = {"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALRANKID": "0"}


def said(rank: int, size: int, local_rank: int, local: int, address: str, port: int = 29500) -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return dict(zip(names, map(str, (rank, size, local_rank, local, address, port)), strict=True))


@pytest.mark.parametrize(
    ("env", "found"),
    [
        (SRUN | {"MASTER_ADDR": "node7"}, said(3, 4, 1, 2, "node7")),
        (SRUN | {"MASTER_ADDR": "node7", "MASTER_PORT": "1234"}, said(3, 4, 1, 2, "node7", 1234)),
        (SRUN | {"SLURM_NNODES": "1"}, said(3, 4, 1, 4, "127.0.0.1")),
        (OPEN_MPI, said(1, 2, 1, 2, "127.0.0.1")),
        (PMI | {"MPI_LOCALNRANKS": "2"}, said(0, 2, 0, 2, "127.0.0.1")),
        (PMI | {"MASTER_ADDR": "node7"}, said(0, 2, 0, 2, "node7")),
        ({"SLURM_NTASKS": "1"}, {}),
        ({}, {}),
        (SRUN | {"RANK": "0", "WORLD_SIZE": "2"}, {}),
    ],
)
def test_what_a_launcher_says_becomes_torchruns_variables(env: dict[str, str], found: dict[str, str]) -> None:
    assert launcher_variables(env) == found


@pytest.mark.parametrize(
    ("env", "missing", "line"),
    [
        ({"SLURM_NTASKS": "2"}, "SLURM_PROCID and SLURM_LOCALID and MASTER_ADDR not set", "srun --ntasks 2 python "),
        (SRUN, "MASTER_ADDR not set", "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "MASTER_ADDR not set", "mpirun -n 2 python "),
        (PMI, "MASTER_ADDR not set", "mpiexec -n 2 python "),
        (SRUN | {"SLURM_PROCID": "9", "MASTER_ADDR": "a"}, "SLURM_PROCID is 9", "srun --ntasks 4 python "),
    ],
)
def test_what_is_not_enough_is_refused_with_the_line_that_is(env: dict[str, str], missing: str, line: str) -> None:
    with pytest.raises(ClusterError, match="this one cannot find the others") as caught:
        parse_cluster(None, env=env)
    assert missing in caught.value.why and line in caught.value.fix
    assert "torchrun " in caught.value.fix


def test_a_cluster_is_as_large_as_its_launcher_says() -> None:
    found = parse_cluster(None, env=SRUN | {"MASTER_ADDR": "node7"})
    assert found.world == 4 and [level.size for level in found.levels] == [2, 4]


def test_the_torchrun_line_has_the_number_of_hosts_where_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["a b.py"])
    assert torchrun_line(4) == "torchrun --standalone --nproc-per-node 4 'a b.py'"
    monkeypatch.setattr("sys.argv", ["train.py"])
    assert torchrun_line(16, 8).startswith("torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d ")


@pytest.mark.parametrize("env", [{"RANK": "0"}, {"RANK": "1", "WORLD_SIZE": ""}, SRUN | {"RANK": "3"}])
def test_a_rank_without_a_number_of_ranks_is_refused(env: dict[str, str]) -> None:
    with pytest.raises(ClusterError, match=r"RANK is \d and WORLD_SIZE is not set") as caught:
        parse_cluster(None, env=env)
    assert "torchrun" in caught.value.fix and "unset RANK" in caught.value.fix

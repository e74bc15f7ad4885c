"""Elastic launches whose ranks die while they import the script, and what a launch leaves in memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autopart.runtime.activity import SharedStatus
from autopart.runtime.launch import restarts
from autopart.runtime.launch.reasons import GUARD, Death, error_for

pytestmark = pytest.mark.timeout(200)
ROOT = Path(__file__).parents[3]

SCRIPT = """
import os, signal, sys
from pathlib import Path
when, how, flag = sys.argv[1], sys.argv[2], Path(sys.argv[3])
def end(now):
    if now == when and os.environ.get("RANK") == "1" and not flag.exists():
        flag.touch()
        os.kill(os.getpid(), int(how[1:])) if how[0] == "-" else os._exit(int(how))
end("importing")
import autopart
def train():
    import torch._dynamo  # which looks for networkx
    end("running")
    return os.environ["WORLD_SIZE"]
if __name__ == "__main__":
    print(autopart.launch(train, "cpu:2", elastic=(1, 2), timeout=150))
"""


def launched(folder: Path, when: str, how: str) -> subprocess.CompletedProcess[str]:
    """Run a script whose rank 1 ends once, in a folder with modules that must not be run."""
    (script := folder / "train.py").write_text(SCRIPT)
    (elsewhere := folder / "elsewhere").mkdir()
    for name in ("networkx", "sympy", "autopart", "jinja2"):
        (elsewhere / f"{name}.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close(); raise SystemExit(9)")
    return subprocess.run(
        [sys.executable, script, when, how, folder / "flag"],
        cwd=elsewhere, capture_output=True, text=True, timeout=180,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("when", "how"),
    [
        ("importing", "-9"),
        pytest.param("importing", "-11", marks=pytest.mark.slow),
        pytest.param("importing", "-19", marks=pytest.mark.slow),
        pytest.param("running", "-9", marks=pytest.mark.slow),
        pytest.param("running", "3", marks=pytest.mark.slow),
    ],
)
def test_the_others_go_on_whenever_a_rank_dies_and_run_no_module_of_the_working_folder(
    tmp_path: Path, when: str, how: str
) -> None:
    done = launched(tmp_path, when, how)
    assert done.stdout == "['1']\n", done.stderr
    assert "device 1 is lost, 1 ranks go on" in done.stderr and (tmp_path / "flag").exists()
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_a_script_that_ends_while_it_is_imported_is_not_tried_on_fewer_devices(tmp_path: Path) -> None:
    done = launched(tmp_path, "importing", "1")
    assert done.returncode and "rank 1 did not start: exited with code 1" in done.stderr and GUARD in done.stderr


@pytest.mark.parametrize(("code", "advice"), [(-9, "memory ran out"), (-11, "PYTHONFAULTHANDLER"), (1, GUARD)])
def test_the_advice_for_a_rank_that_did_not_start_fits_how_it_ended(code: int, advice: str) -> None:
    error = error_for(Death(1, code, 0.0), SharedStatus(), "starting")
    assert "rank 1 did not start" in error.what and advice in error.fix
    assert (GUARD in error.fix) == (code == 1)


HOLDS = """
import sys
from pathlib import Path
from autopart.runtime.launch import restarts
restarts.MEMORY = Path(sys.argv[1])
with restarts.folder_in_memory() as made:
    print(made, flush=True)
    sys.stdin.read()
"""


def holding(place: Path, *before: str) -> tuple[subprocess.Popen[bytes], Path]:
    """Start a process that has a folder in memory until its input ends."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [*before, sys.executable, "-c", HOLDS, str(place)]
    process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().decode().strip() or "none")


def ended(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    process.wait()


def test_only_what_a_killed_launcher_left_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "MEMORY", tmp_path)
    first, mine = holding(tmp_path)
    second, left = holding(tmp_path)
    second.send_signal(signal.SIGKILL)
    ended(second)
    assert mine.is_dir() and left.is_dir()
    with restarts.folder_in_memory() as made:
        assert mine.is_dir() and not left.exists() and Path(made).stat().st_mode & 0o777 == 0o700
    assert not Path(made).exists()
    ended(first)
    assert not list(tmp_path.iterdir())


def test_a_launch_in_another_container_spares_what_this_one_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = ("unshare", "--pid", "--fork", "--mount-proc")
    if subprocess.run([*elsewhere, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user cannot make namespaces of process ids")
    monkeypatch.setattr(restarts, "MEMORY", tmp_path)
    with restarts.folder_in_memory() as made:
        process, theirs = holding(tmp_path, *elsewhere)
        assert Path(made).is_dir() and theirs.is_dir()
        ended(process)
        assert Path(made).is_dir() and not theirs.exists()

"""Ranks that die and join back: how soon training goes on, and whether it stays exact.

One of 4 Gloo ranks is killed at a random instant, again and again: from the first step of 4 ranks on, up to 4 seconds
later, so in any phase of a step, of a save, or of what lies between.  The others go on as 3 ranks under a new plan, and
the fourth joins back.  Measured by the clock of the machine: from the kill to the end of the next step of 3 ranks, and
from the last step of 3 ranks to the first one of 4.

Then every step that counted is run again by plain training in one process: losses (fp64) have to agree to 1e-10, and
each sample has to come once in every epoch.

A part is 10 kills with one seed, two minutes on 2 idle cores.  results/elastic.json has all parts that were run, each
with its command and machine, and the figures over all of them.

    for seed in 0 1 2 3 4; do python -m benchmarks.training.elastic --seed $seed; done      50 kills
    python -m benchmarks.training.elastic --kills 1      half a minute, writes nothing
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import autopart
from benchmarks.shared.common import RESULTS, ROOT, machine, recorded, spread, write

sys.path.insert(0, str(ROOT / "tests"))  # the run that the tests have, too
from support.jobs.failures import elastic_jobs as jobs

RANKS, WITHIN_S, REJOIN_S, LATEST_S, PATIENCE_S = 4, 30.0, 1.0, 4.0, 300.0
"""WITHIN_S: what is asked from a kill to the next step.  LATEST_S: of the random instants after the first step."""


class Killer(threading.Thread):
    """Kills ranks while the main thread launches them, and asks the launcher to stop afterwards.

    resumed_s, joined_s: of each kill; error: why it gave up, if it did."""

    def __init__(self, folder: str, kills: int, seed: int, minutes: float) -> None:
        super().__init__(daemon=True)
        self._end = time.monotonic() + 60 * minutes
        self._folder, self._kills, self._choice = folder, kills, random.Random(seed)
        self.resumed_s: list[float] = []
        self.joined_s: list[float] = []
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            for number in range(self._kills):
                if time.monotonic() > self._end:
                    break
                self._kill_one()
                print(f"  kill {number}: {self.resumed_s[-1]:.1f} s, joined in {self.joined_s[-1]:.1f} s", flush=True)
        except TimeoutError as error:
            self.error = error
        os.kill(os.getpid(), signal.SIGUSR1)

    def _kill_one(self) -> None:
        full = self._await(RANKS, -1)
        time.sleep(self._choice.uniform(0.0, LATEST_S))
        pid = int(Path(self._folder, f"pid-{self._choice.randrange(RANKS)}").read_text())
        killed_at = time.time()
        os.kill(pid, signal.SIGKILL)
        fewer = self._await(RANKS - 1, full.generation)
        self.resumed_s.append(fewer.at - killed_at)
        more = self._await(RANKS, fewer.generation)
        last = max(each.at for each in jobs.every_step(self._folder) if each.generation < more.generation)
        self.joined_s.append(more.at - last)

    def _await(self, world: int, after: int) -> jobs.Noted:
        """Return the first step of the newest generation, once that has so many ranks and is later than `after`."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            steps = jobs.every_step(self._folder)
            newest = [each for each in steps if each.generation == steps[-1].generation]
            if newest and newest[0].world == world and newest[0].generation > after:
                return newest[0]
            time.sleep(0.02)
        raise TimeoutError(f"no step of {world} ranks within {PATIENCE_S:g} s")


@dataclass(frozen=True)
class Part:
    """Kills with one seed.

    resumed_s, joined_s: of each kill, from it to the next step of 3 ranks, and from their last step to the first one of
    4.  steps: that counted; again: steps that were run again; from_memory: kills after which none was.  epochs: whole
    ones, in which each sample came once.  error: largest relative one of a loss, beside plain training."""

    seed: int
    resumed_s: list[float]
    joined_s: list[float]
    steps: int
    again: int
    from_memory: int
    epochs: int
    error: float


def kill_and_join(kills: int, seed: int, minutes: float) -> Part:
    """Kill ranks of one launch, and compare what it has trained."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "steps").touch()
        killer = Killer(folder, kills, seed, minutes)
        killer.start()
        run = jobs.Run(folder, steps=10**9, every=10, pause_s=0.02)
        autopart.launch(jobs.train, jobs.slow_cluster(RANKS), run, elastic=(2, RANKS), rejoin=REJOIN_S)
        killer.join()
        if killer.error is not None:
            raise killer.error
        steps, every = jobs.noted(folder), jobs.every_step(folder)
        off = jobs.largest_error(steps)
        jobs.require_each_sample_once(steps)
    after = [now for before, now in itertools.pairwise(every) if now.world < before.world and now.step > before.step]
    epochs, again = len(steps) * jobs.ROWS // jobs.SIZE, len(every) - len(steps)
    return Part(seed, killer.resumed_s, killer.joined_s, len(steps), again, len(after), epochs, off)


def record(part: Part, folder: Path = RESULTS) -> Path:
    """Add a part to the results, in place of one with its seed."""
    parts = recorded("elastic", "parts", folder)
    ran = {"command": f"python -m benchmarks.training.elastic --seed {part.seed}", "machine": machine()}
    parts = dict(sorted((parts | {str(part.seed): ran | asdict(part)}).items()))
    every = list(parts.values())
    resumed = [seconds for each in every for seconds in each["resumed_s"]]
    content = {
        "asked within": WITHIN_S,
        "kills": len(resumed),
        "from a kill to the next step": spread(resumed),
        "joining back": spread([seconds for each in every for seconds in each["joined_s"]]),
        "largest relative error of a loss": max(each["error"] for each in every),
        **{name: sum(each[name] for each in every) for name in ("steps", "again", "from_memory", "epochs")},
        "parts": parts,
    }
    return write("elastic", content, command="; ".join(each["command"] for each in every), folder=folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=90.0, help="kill no more after so long")
    given = parser.parse_args()
    part = kill_and_join(given.kills, given.seed, given.minutes)
    print(
        f"from the kill to the next step: {spread(part.resumed_s)}  max {max(part.resumed_s):.1f}, asked {WITHIN_S:g} s"
    )
    print(f"from the last step before to the first one after joining back: {spread(part.joined_s)}")
    print(part)
    if len(part.resumed_s) == parser.get_default("kills"):
        print("written to", record(part).name)


if __name__ == "__main__":
    main()

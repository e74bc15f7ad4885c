"""Ranks that die and join back: how soon training goes on, and whether it stays exact.

One of 4 Gloo ranks is killed at a random instant, again and again: from the first step of 4 ranks on, up to 4 seconds
later, so in any phase of a step, of a save, or of what lies between.  The others go on as 3 ranks under a new plan, and
the fourth joins back.  Measured by the clock of the machine: from the kill to the end of the next step of 3 ranks, and
from the last step of 3 ranks to the first one of 4.

Then every step that counted is run again by plain training in one process: losses (fp64) have to agree to 1e-10, and
each sample has to come once in every epoch.

    python benchmarks/elastic.py                25 minutes on 2 cores; writes results/elastic.json
    python benchmarks/elastic.py --kills 1      a minute, writes nothing
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from common import Spread, spread, write

import autopart

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # the run that the tests have, too
from support.jobs import elastic_jobs as jobs

RANKS, WITHIN_S, REJOIN_S, LATEST_S, PATIENCE_S = 4, 30.0, 5.0, 4.0, 300.0
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


def kill_and_join(kills: int, seed: int, minutes: float) -> tuple[Spread, Spread, dict[str, float]]:
    """Return the seconds from each kill to the next step and to join back, and how exact the run was."""
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
    counted = {
        "kills": len(killer.resumed_s), "steps that counted": len(steps), "steps run again": len(every) - len(steps),
        "epochs": len(steps) * jobs.ROWS // jobs.SIZE, "largest relative error of a loss": off,
    }  # fmt: skip
    return spread(killer.resumed_s), spread(killer.joined_s), counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=90.0, help="kill no more after so long")
    given = parser.parse_args()
    resumed, joined, counted = kill_and_join(given.kills, given.seed, given.minutes)
    print(f"from the kill to the next step: {resumed}  max {resumed.maximum:.1f}, asked {WITHIN_S:g} s")
    print(f"from the last step before to the first one after joining back: {joined}")
    print(counted)
    if given.kills == parser.get_default("kills"):
        content = {"from a kill to the next step": resumed, "joining back": joined, "asked within": WITHIN_S}
        print("written to", write("elastic", content | {"exactness": counted}).name)


if __name__ == "__main__":
    main()

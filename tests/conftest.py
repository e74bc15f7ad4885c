"""Fixtures for all tests: a cache folder for measurements and plans, and pools of worker processes."""

from __future__ import annotations

import functools
import gc
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from support.workers import Workers
from xdist.scheduler import LoadScopeScheduling

# No limit on the time of one example: the tests share their cores with worker processes of other tests.
settings.register_profile("autopart", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("autopart")

# Compiled code is kept beside the sources, as Python does by itself, whatever the environment says: each of the many
# processes that tests start would compile all of it anew, a tenth of what the whole run takes of the processor.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

logging.getLogger("torch.__trace").addHandler = lambda handler: None  # type: ignore[method-assign]
"""pytest would add handlers, for which torch writes every graph of a capture as text."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-golden", action="store_true", help="store the plans of this run as the golden plans")


POOLS = 2
"""How many of pytest's processes have pools of worker processes.  Those spend half of their time waiting for pools, so
one with all files of pools would end long after the others; a third one would start more pools than it saves."""


class FilesTogether(LoadScopeScheduling):  # type: ignore[misc]
    """Gives each file to one of pytest's processes.  Files that use pools of worker processes go to the first `POOLS`
    of them, before all other files: their pools have loaded what they need and keep their captures.
    """

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.split("::")[0]

    def _assign_work_unit(self, node: Any) -> None:
        has_pools = node in self.nodes[:POOLS]
        wanted = next((path for path in self.workqueue if _uses_pools(path) == has_pools), None)
        if wanted is not None:
            self.workqueue.move_to_end(wanted, last=False)
        super()._assign_work_unit(node)


@functools.cache
def _uses_pools(path: str) -> bool:
    text = (Path(__file__).parent.parent / path).read_text()
    return re.search(r"\b(workers|pair)(: \w+)?[,)]", text) is not None


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesTogether:
    return FilesTogether(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the run took of the processor, since its seconds on the clock depend on what else runs."""
    used = os.times()
    seconds = used.user + used.system + used.children_user + used.children_system
    terminalreporter.write_line(f"{seconds:.0f} CPU seconds, of all processes that have ended")


def pytest_collection_finish() -> None:
    """Let the cyclic garbage collector leave out what was imported, and run less often: it took a fifth of the time of
    tests of passes, which make many objects and few cycles.  Callers of passes pause it (`capture.gc_pause`)."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


@pytest.fixture(scope="module", autouse=True)
def alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave the modules of other test files out of `sys.modules`: a capture looks through all files of its user, of
    which 250 more took it half of its time."""
    mine = request.module.__name__
    others = {
        item.module.__name__: item.module
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module.__name__ != mine
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, module in others.items():
            if sys.modules.get(name) is module:
                patch.delitem(sys.modules, name)
        yield


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use a temporary cache folder, which worker processes inherit, and one thread, because pytest's processes use all
    cores.
    """
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOPART_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def workers(own_cache: None) -> Iterator[Workers]:
    """A pool of four processes, which start at the first use and restart after a failure."""
    with Workers(4, timeout=240) as pool:
        yield pool


@pytest.fixture(scope="session")
def pair(own_cache: None) -> Iterator[Workers]:
    """A pool of two processes, for tests that need no stage between the first and the last."""
    with Workers(2, timeout=240) as pool:
        yield pool

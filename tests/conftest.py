"""Fixtures for all tests: a cache folder for measurements and plans, and pools of worker processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.workers import Workers


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-golden", action="store_true", help="store the plans of this run as the golden plans")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each file to one of pytest's processes; by default all files that use pools go to the same one, since each
    pool takes ten seconds to start.
    """
    together = config.option.markexpr == "not slow"
    pooled = {item.path for item in items if {"workers", "pair"}.intersection(getattr(item, "fixturenames", ()))}
    for item in items:
        group = "pools" if together and item.path in pooled else item.nodeid.split("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))


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

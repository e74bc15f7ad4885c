"""For all tests: what they measure and plan is kept in a folder of their own; pools of workers for all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from autopart.runtime.launch.local import Workers


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-golden", action="store_true", help="keep the plans of this run as those to compare with")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Never the user's.  Worker processes inherit it.  One thread: the cores are taken by pytest's processes."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOPART_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def workers(own_cache: None) -> Iterator[Workers]:
    """Four processes for every test that needs some; they start when the first one does, and anew after a failure."""
    with Workers(4, timeout=240) as pool:
        yield pool


@pytest.fixture(scope="session")
def pair(own_cache: None) -> Iterator[Workers]:
    """As `workers`, two of them: for what needs no stage between the first and the last."""
    with Workers(2, timeout=240) as pool:
        yield pool

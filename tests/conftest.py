"""For all tests: what they measure and plan is kept in a folder of their own, never in the user's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Worker processes inherit it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOPART_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield

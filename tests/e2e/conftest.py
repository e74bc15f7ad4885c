"""One pool of workers for all tests of this folder that do not end theirs."""

from __future__ import annotations

import pytest

from autopart.runtime.launch.local import Workers


@pytest.fixture(scope="session")
def workers():
    with Workers(4, timeout=240) as pool:
        yield pool

"""What the tests of detection run on every rank; importable there by name."""

from __future__ import annotations

import os
from unittest import mock

from autopart.costs.detect import probe
from autopart.ir.cluster import Cluster


def probe_uneven() -> Cluster:
    """As if the launcher had started another number of ranks on the last host."""
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="1" if os.environ["RANK"] == "2" else "2"):
        return probe("cpu", (2, 4))

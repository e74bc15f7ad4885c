"""Jobs of the tests of cluster detection, which run on every rank."""

from __future__ import annotations

import os
from unittest import mock

from autopart.costs.detect import probe
from autopart.ir.cluster import Cluster


def probe_uneven() -> Cluster:
    """Probe the cluster as if the launcher had started a different number of ranks on the last host."""
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="1" if os.environ["RANK"] == "2" else "2"):
        return probe("cpu", (2, 4))

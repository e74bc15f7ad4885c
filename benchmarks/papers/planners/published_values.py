"""The best objectives known for the published profiles.

Each value has its file and query (`planner_objectives.Query`). Values of PipeDream, Piper and dnn-partitioning are
minima, DAPPLE's scores are maxima. They are from runs of the original planners, to the digits shown. The linearised DP
is compared with the optimum over all orders, which the published one misses on two files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isinf
from typing import Any

FLAT_4: dict[str, Any] = {"levels": (4,), "bandwidths": (1e9,)}
FLAT_16: dict[str, Any] = {"levels": (16,), "bandwidths": (1.25e9,)}
TWO_4_4: dict[str, Any] = {"levels": (4, 4), "bandwidths": (12e9, 1.25e9)}
TWO_8_2: dict[str, Any] = {"levels": (8, 2), "bandwidths": (50e9, 3.125e9)}

PIPEDREAM: dict[tuple[str, str], tuple[float | None, float | None, float | None, float | None]] = {
    ("vgg16", "acr"): (0.205520896, 0.054794890831, 0.066888752133, 0.065766686720),
    ("vgg16", "plain"): (0.175732624, 0.046587488731, 0.044008415467, 0.046375480600),
    ("vgg16", "straight"): (0.411041792, 0.381063, None, None),
    ("alexnet", "acr"): (0.034217141333, 0.0150994944, 0.0150994944, 0.00962493936),
    ("alexnet", "plain"): (0.023165752, 0.0070595952, 0.005933732, 0.005506),
    ("alexnet", "straight"): (0.066453504, 0.0764411904, None, None),
    ("gnmt", "acr"): (0.025868, 0.017125, 0.011081, 0.008538),
    ("gnmt", "plain"): (0.025868, 0.017125, 0.011081, 0.008538),
    ("gnmt", "straight"): (0.025868, 0.0197132288, None, None),
    ("gnmt_large", "acr"): (0.137129, 0.058971, None, None),
    ("gnmt_large", "plain"): (0.137129, None, None, None),
    ("gnmt_large", "straight"): (0.137129, None, None, None),
    ("resnet50", "acr"): (0.162880924, 0.043847790044, 0.0432084692, 0.0319428182016),
    ("resnet50", "plain"): (0.111497, 0.029212, 0.028667352, 0.02808025952),
}

PLACING: dict[str, tuple[float, float, float]] = {  # ms: contiguous; free: best known, its bound
    "bert24_inference": (17.78990625, 17.715, 17.703),
    "bert24_training": (41.7458125, 39.790, 39.790),
    "gnmt_inference": (32.9106582031, 31.6873, 30.8918),
    "gnmt_training": (107.0044140625, 88.4622, 86.1608),
    "resnet50_inference": (33.7746660156, 33.3582, 33.0247),
    "resnet50_training": (78.6318125, 76.5706, 75.8002),
    "bert_l-3_inference": (27.9185676799, 21.9083, 21.9083),
    "bert_l-3_training": (65.3031491221, 54.2072, 54.2072),
}

UNCHANGED = 16e9
"""Bytes per device. This limit does not change PipeDream's values (acr) except for resnet50."""

FREE_DIGITS = 5e-4
"""Tolerance in ms: the free values come from costs rounded to 1e-4 ms each, several of which form a load."""

PIPER: dict[tuple[int, int, int], float] = {  # (devices, micro-batches, GiB): s; inf: no plan fits
    (8, 1920, 2): inf,
    (8, 1920, 8): 0.1658558,
    (8, 1920, 80): 0.1220073,
    (64, 1920, 2): 0.0320301,
    (64, 1920, 8): 0.0202006,
    (64, 1920, 80): 0.0156502,
    (64, 512, 8): 0.0209573,
}

DAPPLE: dict[tuple[str, int, int], tuple[float, float, float]] = {
    # (file, micro-batch, global batch): scores on 8x2 and on 1x16, data parallel
    ("vgg-19-pbs-32", 32, 1024): (9.8039, 8.1743, 7.3139),
    ("vgg-19-pbs-32", 32, 2048): (12.0623, 10.3058, 10.0389),
    ("xlnet-36-pbs-1", 1, 128): (14.8162, 11.9349, 10.5237),
    ("bert-48-hpgo", 2, 64): (12.6171, 10.2285, 9.0236),
}


@dataclass(frozen=True, slots=True)
class PublishedValue:
    """A published objective.

    file: below the folder of profiles; ask: arguments of `planner_objectives.Query`; digits: tolerance of the value;
    proved: no plan is better.
    """

    file: str
    ask: dict[str, Any]
    value: float
    digits: float = 0.0
    larger_wins: bool = False
    proved: bool = False

    def reached(self, objective: float) -> bool:
        """Return whether an objective is at least as good, to 1e-6 relative or the digits shown, or infeasible as
        published.
        """
        if isinf(self.value):
            return objective == self.value
        worse = self.value - objective if self.larger_wins else objective - self.value
        return worse <= max(1e-6 * self.value, self.digits)

    def __str__(self) -> str:
        query = " ".join(f"{k}={'x'.join(map(str, v)) if isinstance(v, tuple) else v}" for k, v in self.ask.items())
        return f"{self.file} {query}"


def published_values() -> Iterator[PublishedValue]:
    """Yield all published values."""
    for (name, objective), values in PIPEDREAM.items():
        for where, value in zip((FLAT_4, FLAT_16, TWO_4_4, TWO_8_2), values, strict=True):
            if value is not None:
                ask = {"objective": objective, **where}
                yield PublishedValue(f"pipedream/{name}.graph.txt", ask, value)
                if objective == "acr" and name != "resnet50":
                    yield PublishedValue(f"pipedream/{name}.graph.txt", ask | {"memory_bytes": UNCHANGED}, value)
    for bandwidth, value in ((3e9, 0.045657483153), (5e9, 0.044330729892)):
        yield PublishedValue("pipedream/vgg16.graph.txt", {"levels": (16,), "bandwidths": (bandwidth,)}, value)
    for name, (contiguous, free, bound) in PLACING.items():
        yield PublishedValue(f"dnn-partitioning/{name}.json", {"objective": "line"}, contiguous)
        yield PublishedValue(f"dnn-partitioning/{name}.json", {"objective": "contiguous"}, contiguous, proved=True)
        yield PublishedValue(
            f"dnn-partitioning/{name}.json", {"objective": "free"}, free, FREE_DIGITS, proved=free == bound
        )
    for (devices, micros, gib), value in PIPER.items():
        ask = {"levels": (devices,), "micros": micros, "memory_bytes": gib * 2**30, "bandwidths": (25 * 2**30,)}
        yield PublishedValue("piper/bert32a100.json", ask, value, 5e-8)
    for (name, micro, batch), scores in DAPPLE.items():
        for levels, value in zip(((8, 2), (1, 16)), scores[:2], strict=True):
            ask = {"objective": "dapple", "levels": levels, "micro_batch": micro, "global_batch": batch}
            yield PublishedValue(f"dapple/{name}.txt", ask, value, 5e-5, larger_wins=True)
        ask = {"objective": "data", "levels": (8, 2), "micro_batch": micro, "global_batch": batch}
        yield PublishedValue(f"dapple/{name}.txt", ask, scores[2], 5e-5, larger_wins=True, proved=True)

"""An expert's plan in Megatron's words as options of ours, to be planned and simulated beside the chosen plan."""

from __future__ import annotations

import re
from itertools import accumulate
from typing import Any

from torch import nn

from autopart.extras.export.formats import read_layout
from autopart.ir.errors import UsageError

_NUMBERS = ("tp", "pp", "vpp", "dp", "mbs")


def hand_options(text: str, model: nn.Module, rows: int) -> dict[str, Any]:
    """Return the options of `autopart.plan` that a text such as "layout=Et*6|t*6L,dp=2" means.

    layout: Megatron's, or pp: stages that the planner cuts; tp: ranks that divide each stage (tensor parallelism); vpp:
    stages of each rank; dp: replicas; mbs: rows of a micro-batch on one replica; recompute: full or none.  rows: of the
    whole batch.  Raises UsageError.
    """
    words = [word.strip().partition("=")[::2] for word in re.split(r",(?=\s*\w+=)", text)]
    given = dict(words)
    if len(given) < len(words):
        raise UsageError(f"--hand {text!r} gives a word twice", fix="give each word once")
    wrong = [word for word in given if word not in (*_NUMBERS, "layout", "recompute")]
    wrong += [word for word in _NUMBERS if not re.fullmatch(r"[1-9]\d{0,5}", given.get(word, "1"))]
    if wrong:
        why = f"{wrong[0]}={given[wrong[0]]!r}"
        raise UsageError("--hand is not understood", why=why, fix="write --hand layout=Et*6|t*6L,tp=2,dp=2,vpp=1,mbs=4")
    tp, pp, vpp, dp, mbs = (int(given.get(word, "1")) for word in _NUMBERS)
    schedule = "interleaved" if vpp > 1 else "1f1b"
    options: dict[str, Any] = {
        "tensor_parallel": tp, "replicas": dp, "stages_per_rank": vpp, "schedule": schedule,
    }  # fmt: skip
    if "mbs" in given:
        if rows % (mbs * dp):
            raise UsageError(
                f"{rows} rows are no multiple of mbs * dp = {mbs * dp}", fix="pass --rows, or another mbs="
            )
        options["micro_batches"] = rows // (mbs * dp)
    if "layout" in given:
        counts = read_layout(given["layout"])
        if "pp" in given and len(counts) != pp * vpp:
            why = f"the layout has {len(counts)} stages, pp * vpp is {pp * vpp}"
            raise UsageError("--hand contradicts itself", why=why, fix="leave pp= out")
        options["cuts"] = _cuts(counts, model)
    elif "pp" in given:
        options["stages"] = pp * vpp
    if "recompute" in given:
        options["recompute"] = {"full": "all", "none": "off"}.get(given["recompute"], given["recompute"])
    return options


def _cuts(counts: tuple[int, ...], model: nn.Module) -> list[str]:
    """Return the paths of the modules at which stages of these numbers of layers begin."""
    lists = {path: len(part) for path, part in model.named_modules() if isinstance(part, nn.ModuleList)}
    stack = max(lists, key=lambda path: lists[path], default="")
    if lists.get(stack) != sum(counts) or 0 in counts:
        why = f"the layout has {sum(counts)}" if 0 not in counts else "a stage of the layout has none"
        what = f"{stack or 'the longest list of modules'} has {lists.get(stack, 0)} layers"
        raise UsageError(what, why=why, fix="write a t for each layer, and at least one on each stage")
    return [f"{stack}.{first}" for first in list(accumulate(counts))[:-1]]

"""The autocast region that forward() and the loss run in.

Its casts become ops of the program (`autocast_regions`), which then runs alike in any autocast state of its caller.
Which op runs in which precision depends on the device type: on CUDA, layer_norm and softmax run in fp32, on CPUs in the
precision of their input.  So a program is captured for one device type.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from autopart.ir.plan import Precision

_DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Autocast:
    """Autocast for tensors on devices of one type, to one dtype."""

    device_type: str
    dtype: torch.dtype

    def region(self) -> AbstractContextManager[Any]:
        """Return the region, without torch's cache of casts.

        Each use of a weight has its own cast, so gradients of several uses are summed in the parameter's precision.
        The runtime shares the casts (`runtime/stages/stage_module.py`).
        """
        return torch.autocast(self.device_type, self.dtype, cache_enabled=False)


def autocast_for(precision: Precision, device_type: str) -> Autocast | None:
    """Return the autocast for a precision on devices of a type; None for fp32.

    A torch that was built without CUDA can only plan for CUDA, with the casts of CPUs (`is_stand_in`).
    """
    kind = "cpu" if is_stand_in(precision, device_type) else device_type
    return Autocast(kind, _DTYPES[precision]) if precision in _DTYPES else None


def is_stand_in(precision: Precision, device_type: str) -> bool:
    """Return whether CPU autocast replaces that of CUDA, which this torch cannot trace."""
    return precision in _DTYPES and device_type == "cuda" and not torch._C._has_cuda

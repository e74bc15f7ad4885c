"""torch's list of composite ops, asked for once: `run_decompositions` goes through all of torch's ops to make it.

On a small model that takes a quarter of the capture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.export import exported_program

_NAME = "_collect_all_valid_cia_ops"
_known: dict[frozenset[str], set[Any]] = {}
"""By the composite ops that are registered, since a library may register more at any time."""


@contextlib.contextmanager
def composite_ops_remembered() -> Iterator[None]:
    """Inside, torch is asked again only if an op was registered since."""
    collect = getattr(exported_program, _NAME, None)
    if collect is None:
        yield
        return

    def remembered() -> set[Any]:
        registered = frozenset(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))
        if registered not in _known:
            _known.clear()
            _known[registered] = set(collect())
        return set(_known[registered])

    with mock.patch.object(exported_program, _NAME, remembered):
        yield

"""Objects as they stand, told apart by identity in a few loops of C: what is asked before every step has to be quick.

Every object that is compared is kept alive, so that no other one can have its identity.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn

ABSENT = object()


class Snapshot:
    """What containers hold, in their order, and what single keys and attributes are.

    It holds as long as every one holds the very same objects under the same keys.  A number that was assigned anew is
    another object, and may be the same number: whoever asks looks closer then.
    """

    def __init__(
        self,
        wholes: Iterable[Any],
        unordered: Iterable[dict[str, Any]],
        keys: Iterable[tuple[dict[str, Any], str]],
        attributes: Iterable[tuple[Any, str]],
        states: Iterable[Callable[[], bool]],
    ) -> None:
        """wholes: dictionaries, lists and sets that are watched with all that they hold.  unordered: those of them that
        nobody reads in their order.  keys: of dictionaries, absent ones too.  attributes: of classes, functions and
        cells.  states: called for whatever no identity tells."""
        containers = list({id(whole): whole for whole in wholes}.values())
        self._empty = [whole for whole in containers if not whole]
        self._dicts = [whole for whole in containers if whole and _by_equality(whole)]
        self._copies = [dict(whole) for whole in self._dicts]
        loose = {id(whole) for whole in unordered}
        self._ordered = [whole for whole in self._dicts if len(whole) > 1 and id(whole) not in loose]
        self._order = list(chain.from_iterable(self._ordered))
        others = [whole for whole in containers if whole and not _by_equality(whole)]
        dicts = [whole for whole in others if isinstance(whole, dict)]
        self._views = [*(whole.values() if isinstance(whole, dict) else whole for whole in others), *dicts]
        self._lengths = list(map(len, self._views))
        self._held = list(chain.from_iterable(self._views))
        places = [(home, name, home.get(name, ABSENT)) for home, name in keys]
        self._absent = _columns(place for place in places if place[2] is ABSENT)
        self._keys = _columns(place for place in places if place[2] is not ABSENT)
        unique = {(id(home), name): (home, name, getattr(home, name, ABSENT)) for home, name in attributes}
        self._attributes = _columns(unique.values())
        self._states = list(states)

    def holds(self) -> bool:
        """Whether all is as it was.  O(entries), some 30 ns for each."""
        try:
            return self._holds()
        except Exception:  # tensors that are others cannot be compared; a variable may not be assigned any more
            return False

    def _holds(self) -> bool:
        homes, names, values = self._keys
        bare, lacking, _ = self._absent
        owners, members, found = self._attributes
        return bool(
            self._dicts == self._copies
            and list(chain.from_iterable(self._ordered)) == self._order
            and all(map(operator.is_, map(operator.getitem, homes, names), values))
            and not any(map(dict.__contains__, bare, lacking))
            and not any(self._empty)
            and all(map(operator.is_, chain.from_iterable(self._views), self._held))
            and list(map(len, self._views)) == self._lengths
            and all(map(operator.is_, map(getattr, owners, members, repeat(ABSENT)), found))
            and all(state() for state in self._states)
        )


def _by_equality(whole: Any) -> bool:
    """Whether a dictionary may be compared as a whole: values that are not the same object are not equal, or cannot be
    compared.  So it is with tensors of several elements, and with modules; that is the quickest way."""
    return isinstance(whole, dict) and all(
        type(key) is str and (value is None or _only_itself(value)) for key, value in whole.items()
    )


def _only_itself(value: Any) -> bool:
    if type(value) in (torch.Tensor, nn.Parameter):
        return bool(value.numel() > 1)
    return isinstance(value, nn.Module) and bool(type(value).__eq__ is object.__eq__)


def _columns(rows: Iterable[tuple[Any, Any, Any]]) -> tuple[list[Any], list[Any], list[Any]]:
    """Rows of three as three lists."""
    listed = list(rows)
    return [row[0] for row in listed], [row[1] for row in listed], [row[2] for row in listed]

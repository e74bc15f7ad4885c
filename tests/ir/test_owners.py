"""Who owns which parameter: whole ones, the largest first, each to the replica that has least."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autopart.ir.shares import largest_share, owners_of

NAMES = st.text("ab.", min_size=1, max_size=4)


def test_the_largest_first_and_those_of_one_size_by_name() -> None:
    sizes = {"b": 5, "a": 5, "large": 8, "small": 1}
    assert owners_of(sizes, 2) == {"large": 0, "a": 1, "b": 1, "small": 0}
    assert largest_share(sizes.values(), 2) == 10
    assert owners_of({}, 3) == {} and largest_share([], 3) == 0


@given(st.dictionaries(NAMES, st.integers(0, 50), max_size=9), st.integers(1, 5))
def test_what_is_charged_is_what_is_owned(sizes: dict[str, int], replicas: int) -> None:
    owners = owners_of(sizes, replicas)
    assert owners.keys() == sizes.keys() and set(owners.values()) <= set(range(replicas))
    owned = [sum(sizes[name] for name, owner in owners.items() if owner == r) for r in range(replicas)]
    assert max(owned) == largest_share(sizes.values(), replicas)
    assert owners_of(dict(reversed(sizes.items())), replicas) == owners

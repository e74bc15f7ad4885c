"""Numbers and texts of a batch that its program does not depend on: what no line reads, and numbers that only scale.

While such a free value is traced, an `Unread` stands for it.  A product or quotient with a floating point tensor reads
the number as an input of the program.  Any other use, such as a comparison, an index, formatting or an attribute, ends
the attempt, and the value belongs to the kind of its batch.  `isinstance` is answered, since the type belongs to the
kind.  `type(value)` cannot be noticed, so nothing is free where a function of the user's mentions `type`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopart.batch.batch import Batch
from autopart.capture.python.watch.closure_reads import mentions
from autopart.capture.python.watch.observed import Observed
from autopart.ir.errors import CaptureError

_SCALES = frozenset((
    "mul", "__mul__", "__rmul__", "__imul__", "div", "__truediv__", "__rtruediv__", "__itruediv__", "__rdiv__",
    "mul_", "div_",
))  # fmt: skip
_ATTEMPTS = 4
_EXACT = (torch.float32, torch.float64)
"""Dtypes in which a product with a tensor of one number is the product with that number, to the bit."""
_TYPES = {torch.int64: int, torch.float64: float}


class ValueUsed(CaptureError):
    """Raised where a free value is used.  place: the index of its leaf."""

    def __init__(self, place: int) -> None:
        super().__init__("a value of the batch is used")
        self.place = place


class Unread:
    """Stands for the free value of a leaf, a number or a text.  used: gets the indices of leaves that are used, since
    the model may catch the error."""

    def __init__(self, place: int, leaf: Any, used: list[int]) -> None:
        object.__setattr__(self, "_of", (place, leaf, used))

    def __getattribute__(self, name: str) -> Any:
        place, leaf, used = object.__getattribute__(self, "_of")
        if name == "__class__":
            return _TYPES[leaf.dtype] if isinstance(leaf, torch.Tensor) else type(leaf)
        if name == "__torch_function__":
            return object.__getattribute__(self, name)
        used.append(place)
        raise ValueUsed(place)

    @classmethod
    def __torch_function__(
        cls, func: Any, kinds: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Multiply or divide a tensor; any other function of torch uses the value."""
        stands = next((arg for arg in (*args, *(kwargs or {}).values()) if type(arg) is Unread), None)
        if stands is None:  # inside a list
            raise ValueUsed(-1)
        leaf = object.__getattribute__(stands, "_of")[1]
        other: Any = next((arg for arg in args if type(arg) is not Unread), None)
        scales = getattr(func, "__name__", "") in _SCALES and len(args) == 2 and not kwargs
        if not (scales and isinstance(leaf, torch.Tensor) and _is_exact(other)):
            return stands.value  # raises
        number = leaf.to(other.dtype) if leaf.is_floating_point() else leaf
        return func(*(number if type(arg) is Unread else arg for arg in args))


def _is_exact(other: object) -> bool:
    return isinstance(other, torch.Tensor) and other.dtype in _EXACT


def _using(self: Unread, *others: Any) -> Any:
    """Use the value; an operation with a tensor is left to the tensor."""
    return NotImplemented if len(others) == 1 and isinstance(others[0], torch.Tensor) else self.value


_KEPT = {"__class__", "__getattribute__", "__init__", "__new__", "__doc__", "__init_subclass__", "__subclasshook__"}
for _name in {*dir(int), *dir(float), *dir(str), *dir(bytes)} - _KEPT:
    if _name[:2] == "__":
        setattr(Unread, _name, _using)


def standing(batch: Batch, leaves: Sequence[Any], used: list[int]) -> tuple[Any, ...]:
    """Return the leaves of a batch that is traced, with what stands for its free ones.  used: as for `Unread`."""
    return tuple(Unread(i, leaf, used) if i in batch.free else leaf for i, leaf in enumerate(leaves))


def free_of(batch: Batch, observed: Observed, attempt: Callable[[Batch], object]) -> tuple[int, ...]:
    """Return the values of a batch that its program does not depend on, by leaf; none where that cannot be shown.

    observed: what a capture of the same kind read.  attempt: captures a batch with free leaves.
    """
    free = () if mentions(observed.readings.values(), "type") else batch.values
    for _ in range(_ATTEMPTS):
        try:
            if free:
                attempt(batch.freed(free))
            return free
        except ValueUsed as error:
            free = tuple(place for place in free if place != error.place and error.place >= 0)
        except Exception:  # whatever an error of the model's own may be, with the value itself it runs
            break
    return ()

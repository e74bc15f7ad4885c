"""A proof by calculation that a padded batch has the loss and the gradients of the batch that the user passed.

Both run through a copy of the model in one process, a few rows, in double precision: with the training flags as they
are, dropout left out, and the same seed for whatever else is drawn.  Statistics over tokens, means over positions,
attention without a mask and a loss that counts fillers all differ there by more than rounding.
"""

from __future__ import annotations

import copy
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from autopart.capture.batch.batch import Batch, unflatten
from autopart.capture.trace.export import LossFn, loss_of, scalar
from autopart.capture.trained import Trained
from autopart.ir.errors import AutopartError, RefusedError

ROWS = 2
"""Rows of the batch that are compared."""
_SHARE = 0.5
"""Share of the free memory that the comparison may take for parameters and gradients."""


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to compare.  gradients: whether these are compared too.  tolerance: largest relative difference, of the
    loss and of each gradient; a difference below a tenth of it, relative to all gradients together, is rounding."""

    dtype: torch.dtype
    gradients: bool
    tolerance: float

    def needed_bytes(self, numbers: int) -> int:
        """Return the bytes that a model with this count of numbers needs: a copy, and its gradients twice."""
        return numbers * self.dtype.itemsize * (3 if self.gradients else 1)


# Models may round their loss to fp32 whatever their weights are: doubles differ by more than their own rounding then.
_WAYS = (_Way(torch.float64, True, 1e-6), _Way(torch.float32, True, 1e-4), _Way(torch.float32, False, 1e-5))


def require_same_loss(model: nn.Module, loss_fn: LossFn | None, plain: Batch, padded: Batch, *, training: bool) -> bool:
    """Return whether it is proved that both batches have the same loss, and in training the same gradients; False if
    the loss is not finite, which proves nothing.

    training: whether the model runs with its training flags; else in eval mode, and without gradients.  Local: it takes
    two forwards and backwards of a few rows.  Raises RefusedError where they differ or cannot be compared.
    """
    parts = [model, *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]
    ways = _ways_in_memory(parts)
    if not training:
        ways = [_Way(way.dtype, False, way.tolerance) for way in ways]
    for number, way in enumerate(ways):
        try:
            own, loss = _copy(model, loss_fn, way.dtype)
            if not training:
                own.eval()
            expected = _outcome(own, loss, plain, way)
        except AutopartError:
            raise
        except Exception as error:  # doubles met numbers that the model holds in another precision
            if number == len(ways) - 1:
                raise _refused(plain, padded, f"the model does not run alone on {ROWS} rows: {_line(error)}") from error
            continue
        if not math.isfinite(expected[0]):
            return False
        try:
            found = _outcome(own, loss, padded, way)
        except Exception as error:
            raise _refused(plain, padded, f"the model does not run on the padded batch: {_line(error)}") from error
        _compare(found, expected, way, plain, padded)
        return True
    raise AssertionError("there is at least one way")


def _ways_in_memory(parts: Sequence[nn.Module]) -> list[_Way]:
    """Return the ways for which the memory suffices, the best first.  Raises RefusedError if there are none."""
    tensors = {id(t): t for part in parts for t in (*part.parameters(), *part.buffers())}.values()
    missing = "the model is on the meta device" if any(t.is_meta for t in tensors) else ""
    numbers = sum(t.numel() for t in tensors)
    free = _free_bytes(next((t.device for t in tensors), torch.device("cpu")))
    ways = [way for way in _WAYS if way.needed_bytes(numbers) <= _SHARE * free]
    if not ways or missing:
        needed = f"a copy of the model takes {_WAYS[-1].needed_bytes(numbers) / 2**30:.1f} GiB, more than half of the "
        raise RefusedError(
            "pad_to= cannot be proved to leave the loss of this model as it is",
            why=missing or f"{needed}{free / 2**30:.1f} GiB that are free",
            fix="pad the sequences where batches are made (collate_fn of the DataLoader), and leave out pad_to=",
        )
    if not ways[0].gradients:
        logging.getLogger("autopart").warning(
            "pad_to: the memory does not suffice to compare gradients: only the losses of padded batches are compared"
        )
    return ways


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as lines:
            found = dict(line.split(":") for line in lines)
        return 1024.0 * int(found["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / 2


def _copy(model: nn.Module, loss_fn: LossFn | None, dtype: torch.dtype) -> tuple[nn.Module, LossFn | None]:
    """Return copies of the model and of a loss function that is a module, in a precision and without gradients."""
    own = isinstance(loss_fn, nn.Module)
    memo: dict[int, Any] = {}
    for part in (model, *([loss_fn] if isinstance(loss_fn, nn.Module) else [])):
        for parameter in part.parameters():
            memo[id(parameter)] = nn.Parameter(_cast(parameter, dtype), parameter.requires_grad)
        for buffer in part.buffers():
            memo[id(buffer)] = _cast(buffer, dtype)
    other, loss = copy.deepcopy((model, loss_fn if own else None), memo)
    return other, loss if own else loss_fn


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.detach().clone().to(dtype if tensor.is_floating_point() else tensor.dtype)


_Outcome = tuple[float, Mapping[str, torch.Tensor]]


def _outcome(model: nn.Module, loss_fn: LossFn | None, batch: Batch, way: _Way) -> _Outcome:
    """Return the loss of the first rows, and the gradient of each parameter that it depends on."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    batch = batch.with_rows(min(ROWS, batch.rows or 1)).to(device)
    leaves = [
        _cast(leaf, way.dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
        for leaf in batch.leaves
    ]
    args, kwargs, target = unflatten(tuple(leaves), batch.spec)
    seeded = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with seeded, torch.set_grad_enabled(way.gradients), _WithoutDropout():
        torch.manual_seed(0)
        result = model(*args, **kwargs)
        loss = scalar(loss_fn(result, target), "loss_fn") if loss_fn is not None else loss_of(result)
    if not way.gradients:
        return loss.item(), {}
    trained = [(name, p) for name, p in Trained(model, loss_fn).named_parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, [parameter for _, parameter in trained], allow_unused=True)
    return loss.item(), {name: g for (name, _), g in zip(trained, found, strict=True) if g is not None}


class _WithoutDropout(TorchFunctionMode):
    """Leaves dropout out, also inside attention: it would draw other numbers for other lengths."""

    _DROPOUTS = frozenset(
        {
            F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
            torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout, torch.native_dropout,
        }
    )  # fmt: skip
    _RATES: ClassVar = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}
    """The place of the rate among the arguments."""

    def __torch_function__(self, func: Any, types: Iterable[Any], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._DROPOUTS:
            return args[0] if args else kwargs["input"]
        place = self._RATES.get(func)
        if place is not None and len(args) > place:
            args = (*args[:place], 0.0, *args[place + 1 :])
        elif place is not None:
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


def _compare(found: _Outcome, expected: _Outcome, way: _Way, plain: Batch, padded: Batch) -> None:
    """Raise RefusedError where a loss or a gradient differs by more than rounding."""
    if not abs(found[0] - expected[0]) <= way.tolerance * max(abs(expected[0]), way.tolerance):
        raise _refused(plain, padded, f"the loss is {found[0]:.9g} with padding, and {expected[0]:.9g} without")
    whole = math.hypot(*(_norm(gradient) for gradient in expected[1].values()))
    for name in dict.fromkeys((*expected[1], *found[1])):
        given = [outcome[1][name] for outcome in (found, expected) if name in outcome[1]]
        off = _norm(given[0] - given[1]) if len(given) == 2 else _norm(given[0])
        size = _norm(expected[1][name]) if name in expected[1] else 0.0
        if not off <= max(way.tolerance * size, way.tolerance / 10 * whole):
            ratio = f"by {off / size:.1e} of its norm" if size else "and is zero without"
            raise _refused(plain, padded, f"the gradient of {name} differs with padding, {ratio}")


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.to_dense() if tensor.layout is not torch.strided else tensor))


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def _refused(plain: Batch, padded: Batch, why: str) -> RefusedError:
    changes = [
        f"{name} {tuple(new.shape)}" + (f" from {tuple(old.shape)}" if isinstance(old, torch.Tensor) else "")
        for name, new in zip(padded.names, padded.leaves, strict=True)
        if isinstance(new, torch.Tensor)
        for old in [dict(zip(plain.names, plain.leaves, strict=True)).get(name)]
        if not (isinstance(old, torch.Tensor) and old.shape == new.shape)
    ]
    return RefusedError(
        "padding changes the loss of this model, or cannot be proved to leave it as it is",
        where=f"padded: {', '.join(changes)}",
        why=why,
        fix="pass a mask that the model applies to all that mixes tokens, and labels that its loss ignores where it is "
        'padded (another filler: pad_with={"labels": 0}); or leave out pad_to=',
    )

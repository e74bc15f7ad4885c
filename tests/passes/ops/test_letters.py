"""Letters of ops: what rows, checks and a second oracle, torch's own sharding rules on fake devices, say of them."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import destroy_process_group, init_process_group
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopart.ir.errors import UsageError
from autopart.passes.ops.letters import Letters, letters
from autopart.passes.ops.row import MATMUL, POINTWISE, OpRow, check
from autopart.passes.ops.table import _ROWS, register, row_of

LEFT, RIGHT = (4, 6), (6, 8)


@dataclass(frozen=True)
class Call:
    """A call of an op on tensors of these shapes.  integers: the operands that are indices."""

    target: str
    fn: Callable[..., torch.Tensor]
    shapes: tuple[tuple[int, ...], ...]
    arguments: dict[str, Any] = field(default_factory=dict)
    integers: tuple[int, ...] = ()

    def tensors(self) -> list[torch.Tensor]:
        return [
            torch.zeros(s, dtype=torch.long) if i in self.integers else torch.ones(s) for i, s in enumerate(self.shapes)
        ]

    def letters(self) -> Letters:
        result = self.fn(*self.tensors()).shape
        found = letters(row_of(self.target), self.arguments, self.shapes, tuple(result))
        assert found is not None
        return found


CALLS = {
    "mm": Call("aten.mm.default", torch.mm, (LEFT, RIGHT)),
    "addmm": Call("aten.addmm.default", torch.addmm, ((4, 8), LEFT, RIGHT)),
    "bmm": Call("aten.bmm.default", torch.bmm, ((2, *LEFT), (2, *RIGHT))),
    "matmul": Call("aten.matmul.default", torch.matmul, ((2, *LEFT), RIGHT)),
    "mv": Call("aten.mv.default", torch.mv, (LEFT, (6,))),
    "linear": Call("aten.linear.default", F.linear, ((4, 2, 6), (8, 6))),
    "add": Call("aten.add.Tensor", torch.add, (LEFT, LEFT)),
    "mul": Call("aten.mul.Tensor", torch.mul, (LEFT, LEFT)),
    "tanh": Call("aten.tanh.default", torch.tanh, (LEFT,)),
    "transpose": Call("aten.transpose.int", lambda x: x.transpose(0, 1), (LEFT,), {"dim0": 0, "dim1": 1}),
    "permute": Call("aten.permute.default", lambda x: x.permute(2, 0, 1), ((2, 4, 6),), {"dims": (2, 0, 1)}),
    "sum": Call("aten.sum.dim_IntList", lambda x: x.sum(1), (LEFT,), {"dim": (1,)}),
    "mean": Call("aten.mean.dim", lambda x: x.mean(1, keepdim=True), (LEFT,), {"dim": (1,), "keepdim": True}),
    "var": Call("aten.var.correction", lambda x: x.var(1), (LEFT,), {"dim": (1,)}),
    "argmax": Call("aten.argmax.default", lambda x: x.argmax(1), (LEFT,), {"dim": 1}),
    "softmax": Call("aten.softmax.int", lambda x: x.softmax(1), (LEFT,), {"dim": 1}),
    "layer_norm": Call("aten.layer_norm.default", lambda x: F.layer_norm(x, (6,)), (LEFT,), {"normalized_shape": (6,)}),
    "embedding": Call("aten.embedding.default", lambda w, i: F.embedding(i, w), ((8, 6), (4, 2)), integers=(1,)),
}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Two devices that do not exist."""
    init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    destroy_process_group()


def cases() -> Iterator[tuple[str, str]]:
    for name, call in CALLS.items():
        for axis in sorted({axis for names in call.letters().operands for axis in names}):
            yield name, axis


@pytest.mark.parametrize(("name", "axis"), list(cases()))
def test_sharding_along_a_letter_does_what_the_row_says(mesh: DeviceMesh, name: str, axis: str) -> None:
    """Kept: sharded without communication.  Summed over: a partial sum.  Mixed: the shards must meet."""
    call, row = CALLS[name], row_of(CALLS[name].target)
    found = call.letters()
    with CommDebugMode() as counter:
        sharded = [
            DTensor.from_local(t.chunk(2, n.index(axis))[0], mesh, [Shard(n.index(axis))])
            if axis in n
            else DTensor.from_local(t, mesh, [Replicate()])
            for t, n in zip(call.tensors(), found.operands, strict=True)
        ]
        result = call.fn(*sharded)
    assert isinstance(result, DTensor)
    (placement,), communications = result.placements, counter.get_total_counts()
    if axis[:1] in row.mixes + row.may_mix:
        assert communications or placement.is_partial()  # a lookup in a sharded table: a partial sum, with a mask
    elif axis in found.results[0]:
        assert placement == Shard(found.results[0].index(axis)) and not communications
    else:
        assert row.linear and placement.is_partial() and not communications


def test_a_form_is_chosen_by_the_axes_of_the_operands_and_by_flags() -> None:
    def axes(target: str, *shapes: tuple[int, ...], result: int, **arguments: Any) -> str:
        found = letters(row_of(f"aten.{target}"), arguments, shapes, (2,) * result)
        assert found is not None
        return ", ".join("".join(names) for names in found.operands) + " -> " + "".join(found.results[0])

    assert axes("matmul.default", (3,), (3, 2), result=1) == "k, kn -> n"
    assert axes("matmul.default", (2, 2, 3), (3,), result=2) == ".0mk, k -> .0m"
    assert axes("lstm.input", (5, 2, 4), (1, 2, 6), result=3) == "tbi, lbh -> tbo"
    assert axes("lstm.input", (2, 5, 4), (1, 2, 6), result=3, batch_first=True) == "bti, lbh -> bto"
    assert axes("convolution.default", (2, 4, 9), (6, 4, 3), result=3) == "nix, oiu -> noS"
    assert axes("convolution.default", (2, 4, 9), (4, 6, 3), result=3, transposed=True) == "niS, iou -> nox"
    assert axes("sum.dim_IntList", (2, 3, 4), result=2, dim=(1,)) == ".2D1.0 -> .2.0"
    assert axes("bucketize.Tensor", (2, 3), (5,), result=2) == ".1.0, b -> .1.0"
    assert axes("addmm.default", (8,), (2, 3), (3, 8), result=2) == "n, mk, kn -> mn"
    assert letters(row_of("aten.mm.default"), {}, [(2, 3, 4), (4, 2)], (2, 2)) is None


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (OpRow("own.a", "product"), "family"),
        (OpRow("own.a", MATMUL, "mk, kn -> mn"), "axis k"),
        (OpRow("own.a", MATMUL, "mk, kn", linear="product"), "no result"),
        (OpRow("own.a", POINTWISE, "...D -> ...D"), "names its axes D"),
        (OpRow("own.a", POINTWISE, saves="all"), "saves"),
    ],
)
def test_a_row_that_says_nothing_sensible_is_refused(row: OpRow, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check(row)


def test_an_op_has_one_row() -> None:
    assert register(row_of("aten.tanh.default")) is row_of("aten.tanh.default")
    with pytest.raises(UsageError, match="another row"):
        register(OpRow("tanh", POINTWISE))


def test_letters_of_every_row_are_single_axes() -> None:
    known = set(string.ascii_letters + "., ->|+*~:_")
    assert all(set(row.axes) <= known for row in _ROWS.values())

"""Tensors with the same shape and any layout: permuted, with offsets and gaps, expanded, parts of others; and models
whose parameters, values and batches do not lie in the order of their axes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from support.models.small_models import Small, floats, mse

LAYOUTS = ("dense", "permuted", "offset", "gaps", "expanded", "narrow", "step")


def drawn_tensor(shape: list[int], draw: random.Random, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return random numbers of this shape in a drawn layout; no part of its memory that it does not show is zero."""
    generator, kind = torch.Generator().manual_seed(draw.randrange(1 << 30)), draw.choice(LAYOUTS)
    axis, sizes = draw.randrange(len(shape)), list(shape)

    def numbers(of: list[int]) -> torch.Tensor:
        return torch.randn(of, generator=generator).to(dtype)

    if kind == "permuted":
        order = draw.sample(range(len(shape)), len(shape))
        return numbers([shape[place] for place in order]).permute([order.index(place) for place in range(len(shape))])
    if kind == "offset":
        start, count = draw.choice((1, 3, 4)), torch.Size(shape).numel()
        return numbers([count + 4])[start : start + count].view(shape)
    if kind == "gaps":
        return numbers([*shape[:-1], shape[-1] + 5])[..., 2 : 2 + shape[-1]]
    if kind == "expanded":
        sizes[axis] = 1
        return numbers(sizes).expand(shape)
    if kind == "narrow":
        sizes[axis] += 4
        return numbers(sizes).narrow(axis, 2, shape[axis])
    if kind == "step":
        sizes[axis] *= 2
        return numbers(sizes)[(slice(None),) * axis + (slice(None, None, 2),)]
    return numbers(sizes)


# -- models ------------------------------------------------------------------------------------------------------------

Lay = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Laid(Small):
    """A model whose input lies as `lay` makes it."""

    lay: Lay = field(default=lambda x: x)

    def data(self, rows: int, dtype: torch.dtype = torch.float32) -> Any:
        """Return a batch whose input lies so."""
        inputs, target = super().data(rows, dtype)
        return self.lay(inputs), target


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.to(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


class Images(nn.Module):
    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.depth = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.squeeze, self.excite = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.down = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(4, 8, 3, padding=1)
        self.last = nn.Conv2d(8, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = F.silu(self.norm(self.first(x)))
        a = a + self.depth(a)
        a = a * torch.sigmoid(self.excite(F.silu(self.squeeze(F.adaptive_avg_pool2d(a, 1)))))
        b = self.down(a)
        b = self.up(F.pixel_shuffle(b, 2))
        c = F.interpolate(F.max_pool2d(b, 2), scale_factor=2, mode="nearest") + a
        left, right = c.chunk(2, 1)
        return self.last(torch.cat([right, left.tanh()], 1))


class Volumes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv3d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.down, self.up = nn.Conv3d(4, 4, 2, stride=2), nn.ConvTranspose3d(4, 4, 2, stride=2)
        self.last = nn.Conv3d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = torch.relu(self.norm(self.first(x)))
        return self.last(self.up(self.down(a)) + a)


class Weights(nn.Module):
    """Parameters that are views of one buffer, lie transposed, or are used transposed and plain."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(3 * 36 + 6) * 0.3
        self.a = nn.Parameter(flat[:36].view(6, 6))
        self.b = nn.Parameter(flat[36:72].view(6, 6).t())
        self.c = nn.Parameter(flat[72:108].view(3, 2, 6).permute(1, 2, 0))
        self.bias = nn.Parameter(flat[108:])
        self.wide = nn.Parameter((torch.randn(6, 12) * 0.3)[:, ::2])
        self.norm = nn.LayerNorm(6)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.conv.weight = nn.Parameter(self.conv.weight.detach().permute(2, 0, 1).contiguous().permute(1, 2, 0))
        self.register_buffer("table", torch.randn(6, 6).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = torch.tanh(x @ self.a + self.bias) @ self.b
        a = self.norm(a + self.table[:5]) @ self.wide
        a = self.conv(a.mT).mT
        a = torch.tanh(a) @ self.c.reshape(6, 6)
        return F.linear(torch.tanh(a @ self.a.t()), self.b.t(), self.bias)


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.gru = nn.GRU(6, 6, bidirectional=True)
        self.out = nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, _ = self.lstm(x)
        b, _ = self.gru(a.transpose(0, 1))
        return self.out(b.transpose(0, 1)) + a.flip(1)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.first(x)
        z = torch.view_as_complex(a.unflatten(-1, (4, 2)))
        z = torch.fft.fft(z, dim=1).transpose(1, 2)
        w = (z.conj() * z.roll(1, 1)).transpose(1, 2)
        v = w.mT.conj()
        return self.last(torch.view_as_real((v.mT + w).resolve_conj().contiguous()).flatten(-2).tanh())


class Windows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.mid, self.last = nn.Linear(6, 6), nn.Linear(3, 3), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.first(x)  # rows, 5, 6
        b = self.mid(a.unfold(1, 3, 1))  # rows, 3, 6, 3
        c = F.pad(b.sum(-1), (0, 0, 1, 1))
        d = torch.tanh(a.mT).as_strided((len(x), 6, 5), (30, 1, 6)).mT
        e = F.unfold(a[:, None], 3, padding=1)
        f = F.fold(e, (5, 6), 3, padding=1)[:, 0]
        return self.last(c + d + torch.tanh(f) + a.diagonal(dim1=1, dim2=2).sum(-1)[:, None, None])


class Expanded(nn.Module):
    """Values that are expanded, of one entry or of none along an axis, or that lie with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(1, 2, 6))
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.tokens.expand(len(x), -1, -1)
        a = self.first(x)
        one = a.mean(1, keepdim=True)
        many = one.expand(-1, 5, -1)
        none = a[:, :0]
        apart = a[..., ::2]
        last = a.mT[:, :, 1:3]
        b = self.second(torch.cat([tokens, none, torch.tanh(a) * many], 1))
        return self.last(b[:, 2:]) + apart.repeat(1, 1, 2) + last.mT.sum(1, keepdim=True)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)
        self.mha = nn.MultiheadAttention(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)
        a = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        b = a.transpose(0, 1)
        return self.mha(b, b, b, need_weights=False)[0].transpose(0, 1) + a


def tokens(model: Callable[[], nn.Module], lay: Lay = lambda x: x) -> Laid:
    return Laid(model, lambda n: (floats(n, 5, 6), floats(n, 5, 6, seed=8)), mse, lay=lay)


def images(model: Callable[[], nn.Module], *shape: int, lay: Lay = channels_last) -> Laid:
    return Laid(model, lambda n: (floats(n, *shape), floats(n, *shape, seed=8)), mse, lay=lay)


def rows_last(x: torch.Tensor) -> torch.Tensor:
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


LAID = {
    "laid_images": images(lambda: Images().to(memory_format=torch.channels_last), 4, 4, 6),
    "laid_plain": images(Images, 4, 4, 6),
    "laid_weights_only": images(
        lambda: Images().to(memory_format=torch.channels_last), 4, 4, 6, lay=lambda x: x.contiguous()
    ),
    "laid_grey": images(lambda: Images(1).to(memory_format=torch.channels_last), 1, 4, 4),
    "laid_small": images(lambda: Images(4).to(memory_format=torch.channels_last), 4, 2, 2),
    "laid_rows_last": images(Images, 4, 4, 6, lay=rows_last),
    "laid_volumes": images(lambda: Volumes().to(memory_format=torch.channels_last_3d), 2, 2, 4, 2),
    "laid_weights": tokens(Weights),
    "laid_sequence": tokens(Sequence, lambda x: x.mT.contiguous().mT),
    "laid_complex": tokens(Complex, rows_last),
    "laid_windows": tokens(Windows, lambda x: torch.cat([x, x, x], 2)[..., 6:12]),
    "laid_expanded": tokens(Expanded, lambda x: x[:, :1].expand(-1, 5, -1)),
    "laid_attention": tokens(Attention, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)),
}

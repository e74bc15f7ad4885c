"""Losses in many forms: `EXACT` ones by their reduction, and `REFUSED` ones by the reason."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from support.oracles.loss_oracle import MICRO_ROWS, Term

ROWS = sum(MICRO_ROWS)


def data(rows: int = ROWS) -> tuple[torch.Tensor, ...]:
    """Return x (rows, 3, 4), y (rows, 4), t (class numbers, a different count of class 1 per micro-batch) and m (a
    mask).
    """
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(rows, 3, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    t = torch.tensor([0, 1, 2, 3, 1, 1, 2])[:rows]
    m = torch.rand(rows, 3, generator=generator) > 0.3
    return x, y, t, m


def label_smoothing(s: nn.Module, x, y, t, m):
    return F.cross_entropy(y * s.w, t, ignore_index=1, label_smoothing=0.1)


def masked_lm(s, x, y, t, m):
    labels = torch.where(m, t[:, None], -100)
    return F.cross_entropy((x * s.w).reshape(-1, 4), labels.reshape(-1))


def flattened_across_sequence(s, x, y, t, m):
    """Flatten to (sequence, batch, features), as torch's attention does."""
    z = x.transpose(0, 1).reshape(-1, 4) @ s.k
    return z.reshape(3, -1, 4).transpose(0, 1).tanh().mean()


def siamese(s, x, y, t, m):
    both = torch.cat([x, x.flip(1)], 0) @ s.k
    one, two = both.chunk(2, 0)
    return F.mse_loss(one, two)


def pooled_by_index(s, x, y, t, m):
    last = (m.long() * torch.arange(3)).argmax(-1)
    return F.cross_entropy((x * s.w)[torch.arange(x.shape[0]), last], t)


def recurrent(s, x, y, t, m):
    return s.lstm(x)[0].mean() + s.gru(x.transpose(0, 1))[1].square().mean()


def convolved(s, x, y, t, m):
    z = F.max_pool1d(s.conv(x).relu(), 2)
    return F.group_norm(z, 1).square().mean()


def transformer(s, x, y, t, m):
    return s.block(x, src_key_padding_mask=~torch.cat([m[:, :2], m.new_ones(m.shape[0], 1)], 1)).square().mean()


def two_token_means(s, x, y, t, m):
    return F.cross_entropy(y * s.w, t, ignore_index=1) + F.cross_entropy(y * s.w, t, ignore_index=2)


def two_heads(s, x, y, t, m):
    """Classification of the labelled rows, a masked mean and a small penalty."""
    classes = F.cross_entropy(y * s.w, t, ignore_index=1)
    masked = ((x * s.w).tanh().sum(-1) * m).sum() / m.sum()
    return (classes + 0.5 * masked) / 2 + 0.01 * s.k.square().sum()


def several(s, x, y, t, m):
    """Return three loss terms with different counts."""
    start, end = (F.cross_entropy(y * s.w[i], torch.where(m[:, i], t, -100)) for i in (0, 1))
    return [start, end, ((x * s.w).tanh().mean(-1) * m).sum() / m.sum()]


EXACT: dict[str, tuple[str, Term]] = {
    "mean": ("rows", lambda s, x, y, t, m: (x * s.w).tanh().mean()),
    "sum": ("sum", lambda s, x, y, t, m: (x * s.w).tanh().sum()),
    "sum over rows of means": ("sum", lambda s, x, y, t, m: (x * s.w).mean((1, 2)).sum()),
    "sum / rows": ("rows", lambda s, x, y, t, m: (x * s.w).sum() / x.shape[0]),
    "sum / elements": ("rows", lambda s, x, y, t, m: (x * s.w).sum() / x.numel()),
    "divided before the sum": ("rows", lambda s, x, y, t, m: (x * s.w / x.shape[0]).mT.sum()),
    "mean * rows": ("sum", lambda s, x, y, t, m: (x * s.w).mean() * x.shape[0]),
    "sum / full(rows)": ("rows", lambda s, x, y, t, m: (x * s.w).sum() / torch.full((), x.shape[0])),
    "mean + regulariser": ("rows", lambda s, x, y, t, m: 2 * (x * s.w).mean() + s.k.square().sum()),
    "stacked means": ("rows", lambda s, x, y, t, m: torch.stack([(x * s.w).mean(), (y * s.w).mean()]).sum()),
    "regulariser alone": ("any", lambda s, x, y, t, m: s.k.square().sum()),
    "cross entropy": ("tokens", lambda s, x, y, t, m: F.cross_entropy(y * s.w, t, ignore_index=1)),
    "cross entropy, sum": ("sum", lambda s, x, y, t, m: F.cross_entropy(y * s.w, t, reduction="sum")),
    "cross entropy, none": ("rows", lambda s, x, y, t, m: F.cross_entropy(y * s.w, t, reduction="none").mean()),
    "cross entropy per pixel": (
        "tokens",
        lambda s, x, y, t, m: F.cross_entropy((x * s.w).mT, t[:, None].expand(-1, 3), ignore_index=1),
    ),
    "cross entropy of probabilities": ("rows", lambda s, x, y, t, m: F.cross_entropy(y * s.w, y.softmax(-1))),
    "class weights, sum": (
        "sum",
        lambda s, x, y, t, m: F.cross_entropy(y * s.w, t, weight=s.k[0].detach().abs(), reduction="sum"),
    ),
    "label smoothing": ("tokens", label_smoothing),
    "masked language modelling": ("tokens", masked_lm),
    "nll": ("tokens", lambda s, x, y, t, m: F.nll_loss(F.log_softmax(y * s.w, -1), t, ignore_index=1)),
    "mse": ("rows", lambda s, x, y, t, m: F.mse_loss(y * s.w, y + 1)),
    "l1, sum": ("sum", lambda s, x, y, t, m: F.l1_loss(y * s.w, y + 1, reduction="sum")),
    "huber + smooth l1": ("rows", lambda s, x, y, t, m: F.huber_loss(y * s.w, y) + F.smooth_l1_loss(y * s.w, y)),
    "bce with logits": ("rows", lambda s, x, y, t, m: F.binary_cross_entropy_with_logits(y * s.w, y.sigmoid())),
    "kl, batchmean": (
        "rows",
        lambda s, x, y, t, m: F.kl_div((y * s.w).log_softmax(-1), y.softmax(-1), reduction="batchmean"),
    ),
    "kl, mean": ("rows", lambda s, x, y, t, m: F.kl_div((y * s.w).log_softmax(-1), y.softmax(-1))),
    "triplet": ("rows", lambda s, x, y, t, m: F.triplet_margin_loss(y * s.w, y + 1, y.flip(1))),
    "focal": (
        "rows",
        lambda s, x, y, t, m: (
            (1 - (-(c := F.cross_entropy(y * s.w, t, reduction="none"))).exp()).square().mul(c).mean()
        ),
    ),
    "masked mean": ("tokens", lambda s, x, y, t, m: ((x * s.w).sum(-1) * m).sum() / m.sum()),
    "masked mean, each divided": ("tokens", lambda s, x, y, t, m: ((x * s.w).sum(-1) * m / m.sum()).sum()),
    "masked mean of means": ("tokens", lambda s, x, y, t, m: ((x * s.w).sum(-1) * m).mean() / m.double().mean()),
    "masked mean, floor 1": ("tokens", lambda s, x, y, t, m: ((x * s.w).sum(-1) * m).sum() / m.sum().clamp(min=1)),
    "masked mean, float": (
        "tokens",
        lambda s, x, y, t, m: ((x * s.w) * m[..., None]).sum() / m.double().sum().clamp_min(1.0),
    ),
    "ignored targets": (
        "tokens",
        lambda s, x, y, t, m: (
            F.cross_entropy(y * s.w, t, reduction="none", ignore_index=1).sum() / (t != 1).sum().clamp(min=1)
        ),
    ),
    "chosen by where": (
        "tokens",
        lambda s, x, y, t, m: torch.where(t > 1, (y * s.w).sum(-1), 0).sum() / (t > 1).sum().clamp(min=1),
    ),
    "not a number elsewhere": (
        "sum",
        lambda s, x, y, t, m: torch.where(y > -100, y * s.w, float("nan")).masked_fill(y < -100, float("nan")).sum(),
    ),
    "added to zeros": ("sum", lambda s, x, y, t, m: (y.new_zeros(4) + (y * s.w).sum(0)).sum()),
    "summed by class": (
        "sum",
        lambda s, x, y, t, m: (y.new_zeros(4).scatter_add(0, t, y @ s.w) * s.w).sum(),
    ),
    "sequence first": ("rows", flattened_across_sequence),
    "siamese": ("rows", siamese),
    "last token": ("tokens", pooled_by_index),
    "recurrent": ("rows", recurrent),
    "convolution": ("rows", convolved),
    "transformer block": ("rows", transformer),
    "einsum": ("rows", lambda s, x, y, t, m: torch.einsum("bsd,de,bse->bs", x, s.k, x).mean()),
    "normalised": ("rows", lambda s, x, y, t, m: F.cosine_similarity(F.normalize(y * s.w, dim=-1), y).mean()),
    "determinants": (
        "rows",
        lambda s, x, y, t, m: torch.linalg.slogdet(torch.diag_embed((y * s.w).exp()) + s.k.mT @ s.k)[1].mean(),
    ),
    "lookup": ("rows", lambda s, x, y, t, m: (s.k[t] * F.one_hot(t, 4)).gather(1, t[:, None]).mean()),
    "gram matrix, linear": ("sum", lambda s, x, y, t, m: ((y * s.w).T @ y * s.k).sum()),
    "sorted and back": ("rows", lambda s, x, y, t, m: (y * s.w)[t.argsort()][t.argsort().argsort()].tanh().mean()),
    "product of means": ("rows", lambda s, x, y, t, m: (y * s.w).mean() * x.mean()),
    "sum + regulariser": ("sum", lambda s, x, y, t, m: (y * s.w).sum() + s.k.sum()),
    "sum + mean": ("sum", lambda s, x, y, t, m: (y * s.w).sum() + (y * s.w).mean()),
    "two token means": ("sum", two_token_means),
    "two heads and a regulariser": ("sum", two_heads),
    "builtin sum of terms": ("sum", lambda s, x, y, t, m: sum(several(s, x, y, t, m)) / 3),
    "stack of terms": ("sum", lambda s, x, y, t, m: torch.stack(several(s, x, y, t, m)).mean()),
    "learned weights of terms": (
        "sum",
        lambda s, x, y, t, m: sum((-a).exp() * b + a for a, b in zip(s.w, several(s, x, y, t, m), strict=False)),
    ),
    "a term twice": ("sum", lambda s, x, y, t, m: (a := (y * s.w).mean()) + (a / 2 + (x * s.w).sum()) - 3 * a),
    "class weights": ("tokens", lambda s, x, y, t, m: F.cross_entropy(y * s.w, t, weight=s.c, ignore_index=2)),
    "class weights, smoothed": (
        "tokens",
        lambda s, x, y, t, m: F.cross_entropy(y * s.w, t, weight=s.c, label_smoothing=0.2, ignore_index=2),
    ),
    "class weights, nll": ("tokens", lambda s, x, y, t, m: F.nll_loss((y * s.w).log_softmax(-1), t, weight=s.c)),
    "class weights per pixel": (
        "tokens",
        lambda s, x, y, t, m: F.cross_entropy((x * s.w).mT, torch.where(m, t[:, None], -100), weight=s.c * 2),
    ),
    "clamped count": ("sum", lambda s, x, y, t, m: ((x * s.w).sum(-1) * m).sum() / m.sum().clamp(min=4)),
    "another mask": ("sum", lambda s, x, y, t, m: ((x * s.w).sum(-1) * m).sum() / (t == 3).sum().clamp(min=1)),
    "another mask, empty": ("sum", lambda s, x, y, t, m: ((x * s.w).sum(-1) * m).sum() / (t == 3).sum()),
    "half a mask": ("sum", lambda s, x, y, t, m: ((x * s.w).sum(-1) * m).sum() / m[:, :1].sum().clamp(min=1)),
    "filled": (
        "sum",
        lambda s, x, y, t, m: (x * s.w).sum(-1).masked_fill(t[:, None] == 1, 0.0).sum() / (t != 1).sum().clamp(min=1),
    ),
    "product of masks": (
        "sum",
        lambda s, x, y, t, m: ((x * s.w).sum(-1) * m * (t > 0)[:, None]).sum() / (m * (t > 0)[:, None]).sum(),
    ),
    "root of a count": ("sum", lambda s, x, y, t, m: (x * s.w).sum() / m.sum().sqrt()),
    "balanced classes": (
        "rows",
        lambda s, x, y, t, m: F.binary_cross_entropy_with_logits(
            x * s.w, (x > 0).double(), pos_weight=(x <= 0).sum() / (x > 0).sum()
        ),
    ),
    "focal over positives": (
        "sum",
        lambda s, x, y, t, m: (x * s.w).tanh().square().sum() / (t == 3).sum() + F.l1_loss(y * s.w, y),
    ),
    "constant in a tensor": ("rows", lambda s, x, y, t, m: (y * s.w / torch.tensor(3.0)).mean()),
}

REFUSED: dict[str, tuple[str, Term]] = {
    "centred": ("rows with a sum or mean", lambda s, x, y, t, m: (y * s.w - (y * s.w).mean(0)).square().mean()),
    "contrastive": (
        "every row of the batch with every other",
        lambda s, x, y, t, m: F.cross_entropy(y @ s.k @ y.T, torch.arange(y.shape[0])),
    ),
    "exp of a mean": ("not linear", lambda s, x, y, t, m: (y * s.w).mean().exp()),
    "root mean square": ("not linear", lambda s, x, y, t, m: (y * s.w).square().mean().sqrt()),
    "variance": ("takes var over the rows", lambda s, x, y, t, m: (y * s.w).var(0).mean()),
    "maximum": ("takes amax over the rows", lambda s, x, y, t, m: (y * s.w).amax(0).mean()),
    "softmax over rows": ("softmax along the rows", lambda s, x, y, t, m: ((y * s.w).softmax(0) * y).sum()),
    "first row": ("one row of the batch", lambda s, x, y, t, m: (y * s.w)[0].sum()),
    "all but the first row": ("rows of the batch by their place", lambda s, x, y, t, m: (y * s.w)[1:].sum()),
    "neighbours": ("roll along the rows", lambda s, x, y, t, m: (y * s.w * y.roll(1, 0)).mean()),
    "divided by rows + 1": ("number 4 in the program", lambda s, x, y, t, m: (y * s.w).sum() / (y.shape[0] + 1)),
    "divided by the root of the rows": ("number", lambda s, x, y, t, m: (y * s.w).sum() / y.shape[0] ** 0.5),
    "divided by the square of the rows": ("how many rows", lambda s, x, y, t, m: (y * s.w).sum() / y.shape[0] ** 2),
    "constant that holds the rows": (
        "a constant may hold",
        lambda s, x, y, t, m: (y * s.w).sum() / torch.tensor(float(len(y))),
    ),
    "weighted by parameters": (
        "depends on parameters",
        lambda s, x, y, t, m: (y * s.w).sum() / (y * s.w).detach().abs().sum(),
    ),
    "learned divisor": ("depends on parameters", lambda s, x, y, t, m: (y * s.w).sum() / (y * s.w).abs().sum()),
    "product of learned means": (
        "multiplies a sum or mean",
        lambda s, x, y, t, m: (y * s.w).mean() * (x * s.w).mean(),
    ),
    "product of terms": (
        "not linear in a sum of terms",
        lambda s, x, y, t, m: ((y * s.w).sum() + (y * s.w).mean()).square(),
    ),
    "sum + 1": ("adds a term that does not depend", lambda s, x, y, t, m: (y * s.w).sum() + 1.0),
    "learned class weights": (
        "depends on parameters",
        lambda s, x, y, t, m: F.cross_entropy(y * s.w, t, weight=s.k[0].detach().abs()),
    ),
    "rows divided by different things": (
        "scale differently",
        lambda s, x, y, t, m: ((x * s.w).sum(-1) * m / m.sum() + (x * s.w).sum(-1) / x.shape[0]).sum(),
    ),
    "largest of the batch": (
        "takes amax over the rows",
        lambda s, x, y, t, m: (y * s.w).sum() / y.amax(),
    ),
    "expert balance": (
        "multiplies a sum or mean",
        lambda s, x, y, t, m: (F.one_hot(t, 4).double().mean(0) * (y * s.w).softmax(-1).mean(0)).sum(),
    ),
    "row numbers": ("number of the row", lambda s, x, y, t, m: (y.sum(1) * s.v * torch.arange(y.shape[0])).mean()),
    "gram matrix": ("not linear", lambda s, x, y, t, m: ((y * s.w).T @ y).square().sum()),
    "batch appended": ("takes logsumexp over the rows", lambda s, x, y, t, m: (y @ s.w).logsumexp(0)),
    "multiplied by the variance of the batch": (
        "combines rows with a sum or mean",
        lambda s, x, y, t, m: (x * s.w).mean() * (y - y.mean()).square().mean(),
    ),
    "squared shares": (
        "need not be 0",
        lambda s, x, y, t, m: ((x * s.w).sum(-1) * (m / m.sum()).square()).sum() / (m / m.sum()).square().sum(),
    ),
    "sorted rows": ("sort along the rows", lambda s, x, y, t, m: ((y @ s.w).sort()[0] * y[:, 0]).mean()),
}

"""Models and batches of published measurements, built on the current device, and a process for each plan.

`tests/benchmarks/test_published.py` compares the numbers of parameters with the published ones.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import nn
from torch.nn import functional

import autopart

transformers.logging.set_verbosity_error()


def bert(
    hidden: int,
    layers: int,
    vocab: int = 30528,
    length: int = 512,
    *,
    heads: int | None = None,
    attention: str = "eager",
    kind: Callable[[Any], nn.Module] = transformers.BertForPreTraining,
) -> nn.Module:
    """Return BERT with both pre-training heads, enlarged as in RaNNC: heads of 64, feed-forward width four times the
    hidden size.

    Attention is written out (eager), as in the published measurements. kind: another head on the same body.
    """
    config = transformers.BertConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads or hidden // 64,
        intermediate_size=4 * hidden,
        max_position_embeddings=length,
        attn_implementation=attention,
        use_cache=False,
    )
    return kind(config).train()


def bert_batch(rows: int, length: int = 512) -> Any:
    """Return the inputs and the two targets."""
    ids = torch.zeros((rows, length), dtype=torch.long)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    return inputs, (torch.zeros_like(ids), torch.zeros(rows, dtype=torch.long))


def bert_loss(output: Any, target: Any) -> torch.Tensor:
    """Return the losses of words and of the next sentence, both averaged over the rows.

    The model's own loss averages words over masked positions, which does not combine over micro-batches.
    """
    words = functional.cross_entropy(output.prediction_logits.flatten(0, 1), target[0].flatten(), reduction="none")
    return words.mean() + functional.cross_entropy(output.seq_relationship_logits, target[1], reduction="none").mean()


def gpt2(
    layers: int, hidden: int, heads: int, length: int = 1024, vocab: int = 50257, dropout: float = 0.1
) -> nn.Module:
    """Return GPT-2 (or GPT-3's shape) with its tied head."""
    config = transformers.GPT2Config(
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        n_embd=hidden, n_layer=layers, n_head=heads, n_positions=length, vocab_size=vocab, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).train()


def llama(layers: int, hidden: int, inside: int, heads: int, groups: int, vocab: int = 128256) -> nn.Module:
    """Return a shape of Llama 3. inside: width of the feed-forward layer; groups: heads of keys and values."""
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inside,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=8192,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).train()


def llama_8b(layers: int = 32) -> nn.Module:
    """Return the shape of Llama-3 8B."""
    return llama(layers, 4096, 14336, 32, 8)


def llama_405b(layers: int = 126) -> nn.Module:
    """Return the shape of Llama-3.1 405B."""
    return llama(layers, 16384, 53248, 128, 8)


def vit(layers: int, hidden: int, heads: int, size: int = 224, patch: int = 16, classes: int = 1000) -> nn.Module:
    """Return a vision transformer for square images of `size` pixels, with a feed-forward width of four times the
    hidden size.
    """
    config = transformers.ViTConfig(
        image_size=size,
        patch_size=patch,
        num_labels=classes,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
    )
    return transformers.ViTForImageClassification(config).train()


def causal_batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros((rows, length), dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 with a shortcut (ResNet v1.5: the stride is in the 3x3)."""

    def __init__(self, inside: int, mid: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, mid, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(mid)
        self.conv2 = nn.Conv2d(mid, mid, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(mid)
        self.conv3 = nn.Conv2d(mid, 4 * mid, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * mid)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inside != 4 * mid:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, 4 * mid, 1, stride, bias=False), nn.BatchNorm2d(4 * mid))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        return torch.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


DEPTHS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Blocks in each of the four groups of a ResNet, by its number of layers."""


class ResNet(nn.Module):
    """ResNet-50, 101 or 152, or with other numbers of blocks, with all filters multiplied by `factor` as in RaNNC's
    examples.
    """

    def __init__(self, depth: int | tuple[int, ...], factor: int = 1, width: int = 64) -> None:
        super().__init__()
        width = width * factor
        self.conv = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(3, 2, 1)
        blocks: list[nn.Module] = []
        inside = width
        for group, count in enumerate(DEPTHS[depth] if isinstance(depth, int) else depth):
            for i in range(count):
                blocks.append(Bottleneck(inside, width << group, 2 if group and not i else 1))
                inside = 4 * (width << group)
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(inside, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.blocks(self.pool(torch.relu(self.bn(self.conv(x)))))
        return self.fc(y.mean((2, 3)))


def image_batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images on the current device and their classes."""
    return torch.empty(rows, 3, 224, 224), torch.zeros(rows, dtype=torch.long)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def alone(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `work` in a child process, with its peak memory as "rss_gb".

    The process is a fork of this one, so that imports are not timed, but their memory (about 0.4 GB) is counted.
    """
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(there, work))
    process.start()
    there.close()
    try:
        result: dict[str, Any] = here.recv()
    except EOFError:
        result = {"failed": "the process died"}
    process.join()
    return result


def _send(there: Connection, work: Callable[[], dict[str, Any]]) -> None:
    try:
        result = work()
    except Exception as error:  # a failed row must not end the table
        result = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
    there.send({**result, "rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9})


def warm() -> None:
    """Plan a tiny model, so that imports are done before timing."""
    torch.set_num_threads(1)
    with torch.device("meta"):
        autopart.plan(nn.Linear(2, 2), "cpu:2", sample=(torch.empty(2, 2), torch.empty(2, 2)), loss_fn=nn.MSELoss())

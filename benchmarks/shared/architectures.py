"""Models of transformers by their sizes, whatever a family calls them, without random draws in a step."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers as hf
from torch import nn

Sizes = dict[str, Any]

_NAMES = {
    "hidden": "hidden_size d_model n_embd embedding_size projection_dim lru_width",
    "inside": """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim dff d_inner d_ff n_inner ffn_hidden_size
        feed_forward_size""",
    "layers": """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers
        num_decoder_layers""",
    "heads": """num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads
        decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads""",
    "groups": "num_key_value_heads",
    "head": "head_dim d_head d_kv",
    "experts": "num_experts num_local_experts",
    "chosen": "num_experts_per_tok",
    "tokens": "max_position_embeddings n_positions n_ctx max_seq_len max_2d_position_embeddings",
    "vocab": "vocab_size",
    "classes": "num_labels",
}
_DRAWN = (
    "dropout",
    "drop_connect_rate",
    "pdrop",
    "layerdrop",
    "drop_path_rate",
    "drop_rate",
    "dropout_prob",
    "dropout_rate",
)
_OFF: Sizes = {"router_jitter_noise": 0.0, "apply_spec_augment": False}


def sizes(**roles: int) -> Sizes:
    """Return the values of all names of configurations that play these roles, such as hidden=64."""
    return {name: size for role, size in roles.items() for name in _NAMES[role].split()}


def built(model: str, common: Sizes, own: Sizes | None = None) -> nn.Module:
    """Return a model of transformers, configured by `configuration`."""
    cls = getattr(hf, model)
    made: nn.Module = cls(configuration(cls.config_class, common, own or {}))
    return made


def seeded(make: Any, seed: int) -> nn.Module:
    """Return what `make` returns, with the same weights every time, in training mode."""
    hf.logging.set_verbosity_error()
    torch.manual_seed(seed)
    model: nn.Module = make().train()
    return model


def configuration(cls: Any, common: Sizes, own: Sizes) -> Any:
    """Return a configuration of this class without random draws.

    common: values of these names wherever the class has them.  own: beyond `common`; a dictionary configures a part.
    """
    fields = {name for c in cls.__mro__ for name in vars(c).get("__annotations__", ())} | {"num_labels"}
    given = {name: size for name, size in {**common, **_OFF}.items() if name in fields}
    given |= {name: type(getattr(cls, name))() for name in fields if name.endswith(_DRAWN) and _is_rate(cls, name)}
    for name, part in (cls.sub_configs or {}).items():
        wanted = own.get(name, {})
        if part is hf.AutoConfig and not wanted:
            continue
        kind = hf.CONFIG_MAPPING[wanted["model_type"]] if "model_type" in wanted else part
        given[name] = configuration(kind, common, wanted).to_dict()
    return cls(**{**given, **{name: value for name, value in own.items() if name not in given or name in common}})


def _is_rate(cls: Any, name: str) -> bool:
    return type(getattr(cls, name, None)) in (int, float)


class RecurrentModel(nn.Module):
    """A language model of recurrent layers.  cell: `nn.LSTM` or `nn.GRU`."""

    def __init__(self, vocab: int, hidden: int, layers: int, cell: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocab, hidden), nn.Linear(hidden, vocab)
        self.layers = nn.ModuleList(cell(hidden, hidden, batch_first=True) for _ in range(layers))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        for layer in self.layers:
            x, _ = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class DenoisingBlock(nn.Module):
    """Two convolutions around an embedding of the noise level, with a residual."""

    def __init__(self, into: int, out: int, level: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, into), nn.Conv2d(into, out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(8, out), nn.Conv2d(out, out, 3, padding=1)
        self.level, self.skip = nn.Linear(level, out), nn.Conv2d(into, out, 1)

    def forward(self, x: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        h = self.conv1(nn.functional.silu(self.norm1(x))) + self.level(level)[:, :, None, None]
        return self.skip(x) + self.conv2(nn.functional.silu(self.norm2(h)))


class DenoisingUNet(nn.Module):
    """Predict the noise of images as a diffusion model does (DDPM, NeurIPS 2020): a U-Net with skips over its middle.

    pixel_values: (rows, 3, size, size), noisy.  level: (rows,), the level of noise.  noise: as pixel_values.
    """

    def __init__(self, width: int, depth: int, levels: int = 1000) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(depth)]
        self.levels, self.first = nn.Embedding(levels, 4 * width), nn.Conv2d(3, width, 3, padding=1)
        pairs = list(zip([width, *widths], widths, strict=False))
        self.down = nn.ModuleList(DenoisingBlock(into, out, 4 * width) for into, out in pairs)
        self.middle = DenoisingBlock(widths[-1], widths[-1], 4 * width)
        self.up = nn.ModuleList(DenoisingBlock(2 * out, into, 4 * width) for into, out in reversed(pairs))
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, pixel_values: torch.Tensor, level: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        at, x, skips = self.levels(level), self.first(pixel_values), []
        for block in self.down:
            skips.append(block(x, at))
            x = nn.functional.avg_pool2d(skips[-1], 2)
        x = self.middle(x, at)
        for block in self.up:
            wider = nn.functional.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([wider, skips.pop()], 1), at)
        return nn.functional.mse_loss(self.last(x), noise)

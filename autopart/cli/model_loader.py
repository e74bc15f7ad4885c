"""Load a model by its name on a command line.

    "gpt2-tiny"              built in (`BUILTIN`): small, with random weights, nothing downloaded
    "package.module:make"    a function of an importable module; the current folder is importable
    "folder/train.py:make"   a function of a file
    "folder/config.json"     a configuration file of transformers, or a folder that has one: see shelf/

The function has no arguments and returns (model, batch) or (model, batch, loss_fn).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autopart.extras.shelf.build import from_shelf
from autopart.extras.shelf.config_file import config_path, read_config
from autopart.extras.shelf.library import transformers
from autopart.ir.errors import UsageError


@dataclass(frozen=True)
class Subject:
    """A model with its batch, and maybe a loss function.  notes: for the user."""

    model: nn.Module
    batch: Any
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None
    notes: tuple[str, ...] = ()


def load_model(name: str, seed: int = 0, rows: int | None = None, tokens: int | None = None) -> Subject:
    """Build the named model after seeding torch, so that every process gets the same weights.

    rows, tokens: of the batch for a configuration file, whose model is on the meta device.  Raises UsageError for an
    unknown name, a configuration file that describes no model, and a function that returns something else, and the
    function's own errors.
    """
    path = config_path(name) if name not in BUILTIN else None
    if path is not None:
        model, batch, notes = from_shelf(read_config(path), rows, tokens)
        return Subject(model, batch, notes=notes)
    if rows is not None or tokens is not None:
        given = "--rows" if rows is not None else "--tokens"
        raise UsageError(f"{given} is given, and {name} makes its own batch", fix=f"drop {given}")
    make = _function(name)
    torch.manual_seed(seed)
    made = make()
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        kinds = [type(part).__name__ for part in made] if isinstance(made, tuple) else []
        what = f"({', '.join(kinds)})" if isinstance(made, tuple) else f"a {type(made).__name__}"
        raise UsageError(f"{name} returned {what}", fix="return (model, batch) or (model, batch, loss_fn)")
    return Subject(*made)


def _function(name: str) -> Callable[[], Any]:
    if name in BUILTIN:
        return BUILTIN[name]
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise UsageError(f"model {name!r} is not known", fix=FORMS)
    module = _from_file(Path(place)) if place.endswith(".py") else _from_import(place)
    found = getattr(module, attribute, None)
    if not callable(found):
        raise UsageError(f"{place} has no function {attribute!r}", fix=FORMS)
    make: Callable[[], Any] = found
    return make


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"there is no file {str(path)!r}", fix=FORMS)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    _importable(path.resolve().parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _from_import(place: str) -> ModuleType:
    _importable(Path.cwd())
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise
        raise UsageError(f"there is no module {place!r}", why=str(error), fix=FORMS) from error


def _importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


# ---- built-in models -----------------------------------------------------------------------------------------------

VOCAB, ROWS, SEQ = 256, 16, 64
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": SEQ, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip


def _tokens(seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(seed))


def _language_batch() -> dict[str, torch.Tensor]:
    ids = _tokens()
    return {"input_ids": ids, "labels": ids.clone()}


def gpt2_tiny() -> tuple[nn.Module, Any]:
    """Make a GPT-2 over bytes with 4 layers, a tied head and no dropout."""
    hf = transformers()
    config = hf.GPT2Config(
        vocab_size=VOCAB, n_positions=SEQ, n_embd=128, n_layer=4, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config).train(), _language_batch()


def llama_tiny() -> tuple[nn.Module, Any]:
    """Make a Llama with 4 layers and grouped-query attention."""
    hf = transformers()
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_TEXT, num_key_value_heads=2)).train(), _language_batch()


def bert_tiny() -> tuple[nn.Module, Any]:
    """Make a BERT with a masked-language head and dropout; labels at every third token."""
    hf = transformers()
    batch = _language_batch()
    keep = (torch.arange(SEQ)[None, :] + torch.arange(ROWS)[:, None]) % 3 == 0
    return hf.BertForMaskedLM(hf.BertConfig(**_TEXT)).train(), {**batch, "labels": batch["labels"].where(keep, -100)}


def t5_tiny() -> tuple[nn.Module, Any]:
    """Make a T5: encoder and decoder with one embedding."""
    hf = transformers()
    config = hf.T5Config(
        vocab_size=VOCAB, d_model=128, d_kv=32, d_ff=344, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config).train(), {"input_ids": _tokens(), "labels": _tokens(2)}


def resnet_tiny() -> tuple[nn.Module, Any]:
    """Make a ResNet with BatchNorm, whose statistics couple the rows of a micro-batch."""
    hf = transformers()
    config = hf.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 64], depths=[1, 2, 1], num_labels=10)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(ROWS, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (ROWS,), generator=generator)
    return hf.ResNetForImageClassification(config).train(), {"pixel_values": images, "labels": labels}


def mlp() -> tuple[nn.Module, Any, Callable[[Any, Any], torch.Tensor]]:
    """Make six linear layers with a loss function; needs only torch."""
    layers = [layer for _ in range(5) for layer in (nn.Linear(64, 64), nn.Tanh())]
    generator = torch.Generator().manual_seed(1)
    inputs, target = torch.randn(ROWS, 64, generator=generator), torch.randn(ROWS, 10, generator=generator)
    return nn.Sequential(*layers, nn.Linear(64, 10)), (inputs, target), nn.functional.mse_loss


BUILTIN: dict[str, Callable[[], tuple[Any, ...]]] = {
    "gpt2-tiny": gpt2_tiny,
    "llama-tiny": llama_tiny,
    "bert-tiny": bert_tiny,
    "t5-tiny": t5_tiny,
    "resnet-tiny": resnet_tiny,
    "mlp": mlp,
}

FORMS = (
    f'name a built-in model ({", ".join(BUILTIN)}), "package.module:function", "file.py:function", or the config.json '
    "of a transformers model"
)

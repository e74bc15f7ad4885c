"""Make the model and the batch of a configuration file, on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopart.extras.shelf.config_file import ConfigFile
from autopart.extras.shelf.kinds import PIXELS, Kind, Lengths, choose
from autopart.extras.shelf.library import transformers
from autopart.ir.errors import UsageError


def from_shelf(file: ConfigFile, rows: int | None, tokens: int | None) -> tuple[nn.Module, Any, tuple[str, ...]]:
    """Return the model in training mode, a batch, and notes for the user.

    rows: samples of the batch.  tokens: of each sequence; None for images.  Raises UsageError for a model that is not
    known, a configuration that transformers refuses, and lengths that are missing or that the model has no positions
    for.
    """
    library = transformers()
    name, kind, note = choose(library, file.architectures, file.model_type)
    model_class = getattr(library, name)
    config = _config(library, model_class, file)
    size = _lengths(file, kind, config, rows, tokens)
    notes = [note] if note else []
    if not kind.text and getattr(config, "image_size", None) is None:
        notes.append(f"the file has no image_size: images have {PIXELS} x {PIXELS} pixels")
    with torch.device("meta"):
        model = _model(model_class, config, file)
        batch = kind.batch(config, size)
    if kind.batch.__name__ == "_images":
        batch["pixel_values"] = batch["pixel_values"].to(model.dtype)
    return model.train(), batch, (*file.notes, *notes)


def _config(library: Any, model_class: Any, file: ConfigFile) -> Any:
    """Return the configuration of the class.  Raises UsageError with the reason of transformers."""
    family = model_class.config_class
    if file.model_type in library.CONFIG_MAPPING:
        family = library.CONFIG_MAPPING[file.model_type]
    try:
        config = family.from_dict(dict(file.content))
    except Exception as error:  # its checks raise exceptions of many kinds
        raise _refused(file, f"{family.__name__} refuses it", error) from error
    config.use_cache = False  # caches are for generation
    return config


def _model(model_class: Any, config: Any, file: ConfigFile) -> Any:
    """Build the model in the dtype of its file.  Raises UsageError with the reason of transformers."""
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        return model_class(config)
    except Exception as error:  # sizes that do not fit together fail anywhere in the model
        raise _refused(file, f"{model_class.__name__} cannot be built from it", error) from error
    finally:
        torch.set_default_dtype(before)


def _refused(file: ConfigFile, what: str, error: Exception) -> UsageError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return UsageError(f"{file.path}: {what}", why=reason[:500], fix="compare it with the published file")


def _lengths(file: ConfigFile, kind: Kind, config: Any, rows: int | None, tokens: int | None) -> Lengths:
    """Return the lengths of the batch.  Raises UsageError if one is missing or too many."""
    if rows is None:
        raise UsageError(f"{file.path} says nothing about batches", fix="add --rows: the rows of a whole batch")
    if not kind.text:
        if tokens is not None:
            raise UsageError(f"a {kind.name} has no tokens to choose", where=str(file.path), fix="drop --tokens")
        return Lengths(rows)
    if tokens is None:
        raise UsageError(f"{file.path} says nothing about batches", fix="add --tokens: the length of a sequence")
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if isinstance(positions, int) and tokens > positions > 0:
        raise UsageError(
            f"--tokens {tokens} is longer than the model's positions",
            where=f"{file.path}: max_position_embeddings",
            fix=f"use at most --tokens {positions}, or change the file",
        )
    return Lengths(rows, tokens)

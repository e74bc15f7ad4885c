"""Make the model and the batch of a configuration file, on the meta device, as a class of transformers is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autopart.extras.shelf.config_file import ConfigFile
from autopart.extras.shelf.library import transformers
from autopart.ir.errors import UsageError

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Lengths:
    """rows: samples of a batch.  tokens: of each of its sequences, 0 if none are given."""

    rows: int
    tokens: int = 0


def _ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long)


def _text(config: Any, size: Lengths) -> Batch:
    return {"input_ids": _ids(size.rows, size.tokens)}


def _each_token(config: Any, size: Lengths) -> Batch:
    return {**_text(config, size), "labels": _ids(size.rows, size.tokens)}


def _each_row(config: Any, size: Lengths) -> Batch:
    return {**_text(config, size), "labels": _ids(size.rows)}


def _span(config: Any, size: Lengths) -> Batch:
    return {**_text(config, size), "start_positions": _ids(size.rows), "end_positions": _ids(size.rows)}


def _images(config: Any, size: Lengths) -> Batch:
    edges = image_size(config)
    height, width = edges if isinstance(edges, list | tuple) else (edges, edges)
    return {
        "pixel_values": torch.zeros(size.rows, getattr(config, "num_channels", 3), height, width),
        "labels": _ids(size.rows),
    }


PIXELS = 224
"""Edge of an image where the configuration has none, as for most convolutional networks."""


def image_size(config: Any) -> Any:
    """Return the edge of an image in pixels, or (height, width)."""
    return getattr(config, "image_size", None) or PIXELS


@dataclass(frozen=True)
class Kind:
    """What a class is trained for.

    name: in words.  mapping: the table of transformers that lists the classes, by model_type.  batch: makes a batch
    from configuration and lengths on the current device.  text: whether sequences have a length to choose.
    """

    name: str
    mapping: str
    batch: Callable[[Any, Lengths], Batch]
    text: bool = True


KINDS = (
    Kind("encoder-decoder", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", _each_token),
    Kind("masked language model", "MODEL_FOR_MASKED_LM_MAPPING_NAMES", _each_token),
    Kind("causal language model", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", _each_token),
    Kind("image classifier", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", _images, text=False),
    Kind("text classifier", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", _each_row),
    Kind("token classifier", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES", _each_token),
    Kind("question answering", "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES", _span),
)
"""The kinds that can be planned.  A model_type without a class that is known is trained as the first of them."""


def classes(library: ModuleType, kind: Kind) -> Mapping[str, tuple[str, ...]]:
    """Return the names of the classes of a kind, by model_type."""
    table = getattr(library.models.auto.modeling_auto, kind.mapping)
    return {name: (found,) if isinstance(found, str) else tuple(found) for name, found in table.items()}


def choose(library: ModuleType, architectures: tuple[str, ...], model_type: str) -> tuple[str, Kind, str]:
    """Return the class to train, its kind, and a note if it is not the one that the file names.

    The first of the architectures that is trained as one of `KINDS`, else the first kind that the model_type has: the
    file of a model without a head names a class that takes no labels, and old files name classes that are gone.  Raises
    UsageError if there is none.
    """
    tables = [(kind, classes(library, kind)) for kind in KINDS]
    for name in architectures:
        for kind, table in tables:
            if any(name in names for names in table.values()):
                return name, kind, ""
    first = architectures[0] if architectures else ""
    if not first or _is_bare(library, first, model_type):
        for kind, table in tables:
            for name in table.get(model_type, ())[:1]:
                note = f"{first} takes no labels: planned as {name}, as its model_type {model_type!r} is trained"
                return name, kind, note if first else ""
    named = " or ".join(architectures) or f"model_type {model_type!r}"
    known = f"{', '.join(kind.name + 's' for kind in KINDS[:-1])} and {KINDS[-1].name}"
    raise UsageError(
        f"{named} cannot be planned from a configuration file",
        why=f"these can: {known}",
        fix='write a function that returns (model, batch), and pass it as "file.py:function"',
    )


def _is_bare(library: ModuleType, name: str, model_type: str) -> bool:
    """Return whether a class is a family's body without a head, or one that transformers no longer has."""
    bodies = library.models.auto.modeling_auto.MODEL_MAPPING_NAMES.get(model_type, ())
    return name in ((bodies,) if isinstance(bodies, str) else bodies) or not hasattr(library, name)


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

"""Make the model and the batch of a configuration file, on the meta device, as a class of transformers is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autopart.extras.shelf.config_file import ConfigFile
from autopart.extras.shelf.library import transformers
from autopart.ir.errors import UsageError

PIXELS = 224
"""Edge of an image where the configuration has none, as for most convolutional networks."""


@dataclass(frozen=True)
class Kind:
    """What a class is trained for.

    name: in words.  mapping: the table of transformers that lists the classes, by model_type.  labels: names of the
    targets.  each_token: whether these are numbers of each token, else of each row.  text: whether it reads sequences,
    which have a length to choose, else images.
    """

    name: str
    mapping: str
    labels: tuple[str, ...] = ("labels",)
    each_token: bool = True
    text: bool = True

    def batch(self, config: Any, rows: int, tokens: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return a batch of zeros on the current device.  dtype: of images."""
        if self.text:
            inputs = {"input_ids": torch.zeros(rows, tokens, dtype=torch.long)}
        else:
            edges = getattr(config, "image_size", None) or PIXELS
            height, width = edges if isinstance(edges, list | tuple) else (edges, edges)
            pixels = torch.zeros(rows, getattr(config, "num_channels", 3), height, width, dtype=dtype)
            inputs = {"pixel_values": pixels}
        shape = (rows, tokens) if self.each_token else (rows,)
        return inputs | {name: torch.zeros(shape, dtype=torch.long) for name in self.labels}


KINDS = (
    Kind("encoder-decoder", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    Kind("masked language model", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    Kind("causal language model", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    Kind("image classifier", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", each_token=False, text=False),
    Kind("text classifier", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", each_token=False),
    Kind("token classifier", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"),
    Kind(
        "question answering",
        "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
        labels=("start_positions", "end_positions"),
        each_token=False,
    ),
)
"""The kinds that can be planned.  A model_type without a class that is known is trained as the first of them."""


def _several(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def choose(library: ModuleType, architectures: tuple[str, ...], model_type: str) -> tuple[str, Kind, str]:
    """Return the class to train, its kind, and a note if it is not the one that the file names.

    The first of the architectures that is trained as one of `KINDS`, else the first kind that the model_type has: the
    file of a model without a head names a class that takes no labels, and old files name classes that are gone.  Raises
    UsageError if there is none.
    """
    auto = library.models.auto.modeling_auto
    tables = [(kind, {key: _several(found) for key, found in getattr(auto, kind.mapping).items()}) for kind in KINDS]
    for name in architectures:
        for kind, table in tables:
            if any(name in names for names in table.values()):
                return name, kind, ""
    first = architectures[0] if architectures else ""
    bodies = _several(auto.MODEL_MAPPING_NAMES.get(model_type, ()))
    if not first or first in bodies or not hasattr(library, first):
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
    rows, tokens = _lengths(file, kind, config, rows, tokens)
    notes = [note] if note else []
    if not kind.text and getattr(config, "image_size", None) is None:
        notes.append(f"the file has no image_size: images have {PIXELS} x {PIXELS} pixels")
    with torch.device("meta"):
        model = _model(model_class, config, file)
        batch = _batch(kind, config, (rows, tokens), model.dtype, file)
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


def _batch(kind: Kind, config: Any, lengths: tuple[int, int], dtype: torch.dtype, file: ConfigFile) -> Any:
    """Return the batch.  Raises UsageError for sizes of images that are none: not every class checks them."""
    try:
        return kind.batch(config, *lengths, dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _refused(file, "no batch can be made of its image_size and num_channels", error) from error


def _refused(file: ConfigFile, what: str, error: Exception) -> UsageError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return UsageError(f"{file.path}: {what}", why=reason[:500], fix="compare it with the published file")


def _lengths(file: ConfigFile, kind: Kind, config: Any, rows: int | None, tokens: int | None) -> tuple[int, int]:
    """Return the rows of the batch, and the tokens of a sequence, 0 for images.

    Raises UsageError if one is missing or too many."""
    if rows is None:
        raise UsageError(f"{file.path} says nothing about batches", fix="add --rows: the rows of a whole batch")
    if not kind.text:
        if tokens is not None:
            raise UsageError(f"a {kind.name} has no tokens to choose", where=str(file.path), fix="drop --tokens")
        return rows, 0
    if tokens is None:
        raise UsageError(f"{file.path} says nothing about batches", fix="add --tokens: the length of a sequence")
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if isinstance(positions, int) and tokens > positions > 0:
        raise UsageError(
            f"--tokens {tokens} is longer than the model's positions",
            where=f"{file.path}: max_position_embeddings",
            fix=f"use at most --tokens {positions}, or change the file",
        )
    return rows, tokens

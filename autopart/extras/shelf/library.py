"""The library that the models on the shelf come from."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

from autopart.ir.errors import UsageError


def transformers() -> ModuleType:
    """Return the transformers library, offline and quiet.  Raises UsageError if it is not installed."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        library = importlib.import_module("transformers")
    except ImportError as error:
        raise UsageError(
            "this model needs the transformers library", why=str(error), fix='pip install "autopart[hf]"'
        ) from error
    library.logging.set_verbosity_error()
    return library

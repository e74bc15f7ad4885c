"""Makes docs/pipe.md out of the docstrings of `autopart.Pipe`: `python tests/support/documents/pipe_page.py`.

A row has the name with its parameters and the first paragraph of the docstring. Names that all ranks have to call are
those that the ranks agree on.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import autopart
from autopart.session.ranks.call_sync import NAMES

PAGE = Path(__file__).parents[3] / "docs/pipe.md"
_PAGES = {
    "asynchronous_training": ("train", "flush"),
    "checkpoints": ("save", "load"),
    "data": ("data_rows", "data_shard", "sampler"),
    "evaluation": ("eval_loss", "predict"),
    "freezing": ("adopt", "replan"),
    "metrics": ("metrics", "skipped"),
    "precision": ("scaler",),
    "report": ("report", "timeline", "traced"),
    "running": ("stop_requested", "stragglers"),
    "state": ("full_parameters", "load_state_dict", "save_pretrained", "state_dict", "sync_model"),
    "training_loop": ("clip_grad_norm_", "step"),
}
"""The names that a page shows in use."""
_TEXT = """# Pipe

{doc}

A pipe is not a module: it cannot be called, moved, copied or saved. Attributes of other wrappers (`module`, `no_sync`,
`to`) raise an error that names the replacement. Intentional errors show your line without the internal
frames, which `logging.getLogger("autopart")` has at level DEBUG. `help(autopart.Pipe)` has the whole docstrings, from
which `python tests/support/documents/pipe_page.py` makes this page.

## Calls that all ranks make, in the same order

If ranks make different calls, each raises an error that names both. `train` with a bool is no such call.

{collective}

## Calls and facts of one rank

{alone}
"""


def public() -> list[str]:
    """Return the public names of a pipe."""
    return sorted(name for name in dir(autopart.Pipe) if not name.startswith("_"))


def page() -> str:
    """Return the text of the page."""
    collective = [name for name in public() if name in NAMES]
    alone = [name for name in public() if name not in NAMES]
    doc = inspect.getdoc(autopart.Pipe) or ""
    return _TEXT.format(doc=doc, collective=_table(collective), alone=_table(alone))


def _table(names: list[str]) -> str:
    return "\n".join(["| name | what it does |", "|---|---|", *map(_row, names)])


def _row(name: str) -> str:
    found = inspect.getattr_static(autopart.Pipe, name)
    link = "".join(f" ([more]({page}.md))" for page, names in _PAGES.items() if name in names)
    return f"| `{name}{'' if isinstance(found, property) else _parameters(found)}` | {_first(found)}{link} |"


def _parameters(function: object) -> str:
    """Return the parameters of a method with their defaults, without types."""
    _, *shown = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    texts = [str(p.replace(annotation=p.empty)) for p in shown]
    return f"({', '.join(texts)})"


def _first(documented: object) -> str:
    """Return the first paragraph of a docstring on one line, safe inside a table."""
    text = (inspect.getdoc(documented) or "").split("\n\n")[0]
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())

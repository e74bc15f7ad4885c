"""Start the command line, with no more than a command needs: planner and runtime take seconds to load.

Exit codes: 0 success; 1 a check failed, or something failed while ranks ran; 2 the request cannot be met (a bad
argument, a model that is refused, a plan that does not fit).  An AutopartError prints its message on stderr, with a
traceback only under --traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from autopart.cli.output import prints_results
from autopart.ir.errors import AutopartError, RunError

TRACEBACK = "--traceback"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; always raises SystemExit."""
    words = list(sys.argv[1:] if argv is None else argv)
    rest = [word for word in words if word != TRACEBACK]
    try:
        _app(rest)(args=rest, prog_name="autopart")
    except AutopartError as error:
        if TRACEBACK in words:
            raise
        print(f"autopart: {error}" if prints_results() else f"rank {os.environ['RANK']}: {error.what}", file=sys.stderr)
        sys.exit(1 if isinstance(error, RunError) else 2)


def _app(words: Sequence[str]) -> typer.Typer:
    """Return the commands that these words choose from."""
    if words[:1] == ["checkpoint"]:
        from autopart.cli.checkpoints import app as checkpoint_app

        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        alone.add_typer(checkpoint_app)
        return alone
    from autopart.cli.main import app

    return app

"""Commands that refuse an option of one value that is given twice, of which the parser would silently take the last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperOption

from autopart.ir.errors import UsageError


class OnceCommand(TyperCommand):
    """A command that raises UsageError for an option that is given again and is no list."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as typer does, after counting the options."""
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        given = [each for each in order if isinstance(each, TyperOption) and not (each.multiple or each.is_flag)]
        for place, option in enumerate(given):
            if option in given[:place]:
                flag = max(option.opts, key=len)
                raise UsageError(f"{flag} is given twice", why="it has one value", fix=f"write {flag} once")
        return super().parse_args(ctx, args)


class Commands(typer.Typer):
    """A list of such commands."""

    def command(self, *args: Any, **options: Any) -> Callable[..., Any]:
        """Add a command, as in typer."""
        return super().command(*args, **{"cls": OnceCommand, **options})

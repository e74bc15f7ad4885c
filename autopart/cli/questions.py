"""Several plans of one model on a command line: of several clusters (--compare), or of several wishes (--what-if)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from autopart import api
from autopart.cli.flags import wished
from autopart.cli.model_loader import Subject
from autopart.cli.output import Progress, print_json, say
from autopart.ir.errors import UsageError
from autopart.options import Options, read_options
from autopart.report.comparison import Answer, comparison_facts, comparison_table

Compare = Annotated[
    str | None,
    typer.Option("--compare", metavar="CLUSTER,CLUSTER,...", help="Plan for each cluster, and print a line each"),
]
WhatIf = Annotated[
    list[str] | None,
    typer.Option(
        "--what-if",
        metavar="OPTION=VALUE ...",
        help="Print what the plan with these options would take beside the chosen one; repeat for others",
    ),
]
MoreWords = Annotated[list[str] | None, typer.Argument(metavar="OPTION=VALUE", hidden=True)]
"""The words after --what-if stages=4."""


def require_no_words(
    words: list[str] | None, compare: str | None, what_if: list[str] | None, out: Path | None, trace: Path | None
) -> None:
    """Raise UsageError for words that belong to nothing, and flags that do not go together."""
    if words and not (what_if and len(what_if) == 1):
        fix = 'put them in quotes: --what-if "stages=4 replicas=2"' if what_if else "drop them"
        raise UsageError(f"{' '.join(words)!r} belongs to no option", fix=fix)
    if compare is not None and what_if:
        raise UsageError("both --compare and --what-if are given", fix="ask one after the other")
    for name, given in (("--out", out), ("--trace", trace)):
        if given is not None and (compare is not None or what_if):
            raise UsageError(
                f"{name} writes one plan, and several are made", fix=f"drop {name}, or plan with the options alone"
            )


def compare_clusters(subject: Subject, clusters: str, options: Options, *, as_json: bool) -> None:
    """Print a line for the plan on each of the clusters.  Raises the first error if there is no plan on any."""
    names = [name.strip() for name in clusters.split(",") if name.strip()]
    if not names:
        raise UsageError("--compare names no cluster", fix="--compare h100x8:4,h100x8:8")
    _print(_answers(subject, [(name, name, options) for name in dict.fromkeys(names)]), "cluster", as_json)


def compare_wishes(subject: Subject, cluster: str, flags: dict[str, Any], wishes: list[str], *, as_json: bool) -> None:
    """Print a line for the chosen plan and one for each wish, whose options are added to the flags.

    wishes: texts such as "stages=4 replicas=2"; words of their own belong to a single first one.
    """
    texts = [" ".join(wishes)] if any("=" in word and " " not in word for word in wishes[1:]) else wishes
    asked = [("chosen", flags), *((text, {**flags, **wished(text.split())}) for text in texts)]
    questions = [
        (name, cluster, read_options(loss_fn=subject.loss_fn, watch=Progress(), **options)) for name, options in asked
    ]
    _print(_answers(subject, questions), "what if", as_json)


def _answers(subject: Subject, questions: Iterable[tuple[str, str, Options]]) -> list[Answer]:
    found = list(api.answered(subject.model, subject.batch, questions))
    if all(answer.refused is not None for answer in found):
        raise found[0].refused or UsageError("nothing was asked")
    return found


def _print(answers: list[Answer], column: str, as_json: bool) -> None:
    if as_json:
        print_json(comparison_facts(answers))
    else:
        say(comparison_table(answers, column), nl=False)

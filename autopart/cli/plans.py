"""The commands that run in this process alone: plan, explain, report, schedule, diff.

`plan` also makes several plans of one model: of several clusters (--compare), or of several wishes (--what-if)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from autopart import api
from autopart.batch.batch import flatten
from autopart.cli.flags import ClusterName, ModelName, Rows, Seed, Tokens, TraceFile, takes_option_flags, wished
from autopart.cli.model_loader import Subject, load_model
from autopart.cli.output import Json, Progress, print_json, say
from autopart.extras.export.formats import FORMATS, exported
from autopart.extras.export.hand import hand_options
from autopart.files.plans import load_plan, save_plan
from autopart.files.schedule_csv import save_schedule_csv
from autopart.files.traces import load_trace
from autopart.ir.errors import UsageError
from autopart.ir.graph import Graph
from autopart.ir.plan import Plan
from autopart.ir.timeline import Timeline
from autopart.options import Options, read_options
from autopart.passes.program.schedules import find
from autopart.planning.schedule_files import schedule_text
from autopart.report.comparison import Answer, comparison_facts, comparison_table
from autopart.report.page.page import write_page
from autopart.report.plan_diff import diff_plans
from autopart.report.plan_table import plan_facts, stage_table, terminal_width
from autopart.report.traces import save_trace, timeline_text

PlanPath = Annotated[Path, typer.Argument(help="A plan file")]
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
Export = Annotated[
    str | None, typer.Option("--export", metavar="|".join(FORMATS), help="Print the plan in another trainer's words")
]
Hand = Annotated[
    str | None,
    typer.Option(
        "--hand",
        metavar="layout=Et*6|t*6L,dp=2,...",
        help="Print what this plan in Megatron's words would take beside the chosen one: layout or pp, tp, vpp, dp, "
        "mbs, recompute",
    ),
]
MoreWords = Annotated[list[str] | None, typer.Argument(metavar="OPTION=VALUE", hidden=True)]
"""The words after --what-if stages=4."""


@takes_option_flags
def plan(
    model: ModelName,
    flags: dict[str, Any],
    words: MoreWords = None,
    cluster: ClusterName = "cpu:2",
    rows: Rows = None,
    tokens: Tokens = None,
    compare: Compare = None,
    what_if: WhatIf = None,
    export: Export = None,
    hand: Hand = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan here, as JSON")] = None,
    trace: TraceFile = None,
    as_json: Json = False,
) -> None:
    """Plan a model without running it: print the stage table and the alternatives.

    The plan is written to --out.  With --json the table is printed as JSON.  With --compare or --what-if there is a
    line for each plan instead.
    """
    several = {"--compare": compare, "--what-if": what_if, "--hand": hand}
    _require_no_words(words, several, {"--out": out, "--trace": trace, "--export": export})
    if as_json and export is not None:
        raise UsageError("both --json and --export are given", fix="ask one after the other")
    subject = _loaded(model, flags, rows, tokens)
    options = read_options(loss_fn=subject.loss_fn, watch=Progress(), **flags)
    if compare is not None:
        return _compare_clusters(subject, compare, options, as_json=as_json)
    if what_if is not None:
        wishes = [" ".join([*what_if, *words])] if words else what_if
        wanted = [(text, {**flags, **wished(text.split())}) for text in wishes]
        return _compare(subject, cluster, [("chosen", flags), *wanted], as_json=as_json)
    if hand is not None:
        asked = hand_options(hand, subject.model, flatten(subject.batch).rows or 1)
        return _compare(subject, cluster, [("chosen", flags), ("by hand", flags | asked)], as_json=as_json)
    made, graph, step = _planned(subject, cluster, options, simulate=trace is not None)
    if out is not None:
        save_plan(made, out)  # first: another trainer may have no words for it
    if as_json:
        print_json(plan_facts(made, graph))
    else:
        say(stage_table(made, graph) if export is None else exported(made, graph, export))
    if out is not None:
        say(f"plan written to {out}", err=as_json)
    elif not as_json:
        say("--out plan.json writes the plan to a file", err=True)
    _write_trace(step, made, trace)


def explain(
    plan: PlanPath,
    model: Annotated[
        str | None, typer.Option(help="The model of the plan, by name: adds module paths and parameter counts")
    ] = None,
    cluster: Annotated[str | None, typer.Option(help="The cluster of the plan, as in `plan`; needs --trace")] = None,
    optimizer: Annotated[str | None, typer.Option(help="As in `plan`; needs --trace")] = None,
    rows: Rows = None,
    tokens: Tokens = None,
    trace: TraceFile = None,
    as_json: Json = False,
    seed: Seed = 0,
) -> None:
    """Print the stage table of a plan file.  --model adds module paths; --trace writes the simulated step."""
    _require_model(model, {"--trace": trace, "--cluster": cluster, "--optimizer": optimizer}, rows, tokens)
    found = load_plan(plan)
    graph, step = None, None
    if model is not None:
        subject = _loaded(model, {"seed": seed}, rows, tokens)
        options = read_options(plan=found, loss_fn=subject.loss_fn, optimizer=optimizer)
        machines = cluster or f"cpu:{found.decision.world}"
        _, graph, step = _planned(subject, machines, options, simulate=trace is not None)
    if as_json:
        print_json(plan_facts(found, graph))
    else:
        say(stage_table(found, graph))
    _write_trace(step, found, trace)


def report(
    plan: PlanPath,
    out: Annotated[Path | None, typer.Option(help="Write it here; without it beside the plan, as .html")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="A measured step, written by save_trace as .json, to show beside it")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model of the plan, by name: adds its size, tokens a second and MFU")
    ] = None,
    cluster: Annotated[str | None, typer.Option(help="The cluster of the plan, as in `plan`; needs --model")] = None,
    rows: Rows = None,
    tokens: Tokens = None,
    seed: Seed = 0,
) -> None:
    """Write a plan file as one HTML page: stages, the simulated step and what limits it, memory, other plans."""
    _require_model(model, {"--cluster": cluster}, rows, tokens)
    found, answer = load_plan(plan), None
    if model is not None:
        subject = _loaded(model, {"seed": seed}, rows, tokens)
        options = read_options(plan=found, loss_fn=subject.loss_fn)
        machines = cluster or f"cpu:{found.decision.world}"
        answer = replace(_answers(subject, [(model, machines, options)])[0], plan=found)
    measured = load_trace(trace) if trace is not None else None
    target, title = out or plan.with_suffix(".html"), f"autopart: {plan.stem}"
    say(f"report written to {write_page(found, target, measured=measured, answer=answer, title=title)}")


def schedule(
    plan: PlanPath,
    csv: Annotated[Path | None, typer.Option(help="Write it here; without it the lines go to stdout")] = None,
    messages: Annotated[bool, typer.Option("--messages", help="Write sends and receives too")] = False,
) -> None:
    """Write the schedule of a plan file as CSV that torch.distributed.pipelining loads: a line for each rank."""
    text = schedule_text(load_plan(plan), messages=messages)
    if csv is None:
        say(text, nl=False)
    else:
        save_schedule_csv(text, csv)
        say(f"schedule written to {csv}", err=True)


def diff(before: PlanPath, after: Annotated[Path, typer.Argument(help="Another one")]) -> None:
    """Print what changes from one plan file to another.  Exit code 1 when they differ."""
    old, new = load_plan(before), load_plan(after)
    say(diff_plans(old, new))
    raise typer.Exit(0 if old == new else 1)


def _loaded(model: str, flags: dict[str, Any], rows: int | None, tokens: int | None) -> Subject:
    """Build the model, and print what there is to say about it."""
    subject = load_model(model, flags.get("seed", 0), rows, tokens)
    for note in subject.notes:
        say(f"note: {note}", err=True)
    return subject


def _require_model(model: str | None, others: Mapping[str, object], rows: int | None, tokens: int | None) -> None:
    """Raise UsageError for flags that say nothing without a model.  others: besides its batch, and their values."""
    given = [name for name, value in {**others, "--rows": rows, "--tokens": tokens}.items() if value is not None]
    if model is None and given:
        why = "a plan file has the names of ops only"
        raise UsageError(f"{given[0]} needs the model", why=why, fix="add --model")


def _planned(
    subject: Subject, cluster: str, options: Options, *, simulate: bool
) -> tuple[Plan, Graph, Timeline | None]:
    if simulate:
        return api.simulated(subject.model, cluster, subject.batch, options)
    return *api.planned(subject.model, cluster, subject.batch, options), None


def _write_trace(step: Timeline | None, plan: Plan, path: Path | None) -> None:
    """Write the simulated step, and note when its time differs from the time in the plan."""
    if step is None or path is None:
        return
    if str(path) == "-":
        ranks = len(f"rank {plan.decision.world} ||")
        say(timeline_text(step, max(20, terminal_width() - ranks)), nl=False)
        return
    save_trace(step, path, name="simulated")
    say(f"simulated step written to {path}", err=True)
    if step.step_ns != plan.step_ns and find(plan.schedule).synchronous:
        here, said = (f"{ns / 1e6:.2f} ms" for ns in (step.step_ns, plan.step_ns))
        reason = "it was made for another cluster, optimizer or costs"
        say(f"note: this step takes {here}, the plan says {said}: {reason}", err=True)


# ---- several plans --------------------------------------------------------------------------------------------------


def _require_no_words(
    words: list[str] | None, several: Mapping[str, str | list[str] | None], of_one: Mapping[str, object]
) -> None:
    """Raise UsageError for words that belong to nothing, and flags that do not go together.  several: flags that make
    several plans, of_one: those that write one plan, and their values."""
    what_if = several["--what-if"]
    if words and not (what_if and len(what_if) == 1):
        fix = 'put them in quotes: --what-if "stages=4 replicas=2"' if what_if else "drop them"
        raise UsageError(f"{' '.join(words)!r} belongs to no option", fix=fix)
    asked = [name for name, given in several.items() if given is not None]
    if len(asked) > 1:
        raise UsageError(f"both {asked[0]} and {asked[1]} are given", fix="ask one after the other")
    for name, given in of_one.items():
        if given is not None and asked:
            raise UsageError(
                f"{name} writes one plan, and several are made", fix=f"drop {name}, or plan with the options alone"
            )


def _compare_clusters(subject: Subject, clusters: str, options: Options, *, as_json: bool) -> None:
    """Print a line for the plan on each of the clusters.  Raises the first error if there is no plan on any."""
    names = [name.strip() for name in clusters.split(",") if name.strip()]
    if not names:
        raise UsageError("--compare names no cluster", fix="--compare h100x8:4,h100x8:8")
    _print_answers(_answers(subject, [(name, name, options) for name in dict.fromkeys(names)]), "cluster", as_json)


def _compare(subject: Subject, cluster: str, asked: list[tuple[str, dict[str, Any]]], *, as_json: bool) -> None:
    """Print a line for the plan under each of these flags, by name."""
    questions = [
        (name, cluster, read_options(loss_fn=subject.loss_fn, watch=Progress(), **options)) for name, options in asked
    ]
    _print_answers(_answers(subject, questions), "what if", as_json)


def _answers(subject: Subject, questions: Iterable[tuple[str, str, Options]]) -> list[Answer]:
    found = list(api.answered(subject.model, subject.batch, questions))
    if all(answer.refused is not None for answer in found):
        raise found[0].refused or UsageError("nothing was asked")
    return found


def _print_answers(answers: list[Answer], column: str, as_json: bool) -> None:
    if as_json:
        print_json(comparison_facts(answers))
    else:
        say(comparison_table(answers, column), nl=False)

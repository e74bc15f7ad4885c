"""Files that were made to hang, to take all memory or to write on the terminal are refused, soon, with the place."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from support.languages.bounded import SECONDS, bounded
from support.languages.plans import example

from autopart.cli.main import main
from autopart.files.clusters import parse_cluster
from autopart.files.limits import MAX_BYTES, MAX_DEPTH
from autopart.files.plans import load_plan, plan_from_json, plan_to_json, save_plan
from autopart.ir.errors import AutopartError, ClusterError
from autopart.ir.plan import Alternative, Optimality, Outlook, Plan, Provenance, Stage
from autopart.report.plan_diff import diff_plans
from autopart.report.plan_table import stage_table


def merges(count: int, what: str) -> str:
    """YAML that stands for 10^count values."""
    lines = ["a0: &a0 {k: 1}" if "<<" in what else "a0: &a0 [1, 1]"]
    names = [f"a{i}" for i in range(count)]
    for before, name in pairwise(names):
        lines.append(f"{name}: &{name} " + what.format(", ".join([f"*{before}"] * 10)))
    return "\n".join(lines)


LEVELS = ",".join(['{"size": 1, "latency_us": 1, "bandwidth": 1}'] * 20_000)
CLUSTERS = {
    "hex of 2 MB": ("yaml", "devices: 0x" + "f" * 2_000_000, "too large"),
    "hex": ("yaml", "devices: 0x" + "f" * 100_000, "too many digits"),
    "hex in TOML": ("toml", "devices = 0x" + "f" * 100_000, "63 bits are read"),
    "base 60": ("yaml", "devices: 1" + ":1" * 50_000, "too many digits"),
    "digits": ("json", '{"devices": 1' + "0" * 400 + "}", "where: devices"),
    "merges": ("yaml", merges(12, "{{<<: [{}]}}"), "aliases spelled out"),
    "aliases": ("yaml", merges(12, "[{}]"), "aliases spelled out"),
    "an alias in itself": ("yaml", "devices: &a [*a]", "inside of what it stands for"),
    "a merge of itself": ("yaml", "&a {<<: *a}", "inside of what it stands for"),
    "60 000 keys": ("json", json.dumps(dict.fromkeys(map(str, range(60_000)), 1))[:-1] + ',"7": 1}', "key '7' appears"),
    "7 000 keys": ("yaml", "".join(f"k{i}: 1\n" for i in range(7_000)) + "k5: 1\n", "line 7001, column 1"),
    "20 000 keys": ("yaml", "".join(f"k{i}: 1\n" for i in range(20_000)), "too large"),
    "20 000 levels": ("json", '{"devices": [{"kind": "cpu"}], "levels": [' + LEVELS + "]}", "at most 16 items"),
    "deep": ("yaml", "[" * 100_000, "more than 32 deep"),
    "deep blocks": ("yaml", "- " * 60_000, "more than 32 deep"),
    "deep JSON": ("json", "[" * 10**5, "more than 32 deep"),
    "deep closed JSON": ("json", "[" * 10**5 + "]" * 10**5, "more than 32 deep"),
    "deep TOML": ("toml", "a = " + "[" * 100_000, "not valid TOML"),
    "a long key": ("toml", ".".join("a" * 60_000) + " = 1", "more dots than"),
    "empty lists": ("json", "[" + "[]," * 250_000 + "[]]", "more values"),
    "quotes": ("json", '"' * 2_000_000, "not valid JSON"),
    "huge": ("json", " " * (MAX_BYTES + 1), "too large"),
    "not finite": ("json", '{"devices": [{"kind": "cpu", "flops": NaN}]}', "where: devices[0].flops"),
    "infinite": ("yaml", "devices: [{kind: cpu, flops: .inf}]", "where: devices[0].flops"),
    "a tag": ("yaml", "devices: !!python/object/apply:os.getpid []", "tags such as"),
    "a bad tag": ("yaml", "devices: !!int x", "tags such as"),
    "a date with a zone": ("yaml", "devices: 0001-01-01 00:00:00 +23:59", "must be a valid list"),
    "keys that are none": ("yaml", "? [a]\n: 1", "keys must be texts"),
    "many rates": ("json", json.dumps({"devices": [{"kind": "cpu", "flops": dict.fromkeys(map(str, range(999)), 1)}]}),
                   "at most 64"),
    "wrong 60 001 times": ("json", '{"devices": [' + "0," * 60_000 + "0]}", "60001 values are wrong"),
}  # fmt: skip


def refusal(read: Callable[[], object]) -> str:
    """The message of our own error; it can be printed as it stands."""
    try:
        read()
    except AutopartError as error:
        assert all(line.isprintable() for line in str(error).splitlines())
        assert len(str(error)) < 4000
        return str(error)
    return "accepted"


def test_a_cluster_file_that_would_hang_or_swell_is_refused_soon(tmp_path: Path) -> None:
    works = []
    for name, (ending, text, _) in CLUSTERS.items():
        path = tmp_path / f"{name}.{ending}"
        path.write_text(text)
        works.append(partial(refusal, partial(parse_cluster, path)))
    found = bounded(works)
    for (name, (_, _, says)), (said, seconds) in zip(CLUSTERS.items(), found, strict=True):
        assert said.startswith(("/", "cluster")) and says in said, (name, said)
        assert seconds < SECONDS, (name, seconds)


def decision(*, world: str = "2", ranks: str = "0", rows: str = "1", ops: str = '"a"') -> str:
    stage = f'{{"ops": [{ops}], "ranks": [{ranks}]}}'
    head = '"version": 4, "provenance": {"graph_digest": "g", "structure_digest": "s", "torch_version": "2"}'
    body = f'"world": {world}, "stages": [{stage}], "micro_rows": [{rows}], "schedule": "1f1b"'
    return f'{{{head}, "decision": {{{body}}}}}'


PLANS = {
    "400 digits": (decision(world="1" + "0" * 400), "where: decision.world"),
    "64 bits": (decision(world=str(2**63)), "63 bits are read"),
    "ranks for ever": (decision(world=str(2**62)), "at most 131072 ranks"),
    "rows for ever": (decision(rows=str(2**40)), "at most 2147483647 rows"),
    "one rank 65 536 times": (decision(ranks=",".join("0" * 65_536)), "rank 0 appears twice"),
    "one op 100 000 times": (decision(ops=",".join(['"a"'] * 100_000)), "appears twice"),
    "fractions": (decision(ranks=",".join(["0.5"] * 100_000)), "100000 values are wrong"),
    "unknown keys": ('{"version": 4,' + ",".join(f'"k{i}": 1' for i in range(50_000)) + "}", "50002 values are wrong"),
    "wrong at the end": (decision(ops='"a",' * 5000 + ",".join("1" * 5000)), "and 4980 more"),
    "deep": ('{"version": 4, "decision": ' + "[" * 10**5, "more than 32 deep"),
    "an escape in a key": ('{"version": 4, "\\u001b]0;gone\\u0007": 1}', "\\x1b]0;gone\\x07: unknown key"),
    "a long key": ('{"version": 4, "' + "k" * 10**6 + '": 1}', "kkk...: unknown key"),
    "an escape as version": ('{"version": "\\u001b[2J"}', "version '\\x1b[2J'"),
    "an escape in an op": (decision(ops='"\\u001b[2J", "\\u001b[2J"'), "op \\x1b[2J appears twice"),
    "a key twice": (decision()[:-1] + ', "decision": {}}', "key 'decision' appears twice"),
    "a key twice inside": (decision().replace('"world"', '"world": 1, "world"'), "where: decision\n"),
}


def test_a_plan_file_that_would_hang_or_swell_is_refused_soon() -> None:
    found = bounded([partial(refusal, partial(plan_from_json, text, "p.json")) for text, _ in PLANS.values()])
    for (name, (_, says)), (said, seconds) in zip(PLANS.items(), found, strict=True):
        assert said.startswith("p.json ") and says in said, (name, said)
        assert "fix: " in said, said
        assert seconds < SECONDS, (name, seconds)


@pytest.fixture
def places(tmp_path: Path) -> Iterator[dict[str, Path]]:
    """What may stand where a file is expected, by name; all end in .yaml or .json."""
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    (tmp_path / "nowhere.yaml").symlink_to("none")
    (tmp_path / "file").write_text("")
    yield {path.stem: path for path in tmp_path.glob("*.yaml")} | {
        "below a file": tmp_path / "file" / "a.yaml",
        "a long name": tmp_path / ("a" * 300 + ".yaml"),
        "no name": tmp_path / "a\0.yaml",
        "an escape": tmp_path / "\x1b[2J.yaml",
        "no text": tmp_path / "\udc80.yaml",
    }


def test_what_is_no_regular_file_is_not_waited_for(places: dict[str, Path]) -> None:
    reads = [partial(read, path) for path in places.values() for read in (parse_cluster, load_plan)]
    found = bounded([partial(refusal, read) for read in reads], patience_s=10)
    assert len(found) == 2 * len(places)
    for read, (said, seconds) in zip(reads, found, strict=True):
        assert "cannot be read" in said, (read, said)
        assert seconds < SECONDS


ESCAPE = "\x1b[2J\x1b]0;gone\x07\u202e"


def hostile() -> Plan:
    """A valid plan, each text of which would clear the terminal, and whose numbers are the largest."""
    made = example()
    most = 2**63 - 1
    stages = tuple(Stage(tuple(ESCAPE + name for name in s.ops), s.ranks) for s in made.stages)
    estimate = type(made.estimates[0])(*[most] * 16)
    others = (Alternative(ESCAPE, most, ESCAPE),)
    report = Outlook(most, 1.0, (estimate,) * 2, (ESCAPE,), Optimality(most, most, 1.0, False), others)
    decided = type(made.decision)(2, stages, (2**31 - 1,), ESCAPE)
    return Plan(Provenance(ESCAPE, ESCAPE, ESCAPE, ESCAPE), decided, report)


def test_nothing_that_a_plan_says_reaches_the_terminal_raw() -> None:
    plan = plan_from_json(plan_to_json(hostile()))
    assert plan == hostile()
    for text in (plan.explain(), stage_table(plan), stage_table(plan, width=30), diff_plans(example(), plan)):
        assert all(line.isprintable() for line in text.splitlines()), text
        assert "\\x1b[2J" in text


def test_the_command_line_prints_what_files_say_with_escapes_spelled_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    names = [str(tmp_path / name) for name in ("hostile.json", "plain.json", "broken.json", "pipe.json")]
    save_plan(hostile(), names[0])
    save_plan(example(), names[1])
    Path(names[2]).write_text('{"version": 4, "\\u001b[2J": "\\ud800"}')
    os.mkfifo(names[3])
    for words, code in (
        (["explain", names[0]], 0), (["explain", names[0], "--json"], 0), (["diff", names[1], names[0]], 1),
        (["explain", names[2]], 2), (["explain", names[3]], 2), (["diff", names[0], "/dev/zero"], 2),
        (["cluster", "show", names[2]], 2), (["cluster", "show", names[3]], 2),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as end:
            main(words)
        printed = capsys.readouterr()
        assert (end.value.code or 0) == code, (words, printed)
        for line in (printed.out + printed.err).splitlines():
            assert line.isprintable(), (words, line)


def test_an_error_is_printed_with_its_escapes_spelled_out() -> None:
    error = AutopartError(ESCAPE, where=ESCAPE, why="two\nlines\t" + ESCAPE, fix="\ud800")
    assert "\\x1b[2J\\x1b]0;gone\\x07\\u202e" in error.what and error.fix == "\\ud800"
    assert error.why.startswith("two\nlines\t")
    str(error).encode()


def test_depth_is_counted_alike_in_every_language(tmp_path: Path) -> None:
    for ending, text in (("json", '{"a": %s}'), ("yaml", "a: %s"), ("toml", "a = %s")):
        for depth, says in ((MAX_DEPTH - 2, "describes no cluster"), (MAX_DEPTH + 1, "is not valid")):
            (tmp_path / f"c.{ending}").write_text(text % ("[" * depth + "]" * depth))
            with pytest.raises(ClusterError, match=says):
                parse_cluster(tmp_path / f"c.{ending}")


@pytest.mark.slow
def test_a_plan_of_a_hundred_thousand_ops_is_read() -> None:
    names = ",".join(f'"op_{i}"' for i in range(100_000))
    again = ",".join(f'["op_{i}"]' for i in range(100_000))
    plan = plan_from_json(decision(ops=names).replace('"ranks"', f'"recompute": [{again}], "ranks"'))
    assert len(plan.stages[0].recompute) == 100_000


def test_a_pickle_in_place_of_a_plan_or_a_cluster_is_never_run(tmp_path: Path) -> None:
    class Touch:
        def __reduce__(self) -> object:
            return os.mkdir, (str(tmp_path / "run"),)

    path = tmp_path / "file.json"
    path.write_bytes(pickle.dumps(Touch()))
    assert refusal(partial(load_plan, path)) != "accepted" and refusal(partial(parse_cluster, path)) != "accepted"
    assert not (tmp_path / "run").exists()

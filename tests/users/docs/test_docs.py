"""The README and docs show what commands print and quote code as it is."""

from __future__ import annotations

import ast
import difflib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.documents.docs import (
    DOCUMENTS,
    MEASURED,
    ROOT,
    Block,
    blocks,
    headings,
    measured,
    printed,
    shape,
    write_files,
)
from support.workers import Workers

from autopart.files.clusters import parse_cluster

BLOCKS = [block for document in DOCUMENTS for block in blocks(document)]
CONSOLES = [block for block in BLOCKS if block.language == "console"]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.md"))]


QUOTES = [
    (document.name, path, text)
    for document in DOCUMENTS
    for path, text in re.findall(
        r"`([\w/]+/\w+\.py)`:\n+```python\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL
    )
]
"""(document, path, code) of the code that documents quote from files."""
QUOTED = {text for _, _, text in QUOTES}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, pair: Workers) -> dict[str, list[str]]:
    """Return the output of every command in the documents, each run once, in order, in one folder.

    Ranks that a command launches are forked from where those of the pool come from, which has imported all.
    """
    pair.run(int)
    folder = tmp_path_factory.mktemp("documents")
    write_files(folder)
    found: dict[str, list[str]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in ("RANK", "WORLD_SIZE"):
            patch.delenv(name, raising=False)
        for block in CONSOLES:
            for command, _ in block.answers():
                if command not in found:
                    found[command] = printed(command)
    return found


@pytest.mark.parametrize("block", CONSOLES, ids=lambda block: f"{block.document}: {block.text.splitlines()[0]}")
def test_a_command_prints_what_is_shown(block: Block, answers: dict[str, list[str]]) -> None:
    for command, shown in block.answers():
        found = answers[command]
        if block.varies:
            assert [shape(line) for line in found] == [shape(line) for line in shown], command
        else:
            assert found == shown, (
                f"{command}: run `python tests/support/documents/docs.py` if the documents are outdated"
            )


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_every_block_has_a_known_language(document: Path) -> None:
    fences = re.findall(r"^```(.*)$", document.read_text(), re.MULTILINE)
    assert set(fences[::2]) <= {"python", "yaml", "json", "bash", "console", "console varies", "text", "diff"} and set(
        fences[1::2]
    ) <= {""}
    for block in blocks(document):
        if block.language == "python" and block.text not in QUOTED:
            ast.parse(block.text)


def test_clusters_in_the_documents_can_be_read(tmp_path: Path) -> None:
    for number, block in enumerate(block for block in BLOCKS if block.language == "yaml"):
        path = tmp_path / f"{number}.yaml"
        path.write_text(block.text)
        assert parse_cluster(path).world > 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_a_target(page: Path) -> None:
    for target, place in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        if "://" in target:
            continue
        linked = (page.parent / target).resolve() if target else page
        assert linked.exists(), target
        if place:
            assert place in headings(linked), f"{target}#{place}"


def test_pages_are_short_and_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        # planning.md has the tables of all options; the others are one page for several tasks
        most = {"planning.md": 300, "running.md": 240, "freezing.md": 210}.get(page.name, 150)
        assert len(page.read_text().splitlines()) <= most, page.name
        assert page.name == "README.md" or f"]({page.name})" in index, page.name


def test_each_task_is_two_clicks_from_the_readme() -> None:
    """README, its link to the list of tasks, the page: `test_links_have_a_target` follows both."""
    assert "](docs/README.md)" in (ROOT / "README.md").read_text()
    tasks = (ROOT / "docs/README.md").read_text().split("## Tasks")[1].split("\n## ")[0]
    ways = dict(re.findall(r"^\| ([^|]+) \| (\[[^|]+) \|$", tasks, re.MULTILINE))
    assert len(ways) >= 20 and all("](" in way for way in ways.values())
    pages = {name for way in ways.values() for name in re.findall(r"\]\((\w+\.md)", way)}
    shown = {
        "tutorial.md",
        "from_ddp.md",
        "trainer.md",
        "lora.md",
        "checkpoints.md",
        "running.md",
        "data.md",
        "errors.md",
    }
    assert shown <= pages


def test_samples_that_are_seeded_by_themselves_are_equal_with_any_number_of_workers(tmp_path: Path) -> None:
    (text,) = [b.text for b in blocks(ROOT / "docs/data.md") if "class Augmented" in b.text]
    (tmp_path / "augmented.py").write_text("import torch\n" + text)
    script = (
        "import torch, augmented\n"
        "found = []\n"
        "for workers, skipped in ((0, 0), (2, 0), (1, 8)):\n"
        "    data = augmented.Augmented(torch.zeros(32, 3), seed=1)\n"
        "    data.epoch = 2\n"
        "    torch.manual_seed(workers)\n"
        "    sampler = range(skipped, 32)\n"
        "    loader = torch.utils.data.DataLoader(data, sampler=sampler, batch_size=4, num_workers=workers)\n"
        "    found.append(torch.cat(list(loader)))\n"
        "assert found[0].unique().numel() > 90\n"
        "assert torch.equal(found[0], found[1]) and torch.equal(found[0][8:], found[2])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_pages_that_code_names_exist() -> None:
    for folder in ("autopart", "passes", "runtime", "tests", "examples", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            for page in re.findall(r"\bdocs/\w+\.md\b", path.read_text()):
                assert (ROOT / page).exists(), f"{path.relative_to(ROOT)} names {page}"


def test_measured_ratios_are_those_of_the_results() -> None:
    rows = [row for page in DOCUMENTS for row in MEASURED.finditer(page.read_text())]
    assert len(rows) >= 8
    for row in rows:
        assert row[0] == measured(row)


def test_the_readme_says_what_slices_gained_in_the_measurement() -> None:
    said = re.search(r"(\d\.\d)x \(Llama\) and (\d\.\d)x \(GPT-2\)", (ROOT / "README.md").read_text())
    found = json.loads((ROOT / "benchmarks/results/token_slices.json").read_text())["one sequence"]
    gains = [found[f"{model}, 2048"]["rows"]["planned slices"]["gain"]["median"] for model in ("llama", "gpt2")]
    assert said is not None and list(said.groups()) == [f"{gain:.1f}" for gain in gains]


def test_times_on_one_gpu_are_those_of_the_results() -> None:
    files = [json.loads((ROOT / f"benchmarks/results/gpu_h100_{name}.json").read_text()) for name in ("one", "more")]
    medians = {
        (row["model"], row["precision"], row["plan"], f"{1e3 * row['seconds']['median']:.1f}")
        for file in files for row in file["rows"] if "seconds" in row
    }  # fmt: skip
    table = (ROOT / "docs/benchmarks.md").read_text().split("## What one H100 showed")[1]
    rows = re.findall(r"^\| ([\w-]+ ?XL|[\w-]+), .*, (\w+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", table, re.MULTILINE)
    assert len(rows) == 3
    for model, precision, *times in rows:
        for plan, time in zip(("one device", "ours", "DDP"), times, strict=True):
            assert (model.lower().replace(" ", "-").replace("gpt-2", "gpt2"), precision, plan, time) in medians


def test_an_option_is_documented_once() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md") if page.name != "pipe.md")
    named = re.findall(r"^\| `(\w+)=[^`]*` \|", pages, re.MULTILINE)
    assert len(named) > 30
    assert sorted(named) == sorted(set(named))


def test_the_readme_has_at_most_150_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize(("document", "path", "text"), QUOTES, ids=lambda value: value.split("\n")[0])
def test_quoted_code_is_in_the_file(document: str, path: str, text: str) -> None:
    assert text in (ROOT / path).read_text(), f"{document} quotes {path}"


def test_extensions_are_short_and_quoted() -> None:
    quoted = {path: text for document, path, text in QUOTES if document.startswith("extending")}
    for kind in ("schedule", "cost_source", "op", "report"):
        assert len(quoted[f"tests/support/extending/own_{kind}.py"].splitlines()) < 25, kind


def test_every_kind_of_extension_touches_at_most_four_packages() -> None:
    page = (ROOT / "docs/extending.md").read_text()
    rows = re.findall(r"^\| \[([\w ]+)\]\([\w.#-]+\) \| ([^|]*) \|", page, re.MULTILINE)
    assert len(rows) == 6
    for kind, rooms in rows:
        named = re.findall(r"`([\w/.]+)`", rooms)
        assert 1 <= len(named) <= 4, kind
        for room in named:
            assert (ROOT / room).exists() or (ROOT / "autopart" / room).exists(), room


def test_every_fault_of_the_table_has_a_test_that_exists_or_a_reason() -> None:
    page = (ROOT / "docs/faults.md").read_text()
    rows = re.findall(r"^\| (F\d+) \| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE)
    assert len(rows) >= 20
    assert [number for number, *_ in rows] == [f"F{number}" for number in range(1, len(rows) + 1)]
    for number, _, shown in rows:
        tests = re.findall(r"`([\w/]+\.py)::(\w+)`", shown)
        assert tests or "not done:" in shown, number
        for path, test in tests:
            assert f"\ndef {test}(" in (ROOT / "tests" / path).read_text(), f"{number}: {path}::{test}"


def test_the_tutorial_shows_every_line_of_code_that_differs() -> None:
    plain, piped = ((ROOT / f"examples/gpt_{kind}.py").read_text() for kind in ("plain", "pipeline"))
    shown = [block.text.splitlines() for block in blocks(ROOT / "docs/tutorial.md") if block.language == "diff"]
    for lines in shown:
        for mark, text in (("-", plain), ("+", piped)):
            side = "".join(line[1:] + "\n" for line in lines if line[0] in (mark, " "))
            assert side in text, side
    differs = difflib.unified_diff(code_of(plain), code_of(piped), n=0, lineterm="")
    changed = [line for line in differs if line[0] in "+-" and line[1:2] not in ("+", "-")]
    assert set(changed) <= {line for lines in shown for line in lines}


def code_of(script: str) -> list[str]:
    """Return the lines of a script behind its docstring."""
    return script.split('"""', 2)[2].splitlines()

"""Timelines as SVG: what is drawn and where, and that the picture stands alone."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest

import autopart
from autopart.ir.actions import parse_action
from autopart.ir.errors import UsageError
from autopart.ir.timeline import Span, Timeline
from autopart.report.svg_timeline import COLOURS, LEFT, RIGHT, SUMS, WAITING, timeline_svg
from autopart.report.traces import timeline_text, timelines_text

SVG = "{http://www.w3.org/2000/svg}"
MS = 1_000_000


def timeline(text: str, peaks: tuple[int, ...] = ()) -> Timeline:
    """A timeline of "rank action start end" by commas, in milliseconds."""
    found = [part.split() for part in text.split(",")]
    spans = (Span(int(rank), parse_action(name), int(a) * MS, int(b) * MS) for rank, name, a, b in found)
    return Timeline(tuple(sorted(spans, key=lambda span: (span.start_ns, span.rank))), peaks)


STEP = timeline(
    "0 0F0 0 10, 0 0SF0>1 10 14, 0 0F1 10 20, 0 0SF1>1 20 24, 1 1F0 14 24, 1 1B0 24 44, 1 1SB0>0 44 48, "
    "1 1F1 44 54, 1 1I1 54 64, 1 1SB1>0 64 68, 1 1W1 64 74, 0 0B0 48 68, 0 0B1 68 88, 0 0T 88 90, 0 0O 90 92, "
    "1 1O 90 93",
    (3 * 2**20, 2**20),
)


def drawn(*steps: Timeline, width: int = 1200) -> Element:
    return ElementTree.fromstring(timeline_svg({f"step {n}": step for n, step in enumerate(steps)}, width=width))


def ranks(picture: Element) -> list[Element]:
    return [group for group in picture.iter(f"{SVG}g") if group.get("class") == "rank"]


def title(element: Element) -> str:
    return element.findtext(f"{SVG}title", "")


def place(rect: Element) -> tuple[float, float]:
    return float(rect.get("x", "")), float(rect.get("width", ""))


def test_every_compute_and_sum_is_a_bar_at_its_time() -> None:
    scale = (1200 - LEFT - RIGHT) / STEP.step_ns
    for rank, group in enumerate(ranks(drawn(STEP))):
        bars = {title(rect).partition(",")[0]: rect for rect in group.iter(f"{SVG}rect") if rect.get("class")}
        spans = {str(s.action): s for s in STEP.spans if s.rank == rank and not s.action.is_a.is_message}
        assert sorted(bars) == sorted(spans)
        for name, span in spans.items():
            x, width = place(bars[name])
            assert x == pytest.approx(LEFT + span.start_ns * scale, abs=0.01)
            assert width == pytest.approx((span.end_ns - span.start_ns) * scale, abs=0.01)
            assert bars[name].get("fill") == COLOURS.get(span.action.kind, SUMS)
            assert f"{span.action.is_a.label}, rank {rank}: {span.start_ns / MS:.3f} to" in title(bars[name])


def test_rows_say_what_a_rank_does_and_sends_and_holds() -> None:
    first, second = ranks(drawn(STEP))
    assert title(first) == "rank 0: busy 65%, holds 2, 3 MiB"
    assert title(second) == "rank 1: busy 65%, holds 1, 1 MiB"
    shapes = {path.get("class"): title(path) for path in second.iter(f"{SVG}path")}
    assert shapes == {
        "SB": "sending gradients: 2 messages, 8.000 ms",
        "held": "holds at most 1 micro-batches",
    }


def test_what_is_held_rises_with_forwards_and_falls_when_a_backward_is_over() -> None:
    step = timeline("0 0F0 0 10, 0 0F1 10 20, 0 0I0 20 30, 0 0F2 30 40, 0 0W0 40 50, 0 0B1 50 60, 0 0B2 60 100")
    (group,) = ranks(drawn(step, width=LEFT + RIGHT + 500))
    (held,) = (path for path in group.iter(f"{SVG}path") if path.get("class") == "held")
    moments = [float(part.partition("V")[0]) for part in held.get("d", "").split("H")[1:]]
    levels = [float(part.split("V")[1]) for part in held.get("d", "").split("H")[1:]]
    unit = (levels[-1] - levels[2]) / 3
    assert moments == [LEFT + 5 * ms for ms in (0, 10, 30, 50, 60, 100)]
    assert levels == pytest.approx([levels[-1] - count * unit for count in (1, 2, 3, 2, 1, 0)], abs=0.02)


def test_stages_of_a_rank_have_lanes_of_their_own() -> None:
    (group,) = ranks(drawn(timeline("0 0F0 0 50, 0 2F0 50 100, 0 2B0 100 150, 0 0B0 150 200")))
    tops = {
        title(rect).partition(",")[0]: float(rect.get("y", ""))
        for rect in group.iter(f"{SVG}rect")
        if rect.get("class")
    }
    assert tops["0F0"] == tops["0B0"] < tops["2F0"] == tops["2B0"]
    assert {"0F0", "2F0"} <= {text.text for text in group.iter(f"{SVG}text")}


def test_two_timelines_share_a_scale() -> None:
    longer = timeline("0 0F0 0 10, 0 0B0 10 186")
    groups = ranks(drawn(STEP, longer))
    bars = [next(r for r in group.iter(f"{SVG}rect") if title(r).startswith("0F0")) for group in (groups[0], groups[2])]
    assert place(bars[0]) == place(bars[1])
    headings = [text.text for text in drawn(STEP, longer).iter(f"{SVG}text") if text.get("font-weight") == "bold"]
    assert headings == [
        "step 0: step 93.00 ms, 35.5% of the ranks' time without computes",
        "step 1: step 186.00 ms, 0.0% of the ranks' time without computes",
    ]


def test_thirty_two_ranks_of_sixty_four_micro_batches_stay_small_and_have_no_labels() -> None:
    count, micros = 32, 64
    spans = [
        Span(rank, parse_action(f"{rank}{kind}{m}"), at := (rank + 4 * m + 2 * lag) * MS, at + MS)
        for rank in range(count)
        for m in range(micros)
        for lag, kind in enumerate("FB")
    ]
    picture = timeline_svg({"big": Timeline(tuple(spans))})
    assert len(picture) < 300 * len(spans)
    root = ElementTree.fromstring(picture)
    assert float(root.get("height", "")) < 1600
    assert sum(1 for rect in root.iter(f"{SVG}rect") if rect.get("class")) == len(spans)
    for group in ranks(root):
        assert len(list(group.iter(f"{SVG}text"))) == 2  # the rank and its facts


def test_the_picture_stands_alone_and_names_are_escaped() -> None:
    picture = timeline_svg({'<script>"&\x1b': STEP})
    root = ElementTree.fromstring(picture)
    assert {element.tag.removeprefix(SVG) for element in root.iter()} == {"svg", "title", "rect", "g", "text", "path"}
    assert not any(
        word in picture.replace("http://www.w3.org/2000/svg", "") for word in ("href", "url(", "http", "\x1b")
    )
    assert title(root) == '<script>"&\\x1b'


def test_kinds_differ_in_lightness() -> None:
    def lightness(colour: str) -> float:
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 2.55

    levels = sorted(map(lightness, (*COLOURS.values(), SUMS, WAITING)))
    assert all(light - dark > 7 for dark, light in pairwise(levels))


def test_nothing_is_drawn_of_an_empty_timeline_and_a_narrow_picture_is_refused() -> None:
    assert ranks(drawn(Timeline(()))) == []
    with pytest.raises(ValueError, match="at least 400"):
        timeline_svg({"a": STEP}, width=399)


def test_a_picture_is_written_with_another_beside_it(tmp_path: Path) -> None:
    autopart.save_trace(STEP, tmp_path / "step.svg", name="measured", beside={"simulated": STEP})
    assert (tmp_path / "step.svg").read_text() == timeline_svg({"measured": STEP, "simulated": STEP})
    autopart.save_trace(STEP, tmp_path / "step.txt", name="measured", beside={"simulated": STEP})
    text = (tmp_path / "step.txt").read_text()
    assert text == timelines_text({"measured": STEP, "simulated": STEP})
    assert text.startswith("measured: 93.00 ms\nrank 0 |F0") and "\n\nsimulated: 93.00 ms\nrank 0 |F0" in text
    with pytest.raises(UsageError, match="holds one timeline"):
        autopart.save_trace(STEP, tmp_path / "step.json", beside={"simulated": STEP})
    with pytest.raises(UsageError, match="two timelines are called 'autopart'"):
        autopart.save_trace(STEP, tmp_path / "step.svg", beside={"autopart": STEP})
    with pytest.raises(UsageError, match=r"ends neither in \.json nor in \.svg or \.txt"):
        autopart.save_trace(STEP, tmp_path / "step.png")


def test_many_spans_in_few_characters_show_what_takes_most_of_each() -> None:
    step = timeline("0 0F0 0 10, 0 0F1 10 20, 0 0I0 20 30, 0 0W0 30 36, 0 0B1 70 100")
    assert timeline_text(step, 8) == "rank 0 |FFW...BB|\n"
    assert timeline_text(step, 30) == "rank 0 |F0-F1-I0=W...........B1=======|\n"

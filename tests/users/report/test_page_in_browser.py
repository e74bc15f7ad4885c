"""The page of a plan in a browser: it draws its rows, zooms, says what is under the pointer, and makes no errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.languages.graphs import cluster, layers, plan_of

from autopart.ir.plan import Plan
from autopart.ir.timeline import read_spans
from benchmarks.shared.browser import Page, browser

pytestmark = pytest.mark.skipif(browser() is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(layers(6), cluster(4, memory=10**9), micros=8, rows=(2,) * 8, stages=2)


@pytest.fixture(scope="module")
def page(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    path = tmp_path_factory.mktemp("pages") / "plan.html"
    plan.report(path, measured=read_spans(plan.outlook.spans))
    with Page() as opened:
        opened.open(path)
        yield opened
        assert opened.errors == []


def test_the_picture_has_a_row_for_each_worker_of_both_steps(page: Page, plan: Plan) -> None:
    assert page.run("autopartView.rows") == 2 * len({stage.ranks for stage in plan.stages})
    assert page.run("document.querySelectorAll('#stages tbody tr').length") == len(plan.stages)
    assert page.run("document.querySelectorAll('#legend li').length") >= 4
    page.run(
        "empty = Object.assign(document.createElement('canvas'), {width: picture.width, height: picture.height}); 1"
    )
    assert page.run("picture.toDataURL().length / empty.toDataURL().length") > 2  # it is not empty


def test_the_pointer_is_told_what_it_points_at(page: Page) -> None:
    box = page.run("(({x, y}) => [x, y])(picture.getBoundingClientRect())")
    page.mouse("mouseMoved", box[0] + 110, box[1] + 30)
    page.frame()
    assert "forward" in page.run("tip.textContent") and page.run("!tip.hidden")
    assert "bubble" in page.run("autopartView.describe(110, 30 + 33)")  # the second stage waits for the first


def test_it_zooms_with_keys_with_the_mouse_and_with_buttons(page: Page) -> None:
    whole = page.run("autopartView.range()")
    page.run("picture.focus()")
    page.press("+")
    begin, end = page.run("autopartView.range()")
    assert end - begin == pytest.approx(whole[1] / 2)
    page.press("ArrowRight")
    assert page.run("autopartView.range()")[0] > begin
    page.press("0")
    assert page.run("autopartView.range()") == whole
    x, y = page.run("(({x, y}) => [x, y])(picture.getBoundingClientRect())")
    page.mouse("mousePressed", x + 300, y + 30)
    page.mouse("mouseMoved", x + 500, y + 30)
    page.mouse("mouseReleased", x + 500, y + 30)
    begin, end = page.run("autopartView.range()")
    assert 0 < begin < end < whole[1]
    page.run("document.querySelector('[data-do=all]').click()")
    assert page.run("autopartView.range()") == whole


def test_many_ranks_are_summed_up_and_the_longest_chain_and_the_legend_are_in_view(tmp_path: Path) -> None:
    plan = plan_of(layers(30), cluster(20, memory=10**9), micros=4, rows=(2,) * 4, stages=20, replicas=1)
    plan.report(tmp_path / "many.html")
    with Page(1120, 700) as opened:
        opened.open(tmp_path / "many.html")
        assert "longest chain" in opened.run("legend.textContent")
        opened.run("window.scrollTo(0, picture.getBoundingClientRect().bottom - 200); 1")
        opened.frame()
        assert opened.run("legend.getBoundingClientRect().top >= 0 && legend.getBoundingClientRect().bottom < 200")
        rows = opened.run("picture.clientHeight")
        assert rows > 20 * 25 + 26, "a row for each rank, and one of all"
        column = opened.run("[...picture.getContext('2d').getImageData(200, 22, 1, 26).data].join()").split(",")
        assert column[:4] != column[-4:]  # few ranks compute at first
        assert opened.run("document.querySelector('#stages').parentElement.tabIndex") == 0
        assert opened.errors == []


def test_memory_is_shown_against_the_limit(page: Page) -> None:
    page.run("document.querySelector('[data-do=memory]').click()")
    assert page.run("document.querySelector('[data-do=memory]').getAttribute('aria-pressed')") == "true"
    assert "of 953.7 MiB" in page.run("autopartView.describe(300, 40)")
    page.run("document.querySelector('[data-do=memory]').click()")


def test_it_follows_dark_mode_and_print(page: Page, tmp_path: Path) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.run(colour), page.run("picture.toDataURL()")
    page.media(dark=True)
    assert page.run(colour) != light[0] and page.run("picture.toDataURL()") != light[1]
    page.media(kind="print")
    assert page.run(colour) == light[0]
    assert page.run("getComputedStyle(document.querySelector('.tools')).display") == "none"
    page.media()
    page.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_elements_have_names_for_screen_readers(page: Page) -> None:
    unnamed = (
        "[...document.querySelectorAll('button, canvas')].filter(e => !(e.ariaLabel || e.textContent.trim())).length"
    )
    assert page.run(unnamed) == 0
    assert page.run("picture.tabIndex") == 0 and "step of" in page.run("picture.ariaLabel")
    assert page.run("[...document.querySelectorAll('th')].every(e => e.scope === 'col')")

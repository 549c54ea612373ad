"""Two experiments' pages side by side: they follow each other, say what one lacks, and stay harmless."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from browser import Opened, browser, violations
from conftest import write_parameters
from page_run import HOSTILE, write_run
from playwright.sync_api import expect

from attnmix.core.errors import InputError
from attnmix.page.arrays import visible
from attnmix.page.assembly import write_page
from attnmix.store.reports import PAGE
from compare import side_by_side
from compare.side_by_side import NAME, Side, write_side_by_side
from stages.common.parameters import read_parameters

CHOICES = {
    "document": "1",
    "checkpoint": "pretrained",
    "layer": "2",
    "ratio-method": "attn_n",
    "matrix": "attention",
    "head": "1",
    "layout": "aligned",
    "colour": "ratio",
    "step-measure": "norm",
}


def write_both(folder: Path, *pages: str, names: Sequence[str] = ("one", "other")) -> Path:
    """The page of these two pages, as if DVC's cache had them."""
    texts = dict(zip(names, pages, strict=True))
    sides = [Side(name, "", {"seed": "1", "model.name": f"<b>{name}</b>"}) for name in names]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side_by_side, "_page", lambda side, _: texts[side.name])
        write_side_by_side(sides, Path(), folder)
    return folder / NAME


@pytest.fixture(scope="module")
def pages(run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Of a run, and of another with fewer layers and texts, and other words in those."""
    less = tmp_path_factory.mktemp("less")
    write_parameters(less, capture={"documents": [0, 1]})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(less)
        write_run(less, run, [9, 7], 2)
        for path in Path("reports/plots").rglob("*.csv"):
            table = pd.read_csv(path, keep_default_na=False)
            if "layer" in table:
                table[table["layer"].astype(str).isin(["", "1", "2"])].to_csv(path, index=False)
        write_page(read_parameters())
    return (run / PAGE).read_text(encoding="utf-8"), (less / PAGE).read_text(encoding="utf-8")


@pytest.fixture(scope="module", params=["chromium", "firefox"])
def started(pages: tuple[str, str], request: pytest.FixtureRequest) -> Iterator[Any]:
    with browser(request.param) as found:
        yield found


@pytest.fixture
def same(started: Any, pages: tuple[str, str], tmp_path: Path) -> Iterator[Opened]:
    """A run beside itself."""
    opened = Opened(started, write_both(tmp_path, pages[0], pages[0]), viewport={"width": 1400, "height": 900})
    yield opened
    opened.close()


@pytest.fixture
def unlike(started: Any, pages: tuple[str, str], tmp_path: Path) -> Iterator[Opened]:
    """A run beside one that lacks some of it."""
    opened = Opened(started, write_both(tmp_path, *pages), viewport={"width": 1400, "height": 900})
    yield opened
    opened.close()


def chosen(frame: Any, control: str, value: str) -> None:
    """Wait until a control of a page says so."""
    frame.wait_for_function("([id, value]) => document.getElementById(id).value === value", arg=[control, value])


def said(page: Any, part: str) -> None:
    page.wait_for_function("part => document.getElementById('lacks').textContent.includes(part)", arg=part)


def plain(text: str) -> str:
    """Without the marks that isolate names."""
    return text.replace("\u2068", "").replace("\u2069", "")


def test_a_choice_in_one_is_made_in_the_other(same: Opened) -> None:
    one, other = same.page.frames[1:]
    for number, (control, value) in enumerate(CHOICES.items()):
        here, there = (one, other) if number % 2 else (other, one)
        here.locator(f"#{control}").select_option(value)
        chosen(there, control, value)
    first = one.evaluate("document.querySelector('#words span').id")
    other.locator(f"#{first}").click()
    one.wait_for_selector(f"#{first}[aria-selected=true]")
    assert one.locator("#selected").inner_text() == other.locator("#selected").inner_text()
    one.locator("#clear").click()
    other.wait_for_selector("#clear", state="hidden")
    assert {each: one.locator(f"#{each}").input_value() for each in CHOICES} == CHOICES
    assert same.page.locator("#lacks").is_hidden()


def test_one_slider_moves_both(same: Opened) -> None:
    page = same.page
    for place in (page.locator("#both-point").input_value(), "8"):
        page.locator("#both-point").fill(place)
        for frame in page.frames[1:]:
            chosen(frame, "point", place)
            expect(page.locator("#both-name")).to_have_text(frame.locator("#point-name").inner_text())
            assert frame.locator("#point").is_hidden()
    assert [frame.locator("#layer").input_value() for frame in page.frames[1:]] == ["2", "2"]
    page.frames[1].evaluate("document.getElementById('play').click()")
    page.wait_for_function("() => Number(document.getElementById('both-point').value) > 9")


def test_a_link_shows_what_its_sender_saw(same: Opened) -> None:
    page = same.page
    one, other = page.frames[1:]
    one.locator("#layer").select_option("2")
    one.locator("#token-3").click()
    other.wait_for_selector("#token-3[aria-selected=true]")
    page.wait_for_function("() => location.hash.includes('token=3')")
    page.reload()
    page.wait_for_selector("html[data-drawn]", state="attached")
    for frame in page.frames[1:]:
        chosen(frame, "layer", "2")
        frame.wait_for_selector("#token-3[aria-selected=true]")


def test_the_part_that_is_read_is_shown_in_both(same: Opened) -> None:
    one, other = same.page.frames[1:]
    one.locator("nav a[href='#map']").click()
    for frame in (one, other):  # below the bar that stays
        frame.wait_for_function("() => Math.abs(document.getElementById('map').getBoundingClientRect().top - 104) < 30")
    other.locator("nav a[href='#text']").click()
    for frame in (one, other):
        frame.wait_for_function(
            "() => Math.abs(document.getElementById('text').getBoundingClientRect().top - 104) < 30"
        )
    same.page.wait_for_function("() => location.hash.includes('part=text')")


def test_what_a_run_lacks_is_said_and_the_rest_followed(unlike: Opened) -> None:
    page = unlike.page
    one, other = page.frames[1:]
    one.locator("#document").select_option("2")
    said(page, "no text \u2068text/0\u2069: it shows test/0")
    one.locator("#document").select_option("1")
    chosen(other, "document", "1")
    said(page, "another text as \u2068test/1")
    one.locator("#layer").select_option("3")
    said(page, "no layer \u20683")
    assert plain(page.locator("#lacks").inner_text()).startswith("other has another text as test/1, no layer 3")
    one.locator("#layer").select_option("1")
    chosen(other, "layer", "1")
    one.locator("#words span").nth(3).click()
    page.wait_for_timeout(200)
    assert other.locator("#clear").is_hidden()  # it has no such word
    other.locator("#layer").select_option("2")
    chosen(one, "layer", "2")
    assert one.locator("#words span[aria-selected=true]").count() == 1  # nobody asked for another
    page.locator("#both-point").fill(page.locator("#both-point").get_attribute("max"))
    said(page, "no layer \u20683")
    expect(page.locator("#both-name")).to_have_text(one.locator("#point-name").inner_text())


def test_hostile_text_is_shown_and_runs_nothing(started: Any, pages: tuple[str, str], tmp_path: Path) -> None:
    names = (HOSTILE[1], HOSTILE[2])
    shown = Opened(started, write_both(tmp_path, *pages, names=names))
    page = shown.page
    assert [frame.get_attribute("title") for frame in page.locator("iframe").all()] == list(names)
    assert [visible(name) in page.locator("main").inner_text() for name in names] == [True, True]
    page.frames[1].locator("#document").select_option("2")
    said(page, "no text")
    for token in range(2, 2 + len(HOSTILE)):
        page.frames[1].locator("#words span").nth(token).click()
    assert [frame.evaluate("window.hacked") for frame in page.frames] == [None, None, None]
    assert page.locator("img, main b").count() == 0
    shown.close()


def test_a_page_listens_to_the_page_around_it_and_to_no_one_else(same: Opened) -> None:
    page = same.page
    one = page.frames[1]
    before = {each: one.locator(f"#{each}").input_value() for each in CHOICES}
    post = "said => document.querySelector('iframe').contentWindow.postMessage(said, '*')"
    for nonsense in ("layer=99&document=<b>&head=__proto__&point=1e9", "part=<b>&share=x", {"layer": 2}, None, 3, ""):
        page.evaluate(post, nonsense)
    one.evaluate("window.postMessage('layer=1', '*')")
    page.frames[2].evaluate("parent.frames[0].postMessage('layer=1', '*')")
    page.evaluate(post, "step-measure=norm&colour=class")
    chosen(one, "colour", "class")  # what was posted before has been heard by now
    assert {each: one.locator(f"#{each}").input_value() for each in CHOICES} == before | {"colour": "class"}


@pytest.mark.parametrize(("scheme", "width"), [("light", 1400), ("dark", 400)])
def test_axe_finds_no_violation(started: Any, pages: tuple[str, str], tmp_path: Path, scheme: str, width: int) -> None:
    size = {"width": width, "height": 900}
    shown = Opened(started, write_both(tmp_path, *pages), viewport=size, color_scheme=scheme, bypass_csp=True)
    one = shown.page.frames[1]
    one.locator("#document").select_option("2")
    said(shown.page, "no text")
    assert violations(shown.page) == []
    shown.close()


def test_a_frame_runs_its_own_scripts_alone(started: Any, pages: tuple[str, str], tmp_path: Path) -> None:
    changed = pages[0].replace("</main>", "<script>window.hacked=1</script></main>")
    shown = Opened(started, write_both(tmp_path, changed, pages[1]))
    assert shown.page.frames[1].evaluate("[window.hacked, origin]") == [None, "null"]
    assert shown.errors
    assert all("Content Security Policy" in error or "settings blocked" in error for error in shown.errors)
    shown.context.close()


def test_a_page_that_is_opened_alone_hears_nothing(run: Path, started: Any) -> None:
    alone = Opened(started, run / PAGE)
    layer = alone.page.locator("#layer").input_value()
    alone.page.evaluate("window.postMessage('layer=1&colour=class', '*')")
    alone.page.wait_for_timeout(100)
    assert alone.page.locator("#layer").input_value() == layer
    assert alone.page.locator("#copy-link, #depth").count() == 2
    assert alone.page.locator("#copy-link").is_visible()
    alone.close()


def test_an_older_page_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dvc.api.read", lambda *_, **__: "<!DOCTYPE html><title>a page</title>")
    with pytest.raises(InputError, match="the page of one was made by code that is too old"):
        write_side_by_side([Side("one", "", {}), Side("other", "", {})], Path(), tmp_path)
    assert list(tmp_path.iterdir()) == []

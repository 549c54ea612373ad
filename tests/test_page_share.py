"""What can be taken from the page: a pane's values and files, a link, a print."""

from __future__ import annotations

import csv
import io
import struct
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs
from xml.etree import ElementTree

import pytest
from browser import Opened
from page_run import HOSTILE, choose, open_values, tokens

from attnmix.page.arrays import visible

SVG = "{http://www.w3.org/2000/svg}"


def kept(page: Any, pane: str, kind: str) -> tuple[str, bytes]:
    """Name and content of a file that a pane offers."""
    with page.expect_download() as download:
        page.get_by_role("button", name=f"{kind} of {pane}", exact=True).click()
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


def test_a_panes_csv_holds_what_it_shows(opened: Opened) -> None:
    page = opened.page
    choose(page, "layer", "2")
    name, content = kept(page, "words", "csv")
    assert name == "words_test-0_finetuned_layer-2.csv"
    columns, *rows = csv.reader(io.StringIO(content.decode("utf-8"), newline=""))
    assert columns == ["position", "token", "share from others (ALTI, fine-tuned)"]
    of_text = tokens().query("document == 'test/0'")["token"]
    assert [row[1] for row in rows] == [visible(each, kept="") for each in of_text]
    titles = page.locator("#words span").evaluate_all("all => all.map(each => each.title)")
    assert all(
        title.endswith(f"{100 * float(row[2]):.0f} %") for title, row in zip(titles, rows, strict=True) if row[2]
    )


@pytest.mark.parametrize("pane", ["words", "course"])
def test_a_panes_drawing_opens_alone(opened: Opened, chromium: Any, tmp_path: Path, pane: str) -> None:
    page = opened.page
    page.locator("#token-3").click()
    name, content = kept(page, pane, "SVG")
    assert name.endswith(".svg")
    drawing = ElementTree.fromstring(content)
    assert drawing.tag == f"{SVG}svg"
    written = "".join(drawing.itertext())
    if pane == "words":
        assert all(visible(each, kept="") in written for each in HOSTILE)
        assert len(list(drawing.iter(f"{SVG}text"))) == (tokens()["document"] == "test/0").sum()
    assert not [each for each in drawing.iter() if each.tag.endswith("script")]
    (tmp_path / name).write_bytes(content)
    context = chromium.new_context()
    alone = context.new_page()
    alone.goto((tmp_path / name).as_uri())
    assert alone.evaluate("window.hacked") is None
    context.close()
    name, content = kept(page, pane, "PNG")
    width, height = struct.unpack(">II", content[16:24])
    assert content.startswith(b"\x89PNG")
    assert (width, height) == (2 * float(drawing.get("width", 0)), 2 * float(drawing.get("height", 0)))


def test_values_are_a_table_that_follows_the_choice(opened: Opened) -> None:
    page = opened.page
    page.locator("#token-3").click()
    assert page.locator("#course ~ .files table").count() == 0  # made when it is opened
    values = open_values(page, "course")
    first = values.locator("tbody tr").all_inner_texts()
    page.locator("#token-4").click()
    assert values.locator("tbody tr").all_inner_texts() != first
    assert values.locator("th").all_inner_texts() == [
        "layer",
        "share from others, pretrained",
        "share from others, finetuned",
    ]


def test_a_link_holds_measure_difference_and_what_stands_beside(opened: Opened, run: Path) -> None:
    page = opened.page
    choose(page, "shade", "ratio")
    choose(page, "checkpoint", "difference")
    choose(page, "beside-choice", "1")
    page.wait_for_function("() => location.hash.includes('beside')")
    said = parse_qs(page.url.split("#")[1])
    assert (said["shade"], said["difference"], said["beside"]) == (["ratio"], ["true"], ["test/1"])
    other = page.context.new_page()
    other.goto(page.url)
    other.wait_for_selector("html[data-ready]", state="attached")
    assert other.locator("#checkpoint").input_value() == "difference"
    assert other.locator("#beside-name").inner_text().startswith("test/1")
    assert other.locator("#text-legend").inner_text() == page.locator("#text-legend").inner_text()
    other.close()


def test_steps_of_the_explanation_set_the_same_views(opened: Opened) -> None:
    page = opened.page
    steps = page.locator("#story-steps li")
    assert steps.count() == 5
    choose(page, "layer", "2")
    steps.nth(1).get_by_role("button").dispatch_event("click")
    assert page.locator("#matrix").input_value() == "attention"
    shares = page.locator("#words span").evaluate_all("all => all.map(each => each.title.match(/(\\d+) %$/)[1])")
    mean = sum(map(float, shares)) / len(shares)
    told = steps.nth(1).locator("p").inner_text()
    assert " % in layer 2" in told
    assert float(told.split(" % in layer 2")[0].split()[-1]) == pytest.approx(mean, abs=1)
    steps.nth(4).get_by_role("button").dispatch_event("click")
    assert page.locator("#checkpoint").input_value() == "difference"
    assert page.locator("#words span[aria-selected=true]").count() == 1

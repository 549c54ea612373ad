"""Two texts in one picture are aligned by tokens, and their differences are marked and described."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Opened, violations
from colours import distance, lab, linear, shade
from conftest import write_tiny_bert
from page_grid import colour_of, displayed_values, drawn, pixels
from page_run import choose, save_page, tokens

import attnmix

TITLES = ("“the film was not good ,…”", "“the film was good , it…”")
PAIR = ("the film was not good , it was great", "the film was good , it was not great")
DIFFERENCE_LIMIT = 0.25  # the difference of shares that is drawn in the strongest colour
ALIKE = 2.5  # the largest CIEDE2000 distance due to rounding on the screen
SHARE_COLUMNS = (4, 7, 8)  # columns of the csv file: own share in the first and second text, and their difference
MINUS = "\N{MINUS SIGN}"
IS_CUT = "box => box.scrollHeight > box.clientHeight + 1"


def numbers_in(text: str) -> list[float]:
    """Return those numbers in a text that have one decimal place."""
    return [float(each) for each in re.findall(r"[-+]?\d+\.\d", text.replace(MINUS, "-"))]


class Compared:
    """A page of texts measured with a tiny model, and the own shares `[layers, tokens]` of each text."""

    def __init__(self, texts: Sequence[str], folder: Path) -> None:
        write_tiny_bert(folder / "model")
        result = attnmix.measure(attnmix.load(str(folder / "model")), list(texts))
        parts = [result.parts(number) for number in range(len(texts))]
        self.shares = [each["own_share"].to_numpy()[1:] for each in parts]
        self.names = [each["token"].to_numpy().tolist() for each in parts]
        self.path = save_page(result, folder)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    return Compared(PAIR, tmp_path_factory.mktemp("compared"))


@pytest.fixture(scope="module")
def pair_page(compared: Compared, chromium: Any) -> Iterator[Opened]:
    opened = Opened(chromium, compared.path, viewport={"width": 1280, "height": 900})
    yield opened
    opened.close()


@pytest.fixture
def pair(pair_page: Opened) -> Opened:
    """Return the page of both texts in its initial state."""
    pair_page.reset()
    return pair_page


def test_compared_values_and_colours_match_files(opened: Opened) -> None:
    page = opened.page
    choose(page, "document", "1")
    choose(page, "compare", "2")
    choose(page, "share", "parts")
    page.locator("#words").press("Escape")
    names = tokens()["document"].unique().tolist()
    shares = [displayed_values("finetuned", name, "parts") for name in names[1:]]
    starts = [int(tokens().query(f"document == '{name}'").index[0]) for name in names[1:]]
    picture, image = drawn(page), pixels(page)
    by_token = {(cell["token"], cell["isDifference"], cell["layer"]): cell for cell in picture["cells"]}

    def assert_shade(token: int, is_difference: bool, layer: int, position: float) -> None:
        found = colour_of(image, by_token[token, is_difference, layer], (picture["width"], picture["height"]))
        assert distance(lab(linear(found)), shade(position)) < ALIKE

    rows = opened.values("grid")
    compared = 0
    for row in rows:
        layer = int(row["layer"])
        positions = [int(row[f"position in {name}"] or -1) for name in names[1:]]  # -1 for no token in this column
        values = [each[layer - 1, index] if index >= 0 else None for each, index in zip(shares, positions, strict=True)]
        cells = [list(row.values())[column] for column in SHARE_COLUMNS]
        first, second, difference = (float(cell) if cell else None for cell in cells)
        assert [first, second] == pytest.approx(values, abs=2e-4)
        for start, index, value in zip(starts, positions, values, strict=True):
            if value is not None:
                assert_shade(start + index, False, layer, value)
        # These texts share few tokens. Different tokens in the same column are not compared.
        if None in values or row[f"token in {names[1]}"] != row[f"token in {names[2]}"]:
            assert difference is None
            continue
        change = values[1] - values[0]
        assert difference == pytest.approx(change, abs=4e-4)
        assert_shade(starts[0] + positions[0], True, layer, change / DIFFERENCE_LIMIT)
        compared += 1
    assert compared > 3


def test_similar_texts_open_side_by_side_with_differences(pair: Opened, compared: Compared) -> None:
    page = pair.page
    assert {page.locator(f"#{name}").input_value() for name in ("document", "compare")} == {"0", "1"}
    titles = page.locator(".levels b").all_inner_texts()
    assert titles == [*PAIR, f"Difference: {TITLES[1]} minus {TITLES[0]}"]
    assert page.locator("#unlike").inner_text() == (
        f"Tokens that differ (framed), in 2 of 12 columns: “not” in {TITLES[0]}, no token in {TITLES[1]}; "
        f"“not” in {TITLES[1]}, no token in {TITLES[0]}."
    )
    choose(page, "share", "parts")
    layer = int(page.locator("#layer").input_value())
    means = [100 * float(each[layer - 1].mean()) for each in compared.shares]
    assert numbers_in(page.locator("#whole").inner_text()) == pytest.approx([*means, means[1] - means[0]], abs=0.06)
    one, other = (
        np.delete(shares, names.index("not"), axis=1)
        for shares, names in zip(compared.shares, compared.names, strict=True)
    )
    most = 100 * float(np.abs(other - one).max())
    tokens_in_both = [name for name in compared.names[0] if name != "not"]
    words = np.array([name.isalpha() for name in tokens_in_both])  # the page lists differences of words only
    word_changes = np.abs(other - one)[:, words]
    most_of_words = 100 * float(word_changes.max())
    page.locator("#largest button").first.click()
    assert page.locator("#layer").input_value() == str(1 + int(word_changes.max(axis=1).argmax()))
    _, _, shown_change, *_ = numbers_in(page.locator("#chosen-text").inner_text())  # the third number, after the shares
    assert abs(shown_change) == pytest.approx(most_of_words, abs=0.06)
    legend = page.locator("#difference-legend")
    said = re.sub(r"\s+", " ", legend.inner_text())
    sides = f"left end: larger in {TITLES[0]}; right end: larger in {TITLES[1]}"
    assert said == f"{MINUS}25 +25 percentage points; {sides} (full colour at 25 or more)."
    _, content = pair.file("grid", "SVG")
    frames = re.findall(r'<rect [^>]*fill="none"[^>]*stroke="#1a1e26"[^>]*stroke-width="1.5"', content.decode("utf-8"))
    assert len(frames) == 2
    page.get_by_label("Stretch colours").check()
    assert [abs(each) for each in numbers_in(legend.inner_text())] == pytest.approx([most, most], abs=0.06)


def test_token_selection_keeps_the_picture(pair: Opened) -> None:
    page = pair.page
    choose(page, "document", "0")
    page.locator("#grid-canvas").focus()
    page.keyboard.press("Home")
    titles = page.locator(".levels b").all_inner_texts()
    selections = []
    for key in ("ArrowRight", "ArrowUp", *["ArrowDown"] * 3, "End", "ArrowLeft"):
        page.keyboard.press(key)
        selections.append((page.locator("#document").input_value(), page.locator("#selected b").inner_text()))
        assert page.locator(".levels b").all_inner_texts() == titles
    assert selections[:2] == [("0", "the")] * 2
    assert selections[4] == ("1", "the")  # the rows of the second text follow the first layer of the first text
    assert selections[5:] == [("1", "[SEP]"), ("1", "great")]
    assert page.locator("#compare").input_value() == "0"
    page.keyboard.press("ArrowLeft")
    assert page.locator("#chosen-text").inner_text().startswith("“not” after layer")
    assert f"{TITLES[0]} has no token in this column." in page.locator("#chosen-text").inner_text()
    for _ in range(3):
        page.keyboard.press("ArrowUp")
    assert page.locator("#document").input_value() == "0"  # the selected token is the nearest to the gap
    assert page.locator("#selected b").inner_text() in ("was", "great")


def test_comparison_can_be_closed_opened_and_undone(pair: Opened) -> None:
    page = pair.page
    choose(page, "document", "0")
    choose(page, "compare", "null")
    assert page.locator(".levels b").all_inner_texts() == ["The model as it is"]
    assert page.locator("#differences").count() == 0
    choose(page, "compare", "1")
    page.wait_for_selector("#differences")
    page.go_back()
    page.wait_for_function("() => document.getElementById('compare').value === 'null'")


@pytest.mark.parametrize(
    ("scheme", "forced", "width"),
    [
        ("light", "none", 1280),
        pytest.param("dark", "none", 400, marks=pytest.mark.long),
        pytest.param("light", "active", 768, marks=pytest.mark.long),
    ],
)
def test_comparison_is_accessible_on_every_screen(
    compared: Compared, tab: Any, scheme: str, forced: str, width: int
) -> None:
    looks = {"color_scheme": scheme, "forced_colors": forced, "reduced_motion": "reduce"}
    page = tab(compared.path, width=width, height=720, **looks).page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert not page.locator(".grid-box").evaluate(IS_CUT)
    assert violations(page) == []
    if width == 1280:
        box = page.locator("#grid-canvas").bounding_box()
        assert box["y"] + box["height"] <= 720  # both texts and their difference fit on the first screen

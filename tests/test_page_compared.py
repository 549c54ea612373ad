"""Two texts side by side: aligned by their tokens, with what differs marked, said and chosen."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import WHOLE, Opened, violations
from colours import distance, lab, linear, shade
from conftest import write_tiny_bert
from page_grid import colour_of, drawn, pixels, share_from_others
from page_run import choose, save_page, tokens

import attnmix

PAIR = ("the film was not good , it was great", "the film was good , it was not great")
UNLIKE = ("a warm ending", "time flies like an arrow but the plot is so cold")
DIFFERENCE_LIMIT = 0.25  # the difference of two shares from which on the colour is full
ALIKE = 2.5  # the largest CIEDE2000 distance that the screen's rounding makes
MINUS = "\N{MINUS SIGN}"
ARE_CUT = "box => box.scrollHeight > box.clientHeight + 1"


class Compared:
    """The page of texts that a tiny model measured, and their shares from others `[layers, tokens]`."""

    def __init__(self, texts: Sequence[str], folder: Path, chromium: Any, **looks: Any) -> None:
        write_tiny_bert(folder / "model")
        result = attnmix.measure(attnmix.load(str(folder / "model")), list(texts))
        parts = [result.parts(number) for number in range(len(texts))]
        self.shares = [1 - each["own_share"].to_numpy()[1:] for each in parts]
        self.names = [each["token"].to_numpy().tolist() for each in parts]
        self.path = save_page(result, folder)
        self.opened = Opened(chromium, self.path, **looks)
        self.page = self.opened.page

    def without(self, word: str) -> list[Any]:
        """Return the shares of both texts without those of a word."""
        columns = [names.index(word) for names in self.names]
        return [np.delete(shares, column, axis=1) for shares, column in zip(self.shares, columns, strict=True)]


def numbers_in(text: str) -> list[float]:
    """Return the numbers of a text that have a decimal place."""
    return [float(each) for each in re.findall(r"[-+]?\d+\.\d", text.replace(MINUS, "-"))]


@pytest.fixture
def pair(tmp_path: Path, chromium: Any) -> Iterator[Compared]:
    compared = Compared(PAIR, tmp_path, chromium, viewport={"width": 1280, "height": 900})
    yield compared
    compared.opened.close()


def common_length(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the length of the longest common subsequence, by its recursion."""

    @cache
    def longest(i: int, j: int) -> int:
        if i == len(one) or j == len(other):
            return 0
        if one[i] == other[j]:
            return 1 + longest(i + 1, j + 1)
        return max(longest(i + 1, j), longest(i, j + 1))

    return longest(0, 0)


def columns_of(rows: Sequence[dict[str, str]], names: Sequence[str]) -> list[tuple[int | None, int | None]]:
    """Return the positions in both texts of each column, from the csv of one layer."""
    positions = [[row[f"position in {name}"] for name in names] for row in rows if row["layer"] == "1"]
    return [(int(one) if one else None, int(other) if other else None) for one, other in positions]


@pytest.mark.parametrize("others", [("0", "1"), ("1", "2"), ("2", "0")])
def test_columns_hold_all_tokens_in_order_and_as_many_equal_ones_as_there_can_be(
    opened: Opened, others: tuple[str, str]
) -> None:
    page = opened.page
    choose(page, "document", others[0])
    choose(page, "compare", others[1])
    documents = tokens()["document"].unique().tolist()
    names = [documents[number] for number in sorted(map(int, others))]
    columns = columns_of(opened.values("grid"), names)
    texts = [tokens().query(f"document == '{name}'")["token"].tolist() for name in names]
    for side, text in enumerate(texts):
        assert [column[side] for column in columns if column[side] is not None] == list(range(len(text)))
    equal = [one is not None and other is not None and texts[0][one] == texts[1][other] for one, other in columns]
    assert sum(equal) == common_length(*texts)
    for (one, other), (next_one, next_other) in pairwise(columns):
        # A token that only one text has stands beside one that only the other has.
        assert not (one is None and next_other is None)
        assert not (other is None and next_one is None)


@pytest.mark.parametrize("method", ["parts", "attention", "attnresln_n"])
def test_values_colours_and_differences_are_those_of_the_files(opened: Opened, method: str) -> None:
    page = opened.page
    choose(page, "document", "1")
    choose(page, "compare", "2")
    choose(page, "share", method)
    page.locator("#words").press("Escape")
    documents = tokens()["document"].unique().tolist()
    one, other = (share_from_others("finetuned", name, method) for name in documents[1:])
    picture, image = drawn(page), pixels(page)
    size = picture["width"], picture["height"]
    starts = [int(tokens().query(f"document == '{name}'").index[0]) for name in documents]
    rows = opened.values("grid")
    columns = columns_of(rows, documents[1:])
    for row in rows:
        layer = int(row["layer"]) - 1
        cells = list(row.values())
        first, second, difference = cells[4], cells[7], cells[8]
        values = [
            values[layer, int(row[f"position in {name}"])] if row[f"position in {name}"] else None
            for name, values in zip(documents[1:], (one, other), strict=True)
        ]
        assert [float(each) if each else None for each in (first, second)] == pytest.approx(values, abs=2e-4)
        # The two texts have few tokens in common: other tokens share a column by chance, and are not compared.
        are_same = None not in values and row[f"token in {documents[1]}"] == row[f"token in {documents[2]}"]
        expected = values[1] - values[0] if are_same else None
        assert (float(difference) if difference else None) == pytest.approx(expected, abs=4e-4)
    by_token = {(cell["token"], cell["isDifference"], cell["layer"]): cell for cell in picture["cells"]}
    for (first, second), layer in ((column, layer) for column in columns for layer in (1, 2, 3)):
        if first is None or second is None:
            continue
        values = one[layer - 1, first], other[layer - 1, second]
        places = [(starts[1] + first, False, values[0]), (starts[2] + second, False, values[1])]
        if tokens()["token"][starts[1] + first] == tokens()["token"][starts[2] + second]:
            places.append((starts[1] + first, True, (values[1] - values[0]) / DIFFERENCE_LIMIT))
        for token, is_difference, place in places:
            found = colour_of(image, by_token[token, is_difference, layer], size)
            assert distance(lab(linear(found)), shade(place)) < ALIKE


def test_two_texts_that_are_alike_open_side_by_side_with_what_differs_said(pair: Compared) -> None:
    page = pair.page
    chosen = {page.locator(f"#{name}").input_value() for name in ("document", "compare")}
    assert chosen == {"0", "1"}
    titles = page.locator(".levels b").all_inner_texts()
    assert titles == [f"text/0: {PAIR[0]}", f"text/1: {PAIR[1]}", "Difference: text/1 minus text/0"]
    assert page.locator("#unlike").inner_text() == (
        "Tokens that differ (framed), in 2 of 12 columns: “not” in text/0, nothing in text/1; "
        "“not” in text/1, nothing in text/0."
    )
    layer = int(page.locator("#layer").input_value())
    means = [100 * float(each[layer - 1].mean()) for each in pair.shares]
    assert numbers_in(page.locator("#whole").inner_text()) == pytest.approx([*means, means[1] - means[0]], abs=0.06)
    # Both without the word "not".
    one, other = (
        np.delete(shares, names.index("not"), axis=1) for shares, names in zip(pair.shares, pair.names, strict=True)
    )
    difference = 100 * (other - one)
    largest = np.sort(np.abs(difference).max(axis=0))[::-1]
    listed = page.locator("#largest button").all_inner_texts()
    numbers = [numbers_in(text)[-1] for text in listed]
    assert np.abs(numbers).tolist() == pytest.approx(largest[: len(listed)].tolist(), abs=0.06)
    column = int(np.abs(difference).max(axis=0).argmax())
    page.locator("#largest button").first.click()
    assert page.locator("#layer").input_value() == str(1 + int(np.abs(difference[:, column]).argmax()))
    text = page.locator("#chosen-text").inner_text()
    row = int(page.locator("#layer").input_value()) - 1
    assert f"{100 * one[row, column]:.1f}% in text/0, {100 * other[row, column]:.1f}% in text/1" in text
    assert "The largest sources in the input, text/1, are" in text


def test_token_of_either_text_is_chosen_while_the_picture_stays(pair: Compared) -> None:
    page = pair.page
    choose(page, "document", "0")
    page.locator("#grid-canvas").focus()
    page.keyboard.press("Home")
    titles = page.locator(".levels b").all_inner_texts()
    places = []
    for key in ("ArrowRight", "ArrowUp", *["ArrowDown"] * 3, "End", "ArrowLeft"):
        page.keyboard.press(key)
        places.append((page.locator("#document").input_value(), page.locator("#selected b").inner_text()))
        assert page.locator(".levels b").all_inner_texts() == titles
    assert places[:2] == [("0", "the")] * 2
    assert places[4] == ("1", "the")  # below the first layer of one text are the rows of the other
    assert places[5:] == [("1", "[SEP]"), ("1", "great")]
    assert page.locator("#compare").input_value() == "0"
    page.keyboard.press("ArrowLeft")
    assert page.locator("#chosen-text").inner_text().startswith("“not” after layer")
    assert "In text/0, no token stands in this column." in page.locator("#chosen-text").inner_text()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    assert page.locator("#document").input_value() == "0"  # at the token nearest to the gap
    assert page.locator("#selected b").inner_text() in ("was", "great")


def test_link_back_and_choice_of_the_text_to_compare_with(pair: Compared) -> None:
    page = pair.page
    choose(page, "document", "0")
    choose(page, "compare", "null")
    assert page.locator(".levels b").all_inner_texts() == ["The model as it is"]
    assert page.locator("#differences").count() == 0
    page.wait_for_function("() => location.hash.includes('compare=null')")
    page.reload()
    page.wait_for_selector(WHOLE, state="attached")
    assert page.locator("#compare").input_value() == "null"
    choose(page, "compare", "1")
    page.go_back()
    page.wait_for_function("() => document.getElementById('compare').value === 'null'")
    page.goto("about:blank")
    page.goto(f"{pair.path.resolve().as_uri()}#document=1")  # whose sender's page opened with other choices
    page.wait_for_selector(WHOLE, state="attached")
    assert (page.locator("#document").input_value(), page.locator("#compare").input_value()) == ("1", "0")


def test_text_chosen_in_place_of_the_other_changes_places_with_it(opened: Opened) -> None:
    page = opened.page
    choose(page, "document", "0")
    choose(page, "compare", "2")
    choose(page, "document", "2")
    assert page.locator("#compare").input_value() == "0"
    choose(page, "document", "1")
    assert page.locator("#compare").input_value() == "0"
    assert page.locator("#compare option").evaluate_all("all => all.map(each => each.value)") == ["null", "0", "2"]


def test_texts_that_are_not_alike_open_alone(tmp_path: Path, chromium: Any) -> None:
    compared = Compared(UNLIKE, tmp_path, chromium)
    assert compared.page.locator("#compare").input_value() == "null"
    choose(compared.page, "compare", "1")
    said = compared.page.locator("#unlike").inner_text()
    columns = len(compared.names[1])  # [CLS], eleven tokens, [SEP]
    assert f"The same token stands in both in 2 of {columns} columns; differences by column are of these only." in said
    listed = compared.page.locator("#largest button bdi").all_inner_texts()
    assert sorted(listed) == ["[CLS]", "[SEP]"]
    differences = [row for row in compared.opened.values("grid") if list(row.values())[8]]
    assert {row["layer"] for row in differences} == {"1", "2", "3"}
    assert len(differences) == 2 * 3  # of the two tokens in each layer
    compared.opened.close()


@pytest.mark.parametrize(
    ("scheme", "forced", "width"), [("light", "none", 1280), ("dark", "none", 400), ("light", "active", 768)]
)
def test_comparison_is_accessible_and_whole_on_every_screen(
    tmp_path: Path, chromium: Any, scheme: str, forced: str, width: int
) -> None:
    looks = {"color_scheme": scheme, "forced_colors": forced, "bypass_csp": True, "reduced_motion": "reduce"}
    compared = Compared(PAIR, tmp_path, chromium, viewport={"width": width, "height": 720}, **looks)
    page = compared.page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert not page.locator(".grid-box").evaluate(ARE_CUT)
    assert violations(page) == []
    if width == 1280:
        box = page.locator("#grid-canvas").bounding_box()
        assert box["y"] + box["height"] <= 720  # both texts and their difference on the first screen
    compared.opened.close()


def test_stretched_difference_names_its_largest(pair: Compared) -> None:
    page = pair.page
    legend = page.locator("#difference-legend")
    said = re.sub(r"\s+", " ", legend.inner_text())
    sides = "left, more in text/0; right, more in text/1"
    assert said == f"{MINUS}25 +25 percentage points: {sides} (full colour from 25 on)."
    page.get_by_label("Stretch colours").check()
    one, other = (
        np.delete(shares, names.index("not"), axis=1) for shares, names in zip(pair.shares, pair.names, strict=True)
    )
    most = 100 * float(np.abs(other - one).max())
    numbers = [float(each) for each in re.findall(r"\d+\.\d", legend.inner_text())]
    assert numbers == pytest.approx([most, most], abs=0.06)


def test_saved_picture_has_the_frames_of_the_tokens_that_differ(pair: Compared) -> None:
    _, content = pair.opened.file("grid", "SVG")
    text = content.decode("utf-8")
    frames = re.findall(r'<rect [^>]*fill="none"[^>]*stroke="#1a1e26"[^>]*stroke-width="1.5"', text)
    assert len(frames) == 2
    assert "Difference: text/1 minus text/0" in text

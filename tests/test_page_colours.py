"""Colours in the same picture can be distinguished, even by people with deuteranopia, and are readable on the page."""

from __future__ import annotations

import re
from itertools import combinations, product

import numpy as np
import pytest
from colours import contrast, distance, lab, linear, without_green_cones
from conftest import REPOSITORY

from attnmix.figures.labels import CURVE_LOOKS, LESS_COLOURS, SHARE_COLOURS, TEXT_COLOURS

LEAST_DISTANCE = 12  # in CIEDE2000: a distance of 2 is visible only between adjacent areas, not between lines or dots
PICTURES = {
    "charts": ("before", "after", "shared", "shuffled", "mark", "random", "ink"),
    "text and picture of layers": ("took", "gave", "mark", "ink"),
    "heads": ("after", "took", "mark", "ink"),
}


SCRIPT = (REPOSITORY / "attnmix/page/src/colours.ts").read_text("utf-8")
RINGS = ("mark", "took", "ink")  # colours of the rings around dots of the map


def kinds(theme: str) -> list[str]:
    """Return the colours that the map uses for texts, classes and kinds of tokens."""
    table = SCRIPT.partition("const KINDS")[2].partition("};")[0]
    return re.findall(r"#[0-9a-f]{6}", table.partition(f"{theme}:")[2].partition("]")[0])


def are_far_apart(one: str, other: str) -> bool:
    """Return True if two colours can be distinguished, both with normal vision and with deuteranopia."""
    pair = linear(one), linear(other)
    seen_without = [without_green_cones(each) for each in pair]
    return min(distance(*map(lab, pair)), distance(*map(lab, seen_without))) > LEAST_DISTANCE


def themes() -> dict[str, dict[str, str]]:
    """Return the colours of the light and the dark page, by theme and name."""
    style = (REPOSITORY / "attnmix/page/page.css").read_text("utf-8")
    light, dark = re.findall(r"--paper: [^}]*", style)[:2]
    named = re.compile(r"--([\w-]+): (#[0-9a-f]{3,6});")
    colours = {name: dict(named.findall(text)) for name, text in (("light", light), ("dark", dark))}
    colours["light"]["paper"] = "#ffffff"
    return colours


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("picture", list(PICTURES))
def test_picture_colours_are_distinguishable_and_readable(theme: str, picture: str) -> None:
    colours = themes()[theme]
    for one, other in combinations(PICTURES[picture], 2):
        assert are_far_apart(colours[one], colours[other]), (one, other)
    for name in PICTURES[picture]:
        assert contrast(colours[name], colours["paper"]) >= 4.5, name  # the minimum for text in WCAG (AA)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_map_colours_are_distinguishable(theme: str) -> None:
    colours, dots = themes()[theme], kinds(theme)
    assert len(dots) == 8
    pairs = [*combinations(dots, 2), *product(dots, [colours[name] for name in RINGS])]
    assert [pair for pair in pairs if not are_far_apart(*pair)] == []
    assert min(contrast(dot, colours["paper"]) for dot in dots) >= 3  # the minimum for graphics in WCAG (AA)


def test_figures_use_page_colours() -> None:
    light = themes()["light"]
    names = {"pretrained": "before", "finetuned": "after", "text_mean_value": "shared"}
    names |= {"corpus_value": "shared", "shuffled_words": "shuffled", "random_weights": "random"}
    assert {each: colour for each, (colour, _) in CURVE_LOOKS.items()} == {key: light[on] for key, on in names.items()}
    scale = re.search(r"light: \{ more: \[(.*?)\], less: \[(.*?)\]", SCRIPT)
    assert scale
    assert [light["paper"], *re.findall(r"#\w{6}", scale[1])] == list(SHARE_COLOURS)
    assert re.findall(r"#\w{6}", scale[2]) == list(LESS_COLOURS)
    assert kinds("light") == list(TEXT_COLOURS)


def test_charts_use_only_checked_colours() -> None:
    script = (REPOSITORY / "attnmix/page/src/curves.tsx").read_text("utf-8")
    names = re.search(r"const COLOURS = \[([^\]]*)\]", script)
    assert names
    assert set(re.findall(r'"(\w+)"', names[1])) == set(PICTURES["charts"])


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [  # test data published by Sharma, Wu and Dalal
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((50, -1, 2), (50, 0, 0), 2.3669),
        ((50, 2.5, 0), (73, 25, -18), 27.1492),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
        ((2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514), 0.9082),
    ],
)
def test_distance_matches_published_values(one: tuple[float, ...], other: tuple[float, ...], expected: float) -> None:
    assert distance(np.array(one), np.array(other)) == pytest.approx(expected, abs=1e-4)

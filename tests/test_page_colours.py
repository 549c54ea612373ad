"""Colours of the page that share a picture can be told apart, without green cones too, and read on the page."""

from __future__ import annotations

import re
from itertools import combinations

import numpy as np
import pytest
from colours import contrast, distance, lab, linear, without_green_cones
from conftest import REPOSITORY

LEAST_DISTANCE = 12  # of CIEDE2000; 2 is just seen where colours touch, lines and dots are far apart
PICTURES = {
    "charts": ("before", "after", "shared", "shuffled", "mark", "random", "ink"),
    "text and picture of layers": ("took", "gave", "mark", "ink"),
    "heads": ("after", "took", "mark", "ink"),
}


def themes() -> dict[str, dict[str, str]]:
    """Return the colours of the light and the dark page, by name."""
    style = (REPOSITORY / "attnmix/page/page.css").read_text("utf-8")
    light, dark = re.findall(r"--paper: [^}]*", style)[:2]
    named = re.compile(r"--([\w-]+): (#[0-9a-f]{3,6});")
    colours = {name: dict(named.findall(text)) for name, text in (("light", light), ("dark", dark))}
    colours["light"]["paper"] = "#ffffff"
    return colours


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("picture", list(PICTURES))
def test_every_two_colours_of_a_picture_are_far_apart_and_readable(theme: str, picture: str) -> None:
    colours = themes()[theme]
    for one, other in combinations(PICTURES[picture], 2):
        pair = linear(colours[one]), linear(colours[other])
        assert distance(*map(lab, pair)) > LEAST_DISTANCE, (one, other)
        assert distance(*(lab(without_green_cones(each)) for each in pair)) > LEAST_DISTANCE, (one, other)
    for name in PICTURES[picture]:
        assert contrast(colours[name], colours["paper"]) >= 4.5, name


def test_charts_draw_with_no_other_colours() -> None:
    script = (REPOSITORY / "attnmix/page/src/curves.tsx").read_text("utf-8")
    names = re.search(r"const COLOURS = \[([^\]]*)\]", script)
    assert names
    assert set(re.findall(r'"(\w+)"', names[1])) == set(PICTURES["charts"])


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [  # of the data that Sharma, Wu and Dalal published to check implementations
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((50, -1, 2), (50, 0, 0), 2.3669),
        ((50, 2.5, 0), (73, 25, -18), 27.1492),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
        ((2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514), 0.9082),
    ],
)
def test_distance_is_the_published_one(one: tuple[float, ...], other: tuple[float, ...], expected: float) -> None:
    assert distance(np.array(one), np.array(other)) == pytest.approx(expected, abs=1e-4)

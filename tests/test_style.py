"""What all figures share: fonts that printers take, colours that stand out on white, labels beside curves."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure

from attnmix.core.names import Mark
from attnmix.figures.labels import POINT_MARKS, RATIO_MARKS, STEP_MARKS, WORD_MARKS
from attnmix.figures.style import (
    darken_for_contrast,
    high_contrast_cmap,
    label_curves,
    paper_style,
    printable,
    save_figure,
)

COLORS = {mark.color for marks in (POINT_MARKS, STEP_MARKS, RATIO_MARKS) for mark in marks.values()}


def contrast_to_white(color: str) -> float:
    """WCAG 2.2's definition, from its text."""
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 1.05 / (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05)


@pytest.mark.parametrize("least", [3.0, 4.5])
@pytest.mark.parametrize("color", sorted(COLORS | {color for color, _ in WORD_MARKS}))
def test_colours_stand_out_on_white_and_keep_their_hue(color: str, least: float) -> None:
    shown = darken_for_contrast(color, least)
    assert contrast_to_white(shown) >= least
    if contrast_to_white(color) >= 1.02 * least:
        assert shown == color.lower()
    hues = [mpl.colors.rgb_to_hsv(mpl.colors.to_rgb(each))[0] for each in (color, shown)]
    assert hues[0] == pytest.approx(hues[1], abs=0.06)


@pytest.mark.parametrize("name", ["Greys", "Blues", "Oranges"])
def test_shades_of_colour_maps_stand_out_on_white(name: str) -> None:
    shades = [mpl.colors.to_hex(color) for color in high_contrast_cmap(name)(np.linspace(0, 1, 50))]
    assert min(map(contrast_to_white, shades)) > 2.95
    assert max(map(contrast_to_white, shades)) > 9


def test_text_stays_text_in_a_font_that_printers_take(tmp_path: Path) -> None:
    with paper_style():
        figure = Figure(figsize=(2, 1))
        figure.text(0.1, 0.5, "Mixing, café, фильм ␣")
        save_figure(figure, tmp_path / "figure", ["pdf", "svg"], 100)
    pdf = (tmp_path / "figure.pdf").read_bytes()
    assert set(re.findall(rb"/BaseFont /[A-Z]{6}\+([A-Za-z-]+)", pdf)) == {b"Arimo-Regular", b"DejaVuSans"}
    assert b"/Type3" not in pdf
    assert pdf.count(b"/FontFile2") > 0
    svg = (tmp_path / "figure.svg").read_text(encoding="utf-8")
    assert ">Mixing, café, фильм ␣<" in svg
    assert "font-family: 'Arimo', Helvetica, Arial" in svg


def test_labels_of_curves_stand_at_their_ends_in_order_and_apart() -> None:
    with paper_style():
        figure = Figure(figsize=(3, 2))
        panels = figure.subplots(1, 2)
        figure.subplots_adjust(right=0.8, wspace=0.6)
        heights, names = [0.5, 0.51, 0.52, 0.0, 1.0], ["one", "two\nlines", "three", "last", "first"]
        for height, name in zip(heights, names, strict=True):
            panels[0].plot([1, 6], [0.5, height], color="#0072b2", label=name)
        panels[0].set(xlim=(1, 6), ylim=(0, 1))
        for axes in panels:  # there is nothing in the second
            label_curves(axes)
        figure.draw_without_rendering()
        boxes = sorted(
            ((note.get_text(), mpl.text.Text.get_window_extent(note)) for note in panels[0].texts),
            key=lambda each: each[1].y0,
        )
        panel, neighbour = panels[0].get_window_extent(), panels[1].get_window_extent()
    assert [name for name, _ in boxes] == ["last", "one", "two\nlines", "three", "first"]
    assert all(below.y1 <= above.y0 for (_, below), (_, above) in pairwise(boxes))
    for _, box in boxes:
        assert panel.x1 < box.x0 < box.x1 < neighbour.x0
        assert panel.y0 - 1 <= box.y0 < box.y1 <= panel.y1 + 1


@pytest.mark.parametrize("marks", [POINT_MARKS, STEP_MARKS])
def test_no_two_points_and_no_two_steps_look_alike(marks: dict[str, Mark]) -> None:
    assert len({mark.marker for mark in marks.values()}) == len({mark.label for mark in marks.values()}) == len(marks)


def test_characters_that_no_font_has_become_code_points() -> None:
    with paper_style():
        assert printable("caf\u00e9 \u4f60\x00") == "caf\u00e9 <U+4F60><U+0000>"

"""The page for everyone: no violation that axe finds, targets and marks that can be hit and seen, forced colours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from browser import Opened, violations
from page_run import choose, open_values, tokens

from attnmix.store.runs import Run

SMALLEST = 24  # CSS pixels of a target, WCAG 2.5.8
LIGHTNESS = """colour => { const parts = colour.match(/[\\d.]+/g).slice(0, 3).map(each => each / 255).map(
    each => each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]; }"""


@pytest.mark.parametrize(
    ("scheme", "width"),
    [
        ("light", 1400),
        ("dark", 400),
        pytest.param("dark", 1400, marks=pytest.mark.long),
        pytest.param("light", 400, marks=pytest.mark.long),
    ],
)
def test_axe_finds_no_violation(run: Path, chromium: Any, scheme: str, width: int) -> None:
    size = {"width": width, "height": 900}
    shown = Opened(chromium, Run(run).page, viewport=size, color_scheme=scheme, bypass_csp=True)
    page = shown.page
    page.locator("#token-3").click()
    choose(page, "beside-choice", "pretrained")
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    page.wait_for_function("() => document.querySelectorAll('.files details[open] table').length > 2")
    assert violations(page) == []
    shown.close()


@pytest.mark.parametrize("width", [1400, 400])
def test_targets_are_large_enough(run: Path, chromium: Any, width: int) -> None:
    shown = Opened(chromium, Run(run).page, viewport={"width": width, "height": 900})
    shown.page.locator("#token-3").click()
    small = shown.page.evaluate(
        """smallest => [...document.querySelectorAll('button, select, input, nav a, summary, [role=option], .lists li')]
        .filter(each => each.checkVisibility() && !each.closest('.modebar'))
        .map(each => [each.id || each.textContent, each.getBoundingClientRect()])
        .filter(([, box]) => Math.min(box.width, box.height) < smallest && box.width > 1)
        .map(([name, box]) => `${name}: ${box.width} x ${box.height}`)""",
        SMALLEST - 0.01,
    )
    assert small == []
    shown.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_lines_and_marks_stand_out_from_the_ground(run: Path, chromium: Any, scheme: str) -> None:
    shown = Opened(chromium, Run(run).page, color_scheme=scheme)
    looks = shown.page.evaluate(
        f"""() => {{ const lightness = {LIGHTNESS};
        const style = getComputedStyle(document.documentElement);
        const drawn = document.createElement('i');
        document.body.append(drawn);
        return Object.fromEntries(['paper', 'panel', 'took', 'gave', 'mark', 'edge', 'soft', 'accent'].map(name => {{
            drawn.style.color = style.getPropertyValue(`--${{name}}`);
            return [name, lightness(getComputedStyle(drawn).color)]; }})); }}"""
    )
    grounds = [looks.pop("paper"), looks.pop("panel")]
    for name, light in looks.items():
        for ground in grounds:
            low, high = sorted((light, ground))
            assert (high + 0.05) / (low + 0.05) >= 3, name
    shown.close()


def test_forced_colours_leave_sources_their_lines(run: Path, chromium: Any) -> None:
    shown = Opened(chromium, Run(run).page, forced_colors="active")
    page = shown.page
    page.locator("#token-3").click()
    lines = page.locator("#words span").evaluate_all(
        "all => all.map(each => [each.classList.contains('took'), getComputedStyle(each).borderBottomWidth])"
    )
    assert {took for took, _ in lines} == {True, False}
    assert all((width != "0px") == took for took, width in lines)
    shown.close()


def test_nothing_moves_by_itself_where_motion_is_reduced(run: Path, chromium: Any) -> None:
    shown = Opened(chromium, Run(run).page, reduced_motion="reduce")
    shown.traces("map-chart")
    last = shown.page.locator("#point").get_attribute("max")
    moves = """value => { const slider = document.getElementById("point"), chart = document.getElementById("map-chart");
        slider.value = value; slider.dispatchEvent(new Event("input", { bubbles: true }));
        return "moving" in chart.dataset; }"""
    assert not shown.page.evaluate(moves, last)
    shown.page.emulate_media(reduced_motion="no-preference")
    assert shown.page.evaluate(moves, "0")
    shown.close()


def test_what_a_tooltip_says_is_also_in_the_values(opened: Opened) -> None:
    page = opened.page
    values = open_values(page, "words")
    titles = page.locator("#words span").evaluate_all("all => all.map(each => each.title)")
    rows = values.locator("tbody tr")
    assert rows.count() == (tokens()["document"] == "test/0").sum()
    cells = [row.split("\t") for row in rows.all_inner_texts()]
    for title, (position, _, share) in zip(titles, cells, strict=True):
        assert f"position {position}, " in title
        assert title.endswith(f"share from others {100 * float(share):.0f} %")


def test_controls_that_leave_no_choice_are_not_shown(opened: Opened) -> None:
    for each in opened.page.locator("select:visible").all():
        assert each.locator("option").count() != 1, each.get_attribute("id")  # none yet where it was not seen yet

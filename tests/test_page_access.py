"""The page for everyone: no violation that axe finds, targets and marks that can be hit and seen, forced colours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from browser import Opened, violations
from page_run import choose

from attnmix.store.runs import Run

SMALLEST = 24  # CSS pixels of a target, WCAG 2.5.8


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

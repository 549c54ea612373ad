"""Two texts' maps beside each other: in one plane, through one zoom, moved by one slider."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Opened
from page_run import choose, tokens

from attnmix.store.runs import Run


@pytest.fixture
def pair(run: Path, chromium: Any) -> Iterator[Opened]:
    """test/0 with test/1 beside it."""
    opened = Opened(chromium, Run(run).page, viewport={"width": 1400, "height": 900}, reduced_motion="reduce")
    opened.page.locator("nav a[href='#map']").click()  # which draws all that is above
    choose(opened.page, "map-beside", "1")
    yield opened
    opened.close()


def drawn(opened: Opened) -> dict[str, dict[str, Any]]:
    return {trace["name"]: trace for trace in opened.traces("map-chart")}


def box_of(page: Any, half: int) -> dict[str, float]:
    """A half of the map in the middle of the screen."""
    canvas = page.locator("#map-chart canvas").nth(half)
    canvas.evaluate("each => each.scrollIntoView({ block: 'center' })")
    box: dict[str, float] = canvas.bounding_box()
    return box


def of_text(number: int) -> list[int]:
    return np.flatnonzero(tokens()["document"] == f"test/{number}").tolist()


def places(layer: int, point: str) -> Any:
    """Of all tokens on the joint map."""
    return Run(Path()).map("joint").query("layer == @layer and point == @point")[["x", "y"]].to_numpy()


def test_each_half_has_its_text_in_one_plane_and_the_slider_moves_both(pair: Opened) -> None:
    for slider, layer, point in (("1", 0, "embedding_output"), ("6", 1, "layer_output")):
        pair.page.locator("#point").fill(slider)
        found = drawn(pair)
        assert found["tokens"]["tokens"] == of_text(0)
        assert found["beside"]["tokens"] == of_text(1)
        numbers = [*of_text(0), *of_text(1)]
        at = np.array([[*found["tokens"][axis], *found["beside"][axis]] for axis in "xy"]).T
        expected = places(layer, point)
        np.testing.assert_allclose(at, expected[numbers], atol=1e-3 * np.ptp(expected))
        pixels = np.array([*found["tokens"]["pixels"], *found["beside"]["pixels"]])
        scales = [np.polyfit(at[:, axis], pixels[:, axis], 1) for axis in (0, 1)]
        for axis in (0, 1):
            np.testing.assert_allclose(np.polyval(scales[axis], at[:, axis]), pixels[:, axis], atol=0.1)
        assert scales[0][0] == pytest.approx(-scales[1][0], rel=1e-3)
    assert pair.page.locator("#map-chart canvas").count() == 2
    sizes = [canvas.bounding_box() for canvas in pair.page.locator("#map-chart canvas").all()]
    assert [sizes[0][key] for key in ("y", "width", "height")] == [sizes[1][key] for key in ("y", "width", "height")]


def test_a_token_of_the_other_text_is_told_and_selected_and_the_two_change_places(pair: Opened) -> None:
    page = pair.page
    found = drawn(pair)["beside"]
    box = box_of(page, 1)
    x, y = found["pixels"][0]
    page.mouse.move(box["x"] + x, box["y"] + y)
    assert "of test/1" in page.locator("#map-tip").inner_text()
    page.mouse.click(box["x"] + x, box["y"] + y)
    assert "of test/1" in page.locator("#selected").inner_text()
    assert page.locator("#document").input_value() == "1"
    assert page.locator("#map-beside").input_value() == "0"
    assert drawn(pair)["beside"]["tokens"] == of_text(0)


def test_either_half_is_dragged_and_both_move(pair: Opened) -> None:
    page = pair.page
    for half in (0, 1):
        before = drawn(pair)
        box = box_of(page, half)
        start = box["x"] + 20, box["y"] + box["height"] / 3
        page.mouse.move(*start)
        page.mouse.down()
        page.mouse.move(start[0] + 30, start[1] + 40, steps=3)
        page.mouse.up()
        after = drawn(pair)
        for name in ("tokens", "beside"):
            moved = np.subtract(after[name]["pixels"], before[name]["pixels"])
            np.testing.assert_allclose(moved, np.broadcast_to([30, 40], moved.shape), atol=0.01)


def test_a_model_has_no_map_beside_and_that_is_said(pair: Opened) -> None:
    page = pair.page
    assert page.locator("#map-beside option").evaluate_all("all => all.map(each => each.value)") == ["none", "1", "2"]
    assert page.locator("#everyone").is_disabled()
    choose(page, "beside-choice", "pretrained")
    assert page.locator("#map-note").inner_text() == "Maps are of the fine-tuned model alone."
    assert page.locator("#map-chart canvas").count() == 1
    assert page.locator("#map-beside").input_value() == "none"
    choose(page, "beside-choice", "none")
    assert page.locator("#map-note").inner_text() == ""
    assert page.locator("#everyone").is_enabled()

"""Maps, figures and page of models of other families: what they have is shown, and nothing that they have not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from browser import Opened
from conftest import write_parameters
from family_runs import BESIDE_AN_ENCODER, OTHER_WIDTHS, PARALLEL, PRE_LN, FamilyRun, write_family_run

from attnmix.core.points import Site
from attnmix.maps.layouts import fit_map
from attnmix.store import features as store
from attnmix.store.layout import ACTIVATIONS
from attnmix.store.runs import Run, map_sites
from stages import reduce, render
from stages.common.parameters import read_parameters

TEXT = "The film wasn\u2019t dull, but the café film \U0001f600… was: ⏎ The end of the film."


def finished(folder: Path, family: FamilyRun) -> Path:
    """A folder in which the stages ran for a family, from `reduce` on."""
    write_parameters(
        folder,
        capture={"documents": [], "texts": ["The film was dull."]},
        umap={"stability_seeds": [3]},
        render={"formats": ["svg"], "dpi": 50},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_family_run(family)
        reduce.main(read_parameters())
        render.main(read_parameters())
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[FamilyRun], Path]:
    """Every family is run once."""
    folders: dict[FamilyRun, Path] = {}

    def find(family: FamilyRun) -> Path:
        if family not in folders:
            folders[family] = finished(tmp_path_factory.mktemp("family"), family)
        return folders[family]

    return find


@pytest.fixture
def opened(
    run: Callable[[FamilyRun], Path], chromium: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[FamilyRun], Opened]]:
    """The page of a family, its folder the current one; at the end no page may have complained."""
    shown: list[Opened] = []

    def show(family: FamilyRun) -> Opened:
        monkeypatch.chdir(run(family))
        shown.append(Opened(chromium, Run(Path()).page, viewport={"width": 1400, "height": 900}))
        return shown[-1]

    yield show
    for each in shown:
        each.close()


def choose(page: Any, label: str, option: str) -> None:
    page.locator(f"#{label}").select_option(option)


def options(page: Any, label: str) -> list[str]:
    found: list[str] = page.locator(f"#{label} option").evaluate_all("all => all.map(each => each.value)")
    return found


FAMILIES = {"pre_ln": PRE_LN, "parallel": PARALLEL, "widths": OTHER_WIDTHS, "beside": BESIDE_AN_ENCODER}


@pytest.mark.families
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_whatever_a_control_offers_is_shown(family: FamilyRun, opened: Callable[[FamilyRun], Opened]) -> None:
    shown = opened(family)
    page = shown.page
    page.locator("#token-3").click()
    assert options(page, "ratio-method") == list(family.ratios)
    assert [name for name in options(page, "matrix") if not name.endswith("_rollout")] == list(family.matrices)
    for matrix in options(page, "matrix"):
        choose(page, "matrix", matrix)
        assert 1 <= page.locator("#sources li").count() <= 3  # the three before it
    for method in family.ratios:
        choose(page, "ratio-method", method)
        assert shown.traces("mixing-chart")
    sites = map_sites(Run(Path()).map("separate"))
    assert len(sites) == len(family.sites())
    for layout in ("separate", "aligned", "joint"):
        choose(page, "layout", layout)
        for point in range(len(sites)):
            page.locator("#point").fill(str(point))
            there = family.widths.get(sites[point].point) is None or layout == "separate"
            tokens = [trace for trace in shown.traces("map-chart") if trace["name"] == "tokens"]
            assert sum(len(trace["x"]) for trace in tokens) == len(family.tokens) * there
            note = f"The {layout} layout leaves this capture point out."
            assert page.locator("#map-note").inner_text() == ("" if there else note)
    said = page.locator("body").inner_text()
    assert ("LayerNorm" in said) == ("attnresln_n" in family.ratios)
    assert "[CLS]" not in said
    assert "Ġ" not in said
    assert "NaN" not in said
    assert "undefined" not in said


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, id=name, marks=() if name == "beside" else pytest.mark.families)
        for name, each in FAMILIES.items()
    ],
)
def test_figures_name_what_the_family_has(
    family: FamilyRun, run: Callable[[FamilyRun], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run(family))
    drawn = {path.stem: path.read_text(encoding="utf-8") for path in Run(Path()).figures.glob("*.svg")}
    assert not [mark for mark in ("Ġ", "▁", "[CLS]", "##") if mark in "".join(drawn.values())]
    assert ">␣film<" in drawn["mixing_tokens_text_0"]
    for label, name in (("Attention", "attention"), ("Value Zeroing", "value_zeroing"), ("ALTI", "alti")):
        assert (f">{label}<" in drawn["mixing_contributions_text_0_finetuned"]) == (name in family.matrices)
    assert (">LayerNorm<" in drawn["mixing_steps"]) == ("attention_norm" in family.steps)
    assert (">Skip<" in drawn["mixing_steps"]) == ("attention_skip" in family.steps)
    assert (">Attention heads<" in drawn["mixing_steps"]) == ("attention_heads" not in family.widths)
    assert ">the<" in drawn["atlas"]
    for token in ("<s>", "</s>", "<bos>"):
        assert (f">{token.replace('<', '&lt;').replace('>', '&gt;')}<" in drawn["atlas"]) == (token in family.special)
    pages = [path.name for path in sorted((Run(Path()).figures / "joint").glob("*.svg"))]
    assert len(pages) == len([site for site in family.sites() if site.point not in family.widths])


def test_points_of_other_widths_are_on_their_own_maps_alone(
    run: Callable[[FamilyRun], Path],
    workspace: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(run(OTHER_WIDTHS))
    sites = OTHER_WIDTHS.sites()
    in_stream = [site for site in sites if site.point not in OTHER_WIDTHS.widths]
    assert map_sites(Run(Path()).map("separate")) == sites
    for layout in ("joint", "aligned"):
        assert map_sites(Run(Path()).map(layout)) == in_stream
    counted = Run(Path()).table("reduce/map_quality").groupby("layout")["points"].unique().map(list).to_dict()
    assert counted == {"joint": [len(in_stream)], "aligned": [len(in_stream)], "separate": [len(sites)]}
    features = {site: store.read_features(ACTIVATIONS, site).astype(np.float32) for site in sites}
    together = fit_map(np.concatenate([features[site] for site in in_stream]))
    assert np.array_equal(Run(Path()).map("joint")[["x", "y"]].to_numpy(), together)
    heads = Run(Path()).map("separate").query("layer == 2 and point == 'attention_heads'")[["x", "y"]].to_numpy()
    assert np.array_equal(heads, fit_map(features[Site(2, "attention_heads")]))
    assert set(Run(Path()).table("reduce/movement")["step"]) == {"attention", "ffn", "layer"}

    workspace(umap={"layouts": ["joint"], "stability_seeds": []})
    write_family_run(OTHER_WIDTHS)
    with caplog.at_level(logging.INFO):
        reduce.main(read_parameters())
    said = "without word_embedding (5), attention_heads (12), which are not as wide as the residual stream (8)"
    assert [message for message in caplog.messages if said in message] == [f"joint and aligned: {said}"]


def test_page_says_which_points_one_plane_cannot_hold(opened: Callable[[FamilyRun], Opened]) -> None:
    page = opened(OTHER_WIDTHS).page
    (note,) = page.locator("#map .note").all_inner_texts()
    assert note.startswith("Not on the joint and the aligned map: word embedding, attention heads.")
    assert page.locator("#point-name").inner_text().startswith("Layer 2")
    assert "no cosine to it" in page.locator("#steps").inner_text()
    assert page.locator("#words").inner_text().startswith("<bos> The film wasn\u2019t dull, but the café film ␣")


def test_a_decoder_is_shown_with_the_tokens_that_it_sees(opened: Callable[[FamilyRun], Opened]) -> None:
    shown = opened(BESIDE_AN_ENCODER)
    page = shown.page
    assert page.locator("#layer option").all_inner_texts() == ["Encoder 1", "Encoder 2", "Decoder 1", "Decoder 2"]
    for layer, text in (("1", f"<s> {TEXT} </s>"), ("3", f"</s> <s> {TEXT}")):
        choose(page, "layer", layer)
        assert page.locator("#words").inner_text() == text
    page.locator("#token-2").click()
    assert page.locator("#sources-title").inner_text() == "\u201cThe\u201d took from"
    assert "Selected: ␣film / The, position 2" in page.locator("#selected").inner_text()
    sites = map_sites(Run(Path()).map("joint"))
    choose(page, "shape", "words")
    for site, name, word in (
        (Site(2, "layer_output"), "Encoder 2: Layer output (", "␣film"),
        (Site(2, "decoder_embedding_output"), "Decoder embedding output (", "The"),
        (Site(3, "cross_attention_output"), "Decoder 1: Cross-attention output (", "The"),
    ):
        page.locator("#point").fill(str(sites.index(site)))
        assert page.locator("#point-name").inner_text().startswith(name)
        words = next(trace for trace in shown.traces("map-chart") if trace["name"] == "words")
        assert dict(zip(words["tokens"], words["text"], strict=True))[2] == word
    crossing = next(trace for trace in shown.traces("steps-chart") if trace["name"] == "Cross-attention")
    assert crossing["x"] == [3, 4]


def test_a_text_from_right_to_left_is_shown_so(opened: Callable[[FamilyRun], Opened]) -> None:
    film, good = "الفيلم", "رائع"
    special = {"[CLS]": "cls", "[SEP]": "sep"}
    tokens = ("[CLS]", film, good, "##ة", "IMAX", "[SEP]")
    page = opened(replace(PRE_LN, tokens=tokens, special=special, text=f"{film} {good}ة IMAX")).page
    places = [page.locator(f"#token-{token}").bounding_box()["x"] for token in range(len(tokens))]
    assert places == sorted(places, reverse=True)
    page.locator("#token-1").click()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#selected").inner_text() == f"Selected: {good}, position 2 of text/0"
    page.keyboard.press("ArrowRight")
    assert page.locator("#sources-title").inner_text() == f"\u201c{film}\u201d took from"
    assert page.locator("#sources-title bdi").inner_text() == film
    assert page.locator("#document option").inner_text() == f"text/0: \u2068{film} {good}ة IMAX\u2069 (6 tokens)"
    assert page.locator("#token-1").get_attribute("title").startswith(f"\u2068{film}\u2069, position 1")
    assert page.locator("p.raw").evaluate("each => getComputedStyle(each).direction") == "rtl"


@pytest.mark.parametrize("special", [{}, {"The": "cls"}])
def test_a_text_of_one_token_takes_from_nobody(
    tmp_path: Path, chromium: Any, monkeypatch: pytest.MonkeyPatch, special: dict[str, str]
) -> None:
    family = replace(PRE_LN, tokens=("The",), special=special)
    monkeypatch.chdir(finished(tmp_path, family))
    shown = Opened(chromium, Run(Path()).page)
    choose(shown.page, "shade", "ratio")
    assert shown.page.locator("#token-0").get_attribute("title") == "The, position 0, length ratio of others 0 %"
    assert pd.read_parquet("features/measure/tokens.parquet")["attn_n"].eq(0).all()
    assert (Run(Path()).figures / "mixing_tokens_text_0.svg").is_file()
    shown.close()

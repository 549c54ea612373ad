"""The pipeline creates all outputs that a family supports, and the page shows them.

One family is tested for each set of outputs.

`test_families.py` compares points, ratios, matrices and derivatives of all families with references. For one family of
each kind of layer, `test_second_device.py` compares the measures on two devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from browser import Opened
from conftest import plain_logits
from families import (
    ALGEBRAS,
    DECODER,
    FAMILIES,
    OWN_WIDTH,
    TEXTS,
    TOKENS,
    layer_algebra,
    run_family,
    tiny_family,
    write_family,
)
from page_run import choose
from pypdfium2 import PdfDocument
from transformers import AutoConfig, AutoTokenizer

from attnmix.core.names import (
    ACTIVATIONS,
    EMBEDDING_POINTS,
    INPUT_PARTS,
    LAYER_POINTS,
    LAYOUTS,
    ONE_PLANE,
    POINTS,
    Site,
)
from attnmix.core.store.features import open_store, stored_sites
from attnmix.core.store.runs import Run, map_sites
from attnmix.faithfulness.attributions import present_attributions
from attnmix.figures.maps import write_joint_pages
from attnmix.measures.input_parts import parts_obstacle
from attnmix.measures.matrices import LAYER_MATRICES, MATRICES
from attnmix.measures.ratios import RATIOS
from attnmix.models.families import Family, family_of
from attnmix.models.loading import load_base, load_classifier

pytestmark = pytest.mark.families  # each family in `PIPELINES` needs a pipeline run with a page


def shown_content(name: str) -> tuple[object, ...]:
    """Return the quantities that the figures and the page show for a family, and the kind of its tokenizer.

    The kind of tokenizer determines which tokens start a word."""
    family = tiny_family(name)
    quantities = frozenset([*family.present([*POINTS, *RATIOS, *MATRICES]), *present_attributions(family)])
    return quantities, parts_obstacle(family) is None, len(family.stacks), TOKENS[name].kind


def one_of_each_content() -> list[str]:
    """Return one family for each value of `shown_content`.

    The family is `OWN_WIDTH` if it has this value, otherwise the family with the most norms and special properties.
    """

    def preference(name: str) -> tuple[bool, int]:
        return name != OWN_WIDTH, -sum(map(len, layer_algebra(tiny_family(name))))

    chosen: dict[tuple[object, ...], str] = {}
    for name in sorted(ALGEBRAS, key=preference):
        chosen.setdefault(shown_content(name), name)
    return sorted(chosen.values(), key=FAMILIES.index)


PIPELINES = one_of_each_content()


def test_a_pipeline_runs_on_every_kind_of_tokenizer() -> None:
    assert {OWN_WIDTH, DECODER} <= set(PIPELINES)
    assert {TOKENS[name].kind for name in PIPELINES} == {tokens.kind for tokens in TOKENS.values()}


@pytest.fixture(scope="module", params=PIPELINES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def family(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    """Yield a family, with the folder of its run as the current folder."""
    folder = tmp_path_factory.mktemp(name)
    write_family(name, folder / "model")
    # Layouts contain different points only if the points have different widths.
    run_family(folder, *([LAYOUTS] if name == OWN_WIDTH else []))
    with chdir(folder):
        yield family_of(AutoConfig.from_pretrained("model"))


@pytest.fixture
def shown(family: Family, chromium: Any) -> Iterator[Opened]:
    """Yield the page of the family, and assert at the end that it logged no errors."""
    opened = Opened(chromium, Run(Path()).page, viewport={"width": 1400, "height": 900}, reduced_motion="reduce")
    yield opened
    opened.close()


def points_of_other_widths() -> set[str]:
    """Return the points whose vectors have a different width than the residual stream."""
    widths = {site.point: open_store(ACTIVATIONS, site).shape[1] for site in stored_sites(ACTIVATIONS)}
    return {point for point, width in widths.items() if width != widths["layer_output"]}


def options(page: Any, label: str) -> list[str]:
    values: list[str] = page.locator(f"#{label} option").evaluate_all("all => all.map(each => each.value)")
    return values


def test_stages_write_outputs_of_the_family(name: str, family: Family) -> None:
    layers = AutoConfig.from_pretrained("model").num_hidden_layers * len(family.stacks)
    points = {layer: {site.point for site in stored_sites(ACTIVATIONS) if site.layer == layer} for layer in range(5)}
    in_layers = set(family.present(LAYER_POINTS))
    assert points[0] == set(family.present(EMBEDDING_POINTS))
    assert points[layers] == in_layers
    assert points[1] == {point for point in in_layers if not point.startswith("cross")}
    assert all(points[layer] for layer in range(layers))
    mixing = pd.read_csv("reports/plots/measure/mixing.csv")
    assert set(mixing["method"]) == set(family.present(RATIOS))
    assert set(mixing["layer"]) == set(range(1, layers + 1))
    assert mixing.query("checkpoint != 'difference'")["mean"].between(0, 1).all()
    run = Run(Path())
    assert set(run.ratios().columns) & set(RATIOS) == set(family.present(RATIOS))
    assert set(run.matrices("finetuned", "text/0")) & set(LAYER_MATRICES) == set(family.present(LAYER_MATRICES))


def test_classifier_scores_match_transformers(name: str, family: Family) -> None:
    run = Run(Path())
    reviews, tested = pd.read_parquet(run.reviews / "test.parquet"), run.metrics("finetune")["test"]
    logits, before = (plain_logits(folder, reviews["text"]) for folder in (run.finetuned, Path("model")))
    labels = torch.tensor(reviews["label"].to_numpy())
    assert tested["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), abs=1e-5)
    assert tested["accuracy"] == pytest.approx(float((logits.argmax(-1) == labels).double().mean()), abs=1e-6)
    assert not np.allclose(before, logits, atol=1e-4)  # fine-tuning changed the model
    # The base model alone has the same vectors as in the classifier.
    classifier, tokenizer = load_classifier(run.finetuned), AutoTokenizer.from_pretrained(run.finetuned)
    assert AutoConfig.from_pretrained(run.finetuned).pad_token_id == tokenizer.pad_token_id
    ids = tokenizer(reviews["text"][0], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        vectors = [base(ids).last_hidden_state for base in (load_base(run.finetuned), classifier.base_model)]
    torch.testing.assert_close(*vectors, atol=1e-4, rtol=0)


def test_figures_show_measures_of_the_family(family: Family) -> None:
    drawn = {path.stem: path.read_text(encoding="utf-8") for path in Run(Path()).figures.glob("*.svg")}
    assert not [mark for mark in ("Ġ", "▁", "##") if mark in "".join(drawn.values())]
    present = family.present([*POINTS, *LAYER_MATRICES])
    for label, matrix in (("Attention weights", "attention"), ("Value Zeroing", "value_zeroing"), ("ALTI", "alti")):
        assert (f">{label}<" in drawn["mixing_contributions_text_0_finetuned"]) == (matrix in present)
    assert (">LayerNorm<" in drawn["mixing_steps"]) == ("attention_norm" in present)
    assert (">Skip<" in drawn["mixing_steps"]) == ("attention_residual" in present)
    assert (">Attention heads<" in drawn["mixing_steps"]) == ("attention_heads" not in points_of_other_widths())
    assert ">text/0<" in drawn["atlas"]


def test_every_option_of_the_page_is_shown(family: Family, shown: Opened) -> None:
    page, sites = shown.page, map_sites(Run(Path()).map("separate"))
    tokens = int(Run(Path()).documents["tokens"].sum())
    page.locator("[id^=token-]").last.click()  # not the first word: in a decoder, it has no other source
    measures = page.locator("[data-measure]").evaluate_all("all => all.map(each => each.dataset.measure)")
    assert [each for each in measures if each in RATIOS] == family.present(RATIOS)
    shares = options(page, "share")
    # The page shows the attention matrix instead of `attn_w`, which is 1 minus the own share in this matrix.
    ratios = [each for each in RATIOS if each != "attn_w" or "attention" not in family.present(LAYER_MATRICES)]
    assert {each for each in shares if each in RATIOS} == set(family.present(ratios))
    assert {each for each in shares if each in LAYER_MATRICES} == set(family.present(LAYER_MATRICES))
    assert (INPUT_PARTS in shares) == (parts_obstacle(family) is None)
    for share in shares:
        choose(page, "share", share)
        if share in MATRICES:
            assert page.locator("#sources li").count() >= 1
    for measure in measures:
        page.locator(f"[data-measure={measure}]").click()
        assert page.locator("#layers-chart g[aria-label=line] path:not([d=''])").count() > 0
    assert sites == stored_sites(ACTIVATIONS)
    encoder_layers = AutoConfig.from_pretrained("model").num_hidden_layers
    one_of_each_point = {(site.point, site.layer > encoder_layers): number for number, site in enumerate(sites)}
    for layout in options(page, "layout"):
        choose(page, "layout", layout)
        for number in one_of_each_point.values():
            site = sites[number]
            page.locator("#point").fill(str(number))
            has_place = layout not in ONE_PLANE or site.point not in points_of_other_widths()
            assert len(shown.drawn()["tokens"]) == tokens * has_place, site
            note = f"The {layout} layout omits this capture point."
            assert (note in page.locator("#map").inner_text()) == (not has_place)
    text = page.locator("body").inner_text()
    assert ("LayerNorm" in text) == ("attnresln_n" in family.present(RATIOS))
    assert not [line for line in text.splitlines() for mark in ("Ġ", "NaN", "undefined") if mark in line]


@pytest.mark.parametrize("name", [OWN_WIDTH], indirect=True)
def test_points_of_other_widths_have_separate_maps(family: Family, shown: Opened, tmp_path: Path) -> None:
    run, sites = Run(Path()), stored_sites(ACTIVATIONS)
    assert points_of_other_widths() == {"attention_heads"}
    in_stream = [site for site in sites if site.point != "attention_heads"]
    assert map_sites(run.map("separate")) == sites
    for layout in ONE_PLANE:
        assert map_sites(run.map(layout)) == in_stream
    write_joint_pages(run.map("joint"), None, tmp_path / "joint.pdf", dpi=30)
    assert len(PdfDocument(tmp_path / "joint.pdf")) == len(in_stream)
    counts = run.table("reduce/map_quality").groupby("layout")["points"].unique().map(list).to_dict()
    assert counts == {layout: [len(in_stream if layout in ONE_PLANE else sites)] for layout in LAYOUTS}
    notes = shown.page.locator("main > .note").all_inner_texts()
    assert any(note.startswith("Not on the joint and the aligned map: attention heads.") for note in notes)


@pytest.mark.parametrize("name", [DECODER], indirect=True)
def test_decoder_layers_show_decoder_tokens(family: Family, shown: Opened) -> None:
    page = shown.page
    names = []
    for layer in range(1, 5):
        choose(page, "layer", str(layer))
        names.append(page.locator("#layer").get_attribute("aria-valuetext"))
    assert names == ["Encoder 1", "Encoder 2", "Decoder 1", "Decoder 2"]
    words = {}
    for layer in ("1", "3"):
        choose(page, "layer", layer)
        words[layer] = page.locator("#words").inner_text()
    assert words["1"] == f"<s> {TEXTS[0]} </s>"
    assert words["3"] == f"</s> {words['1'].removesuffix(' </s>')}"
    sites = map_sites(Run(Path()).map("separate"))
    for site, start in (
        (Site(2, "layer_output"), "Encoder 2: Layer output"),
        (Site(2, "decoder_embedding_output"), "Decoder embedding output"),
        (Site(3, "cross_attention_output"), "Decoder 1: Cross-attention output"),
    ):
        page.locator("#point").fill(str(sites.index(site)))
        assert page.locator("#point").get_attribute("aria-valuetext") == start


@pytest.mark.parametrize("name", [OWN_WIDTH], indirect=True)
def test_right_to_left_and_single_token_texts_are_shown(family: Family, shown: Opened) -> None:
    page, documents = shown.page, Run(Path()).tokens["document"].tolist()
    first, alone = documents.index("text/1"), documents.index("text/2")
    page.locator("#document").select_option(index=1)
    places = [page.locator(f"#token-{first + token}").bounding_box()["x"] for token in range(3)]
    assert places == sorted(places, reverse=True)
    page.locator(f"#token-{first}").click()
    page.keyboard.press("ArrowLeft")
    assert "position 1" in page.locator("#selected").inner_text()
    assert page.locator("p.raw").nth(1).evaluate("each => getComputedStyle(each).direction") == "rtl"
    page.locator("#document").select_option(index=2)
    choose(page, "share", "attn_n")
    assert page.locator(f"#token-{alone}").get_attribute("title").startswith("a, position 0")
    assert "0.0%" in page.locator(f"#token-{alone}").get_attribute("title")
    assert Run(Path()).captured_ratios(["text/2"])["attn_n"].lt(1e-5).all()

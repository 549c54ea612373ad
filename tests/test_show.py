"""A page of the user's own text: its numbers in any family, and no word of what was not done."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from browser import Opened
from conftest import REPOSITORY, SHORT, Workspace, digest
from families import write_family
from stage_process import run_to_its_end
from transformers import AutoModel, AutoTokenizer

from attnmix.core.errors import InputError
from attnmix.store.features import Site, read_features
from stages import show
from stages.common.parameters import read_parameters

TEXT = "time flies like an arrow"
QUICK = {**SHORT, "umap": {"stability_seeds": [3]}}


def test_vectors_are_those_of_the_model_as_it_is_and_nothing_else_is_touched(
    workspace: Workspace, tiny_bert: Path, tmp_path: Path
) -> None:
    folder, texts = workspace(**QUICK, model={"name": str(tiny_bert)}), (TEXT, "the film was good .")
    (folder / "features").mkdir()
    (folder / "features/kept.txt").write_text("a run of the pipeline", encoding="utf-8")
    before, made = digest(folder), tmp_path / "out/page"
    show.main(read_parameters(), texts, made)
    assert {each.name for each in made.iterdir()} == {"index.html", "features", "plots"}
    assert set(pd.read_csv(made / "plots/measure/mixing.csv")["checkpoint"]) == {"pretrained"}
    model, tokenizer = AutoModel.from_pretrained(tiny_bert), AutoTokenizer.from_pretrained(tiny_bert)
    with torch.inference_mode():
        vectors = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy() for text in texts]
    features = read_features(made / "features/capture", Site(3, "layer_output"))
    np.testing.assert_allclose(features, np.concatenate(vectors), atol=2e-3)  # float16
    show.main(read_parameters(), [TEXT], made)  # an earlier page gives way
    assert len(read_features(made / "features/capture", Site(3, "layer_output"))) == len(vectors[0])
    assert digest(folder) == before


@pytest.mark.parametrize("family", ["gpt2", "bart"])
def test_page_opens_and_has_no_word_about_reviews_or_fine_tuning(
    workspace: Workspace, tmp_path: Path, chromium: Any, family: str
) -> None:
    folder = workspace(**QUICK, model={"name": str(write_family(family, tmp_path / family))})
    show.main(read_parameters(), [TEXT], folder / "page")
    text = (folder / "page/index.html").read_text(encoding="utf-8")
    words = re.sub(r"<(script|style)\b.*?</\1>|<[^>]*>", " ", text, flags=re.DOTALL).lower()
    assert re.findall(r"fine-?tun\w*|reviews?|classif\w*|accuracy|nan\b|seed 111", words) == []
    assert "all numbers and maps are of the text below." in words
    opened = Opened(chromium, folder / "page/index.html")
    assert "time" in "".join(opened.page.inner_text("#words").split()).lower().replace("▁", "")
    means = pd.read_csv(folder / "page/plots/measure/mixing.csv")
    method = opened.page.locator(".thumb[aria-pressed=true]").get_attribute("data-measure")
    curve = [float(row["The model as it is"]) for row in opened.values("layers-chart")]
    assert curve == pytest.approx(means.loc[means["method"] == method, "mean"].tolist(), rel=1e-3)
    assert opened.page.locator("path.band[d]:not([d=''])").count() == 0  # one text has no interval
    opened.close()


def test_what_cannot_be_shown_is_one_line_before_any_work(workspace: Workspace) -> None:
    folder = workspace(**SHORT)
    with pytest.raises(InputError, match=r"^--text, or TEXT=\"\.\.\.\" of make: ' ' is empty"):
        show.main(read_parameters(), [TEXT, " "], Path("page"))
    with pytest.raises(InputError, match=r"^--to: \. holds params\.yaml, which"):
        show.main(read_parameters(), [TEXT], Path())
    assert not (folder / "page").exists()


def test_command_takes_any_text_and_names_a_model_that_is_not_there(workspace: Workspace) -> None:
    folder = workspace()
    command = [sys.executable, "-m", "stages", "show", "--model", "broken model", '--text=--$x "y"']
    run = run_to_its_end(command, folder, {"PYTHONPATH": str(REPOSITORY)}, {})
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == "error: --model: there is no folder broken model, and it is no hub identifier\n"

"""A run for tests of the page, with random models and hostile tokens, and helpers that read its page."""

from __future__ import annotations

import base64
import json
import re
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import (
    REPOSITORY,
    run_tokenized,
    write_captured_texts,
    write_captured_tokens,
    write_parameters,
    write_reviews,
    write_tiny_bert,
)

from attnmix.core.names import CHECKPOINT_NAMES
from attnmix.core.store.files import write_table
from attnmix.core.store.runs import Run
from attnmix.core.store.writers import write_metrics, write_plot
from attnmix.faithfulness.class_use import CLASS_USE_COLUMNS
from attnmix.faithfulness.probes import TARGETS
from attnmix.figures import labels
from attnmix.page.arrays import pack
from attnmix.page.assembly import write_page
from stages import capture, inspect, measure, reduce
from stages.common.parameters import read_parameters
from stages.render import page_subject

HOSTILE = [
    "<script>window.hacked=1</script>",
    "</script><script>window.hacked=1</script>",
    '<img src=x onerror="window.hacked=1">',
    "\"'><b>bold</b>",
    "\u202egnol\u202c",
    "\U0001f600",
    "a\x07b",
    "javascript:window.hacked=1//%{x}${x}{{ 7*7 }}",
    "&lt;i&gt;<a href='https://example.org/'>x</a>",
]
LAYOUTS = ["aligned", "pca"]
COMMIT = "c" * 40
COPIED = ("finetune/finetune_by_class", "faithfulness/faithfulness", "faithfulness/margins")


def make_run(folder: Path) -> Path:
    """Write results and a page in `folder` for tiny models and hostile tokens, and return the folder."""
    write_parameters(
        folder,
        model={"name": f"owner/{HOSTILE[0]}", "revision": "v1.0"},
        capture={"documents": [0, 1], "texts": ["the film was great . " + " ".join(HOSTILE)], "max_length": 40},
        measure={"documents": 4, "gradient_documents": 0},
        umap={"layouts": LAYOUTS},
    )
    write_tiny_bert(folder / "models/finetuned", seed=1)
    write_tiny_bert(folder / "models/pretrained", seed=2)
    write_reviews(folder / "data/reviews")
    for name in ("metrics/finetune.json", *(f"plots/{name}.csv" for name in COPIED)):
        (folder / "reports" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / "reports" / name, folder / "reports" / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_tokenized(capture, inspect, measure, reduce)
        run = Run(Path())
        write_captured_texts(["test/0", "test/1", "text/0"])
        counts = {"train": 277, "validation": 49, "test": 101}
        write_metrics("download", {"dataset_commit": None, "model_commit": COMMIT, **counts}, run.metrics_folder)
        _write_token_scores(run)
        _write_hostile_tokens(run)
        _write_probe_accuracies(run)
        texts = pd.read_parquet(run.captured.texts_file).assign(label=0, label_name="negative")
        texts[["tokens", "whole_tokens", "unknown_tokens"]] = 9, 12, 2
        write_table(run.captured.texts_file, texts)
        patch.setattr(labels, "POINTS_PER_SECOND", 20)  # shortens the animation of the map
        render_page()
    return folder


def _write_token_scores(run: Run) -> None:
    """Write random scores of the captured tokens; the first token of each text is special and has no score."""
    scores = run.tokens[["document", "position"]].assign(method="leave_one_out")
    scores["score"] = np.random.default_rng(0).normal(size=len(scores))
    scores.loc[scores["position"] == 0, "score"] = np.nan
    write_table(run.token_scores_file, scores)


def _write_hostile_tokens(run: Run) -> None:
    """Replace tokens of the first captured text, from position 2 on, by `HOSTILE`."""
    tokens = run.tokens
    for column in ("token", "label"):
        tokens.loc[2 : 1 + len(HOSTILE), column] = HOSTILE
    write_captured_tokens(tokens, run.texts)


def _write_probe_accuracies(run: Run) -> None:
    """Write accuracies of linear probes that differ between checkpoints, targets and layers."""
    rows = [
        (checkpoint, f"probe_{target}", group, layer, (layer + len(checkpoint + target)) / 20, 0.1, 0.9, 40)
        for checkpoint in CHECKPOINT_NAMES
        for group, target in TARGETS
        for layer in (1, 2, 3)
    ]
    write_plot("faithfulness/class_use", pd.DataFrame(rows, columns=CLASS_USE_COLUMNS), run.tables)


def render_page() -> None:
    """Write the page of the run in the current folder, as the stage `render` does."""
    run = Run(Path())
    write_page(run, page_subject(read_parameters(), run.metrics("download")))


def tokens() -> pd.DataFrame:
    """Return the captured tokens of the run in the current folder."""
    return Run(Path()).tokens


def choose(page: Any, label: str, option: str) -> None:
    """Choose an option of a menu, a model button, or a slider value."""
    if label == "checkpoint":
        page.locator(f"#checkpoint [value={option}]").click()
    elif label in ("layer", "point", "threshold"):
        page.locator(f"#{label}").fill(option)
    else:
        page.locator(f"#{label}").select_option(value=option)


def payload(page: Path) -> dict[str, Any]:
    """Return the data that a page contains for its script."""
    packed = re.search(r'id="data">([^<]*)<', page.read_text(encoding="utf-8"))
    assert packed
    return dict(json.loads(zlib.decompress(base64.b64decode(packed[1]))))


def change_page(folder: Path, change: Callable[[Any], object]) -> Path:
    """Write the page of the current run with changed data into `folder`, and return the path of the changed page."""
    page = Run(Path()).page
    data = payload(page)
    change(data)
    text = re.sub(r'(id="data">)[^<]*', rf"\g<1>{pack(data)}", page.read_text(encoding="utf-8"))
    changed = folder / "changed.html"
    changed.write_text(text, encoding="utf-8")
    return changed


@contextmanager
def without_umap() -> Iterator[None]:
    """Omit UMAP maps of measured texts, because UMAP would dominate the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attnmix.runs.text_results.MIN_TYPED_UMAP_TOKENS", sys.maxsize)
        yield


def save_page(result: Any, folder: Path) -> Path:
    """Write the page of a result of `attnmix.measure` into `folder` without UMAP, and return its path."""
    with without_umap():
        return Path(result.to_html(folder / "page.html"))

"""A run for the page's tests, with hostile tokens, random parts of heads, and helpers that read its page."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
from browser import Opened
from conftest import (
    REPOSITORY,
    run_tokenized,
    write_captured_texts,
    write_captured_tokens,
    write_download_metrics,
    write_parameters,
    write_reviews,
    write_tiny_bert,
)

from attnmix.core.names import CHECKPOINT_NAMES, Site
from attnmix.core.settings import MeasureParameters
from attnmix.faithfulness.class_use import COLUMNS
from attnmix.faithfulness.probes import TARGETS
from attnmix.figures import labels
from attnmix.figures.labels import MAP_MEASURES
from attnmix.measures.matrices import with_rollouts
from attnmix.measures.ratios import RATIOS
from attnmix.page.assembly import write_page
from attnmix.store import features as store
from attnmix.store.files import write_table
from attnmix.store.heads import scores
from attnmix.store.runs import Run, arrays_folder
from attnmix.store.writers import write_by_site, write_heads, write_matrix, write_plot
from stages import capture, measure, reduce
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
LAYOUTS = ["joint", "separate", "aligned", "pca"]


def make_run(folder: Path) -> Path:
    """Run every stage but the first two in `folder`, on a tiny model, make its tokens hostile, and return it."""
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
    for name in (
        "metrics/finetune.json",
        "plots/finetune/finetune_by_class.csv",
        "plots/faithfulness/faithfulness.csv",
    ):
        (folder / "reports" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / "reports" / name, folder / "reports" / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_tokenized(capture, measure, reduce)
        write_captured_texts(["test/0", "test/1", "text/0"])
        write_download_metrics()
        run = Run(Path())
        tokens = run.tokens
        scores = tokens[["document", "position"]].assign(method="leave_one_out")
        scores["score"] = np.random.default_rng(0).normal(size=len(tokens))
        scores.loc[tokens["position"] == 0, "score"] = np.nan  # as of a special token
        write_table(run.token_scores_file, scores)
        for column in ("token", "label"):
            tokens.loc[2 : 1 + len(HOSTILE), column] = HOSTILE
        write_captured_tokens(tokens, run.texts)
        counts = {"tokens": 9, "whole_tokens": 12, "unknown_tokens": 2}
        rows = [
            (checkpoint, f"probe_{target}", group, layer, (layer + len(checkpoint + target)) / 20, 0.1, 0.9, 40)
            for checkpoint in CHECKPOINT_NAMES
            for group, target in TARGETS
            for layer in (1, 2, 3)
        ]
        write_plot("faithfulness/class_use", pd.DataFrame(rows, columns=COLUMNS), run.tables)
        texts = pd.read_parquet(run.texts_file).assign(label=0, label_name="negative", **counts)
        write_table(run.texts_file, texts)
        patch.setattr(labels, "POINTS_PER_SECOND", 20)  # so that tests need not wait while the map plays
        render_page()
    return folder


def render_page() -> None:
    """Write the page of the run in the current folder, as the stage `render` does."""
    run = Run(Path())
    write_page(run, page_subject(read_parameters(), run.metrics("download")))


def tokens() -> pd.DataFrame:
    """Return the captured tokens of the run in the current folder."""
    return Run(Path()).tokens


def choose(page: Any, label: str, option: str) -> None:
    """Choose an option of a select, a button of the models, or a place of a slider."""
    if label == "checkpoint":
        page.locator(f"#checkpoint [value={option}]").click()
    elif label in ("layer", "point"):
        page.locator(f"#{label}").fill(option)
    else:
        page.locator(f"#{label}").select_option(value=option)


def open_changed(chromium: Any, points_per_second: int = 20) -> Opened:
    """Write the page of the changed run in the current folder and open it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(labels, "POINTS_PER_SECOND", points_per_second)
        render_page()
    return Opened(chromium, Run(Path()).page)


def write_run(folder: Path, run: Path, lengths: list[int], layers: int, heads: int = 4) -> None:
    """Write random features, maps, ratios and the default matrices as the stages do; the reports are those of `run`."""
    shutil.copytree(run / "reports", folder / "reports")
    names = [f"test/{number}" for number in range(len(lengths))]
    write_captured_texts(names)
    generator, target = np.random.default_rng(0), Run(Path())
    positions = np.concatenate([*map(np.arange, lengths)])
    table = pd.DataFrame({"document": np.repeat(names, lengths), "position": positions, "token_id": 1})
    table["token"] = [f"word{number}" for number in range(len(table))]
    points = ("attention_heads", "attention_output", "attention_norm", "ffn_output", "layer_output")
    sites = [Site(0, "word_embedding"), Site(0, "embedding_output")]
    sites += [Site(n, point) for n in range(1, layers + 1) for point in points]
    store.create_stores(target.activations, dict.fromkeys(sites, 8), store.plan_store(len(table), 8, "float16"))
    for site in sites:
        features = generator.normal(size=(len(table), 8)).astype(np.float16)
        store.write_block(target.activations, site, slice(0, len(table)), features)
    write_captured_tokens(table, dict.fromkeys(names, "the film was dull ."), folder)
    places = {site: dict(zip("xy", generator.normal(size=(2, len(table))).astype("f4"), strict=True)) for site in sites}
    for layout in LAYOUTS:
        write_by_site(layout, table, places, target.maps)
    near = (np.arange(len(table))[:, None] + np.arange(1, 6)) % len(table)
    lists = {"nearest": list(near[:, : min(5, len(table) - 1)].astype(np.int32))}
    write_by_site("nearest", table, dict.fromkeys(sites, lists), target.maps)
    quality = pd.DataFrame([(layout, None, None, measure, 0.9, 0.5) for layout in LAYOUTS for measure in MAP_MEASURES])
    quality.columns = ["layout", "layer", "point", "measure", "value", "chance"]
    write_table(target.maps / "quality.parquet", quality)
    ratios = [
        table.assign(checkpoint=name, layer=layer, **{ratio: generator.uniform(size=len(table)) for ratio in RATIOS})
        for name in CHECKPOINT_NAMES
        for layer in range(1, layers + 1)
    ]
    target.measured.mkdir(parents=True)
    shutil.copy(Run(run).layer_parts_file, target.measured)
    ratios_file = target.measured / "tokens.parquet"
    pd.concat(ratios).assign(token_class="word", in_statistics=True).to_parquet(ratios_file, index=False)
    for name, length in zip(names, lengths, strict=True):
        for checkpoint in CHECKPOINT_NAMES:
            for method in with_rollouts(MeasureParameters().matrices):
                matrix = generator.gamma(0.1, size=(layers, length, length)).astype(np.float32)
                place = arrays_folder("contributions", checkpoint, name, target.measured)
                write_matrix(place, method, matrix, ("layer", "token", "source"), {})
            parts = random_parts(generator, (layers, heads, length, 64))
            write_heads(arrays_folder("heads", checkpoint, name, target.measured), parts)


def random_parts(
    generator: np.random.Generator, shape: tuple[int, int, int, int], *, key_heads: int = 0, causal: bool = False
) -> dict[str, npt.NDArray[Any]]:
    """Every part but the vectors of short texts; `shape` is layers, heads, tokens, width."""
    layers, heads, tokens, width = shape
    query = generator.normal(size=shape).astype(np.float32)
    key = generator.normal(size=(layers, key_heads or heads, tokens, width)).astype(np.float32)
    last = np.arange(tokens) if causal else np.full(tokens, tokens - 1)
    reach = np.stack([np.zeros(tokens), last], -1).astype(np.int32)
    parts = {
        "query": query,
        "key": key,
        "log_sums": np.zeros((layers, heads, tokens), np.float32),
        "reach": np.tile(reach, (layers, 1, 1)),
        "scores": np.tile(np.array([width**-0.5, 0], np.float32), (layers, 1)),
        "source_norms": generator.uniform(0.5, 2, size=(layers, heads, tokens)).astype(np.float32),
        "given_norms": generator.uniform(0.5, 2, size=(layers, heads, tokens)).astype(np.float32),
    }
    for layer in range(layers):
        for head in range(heads):
            parts["log_sums"][layer, head] = np.log(np.exp(scores(parts, layer, head)).sum(-1))
    return parts

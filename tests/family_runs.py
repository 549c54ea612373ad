"""What capture and measure leave of models of other families, made of random numbers: for maps, figures and page."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from conftest import REPOSITORY, tokens_table, write_captured_texts, write_captured_tokens, write_download_metrics
from head_parts import random_parts

from attnmix.core.points import DECODER_INPUT, Site
from attnmix.measures.derivatives import FORMS
from attnmix.measures.matrices import with_rollouts
from attnmix.measures.ratios import RATIOS
from attnmix.store import features as store
from attnmix.store.layout import contributions_folder, heads_folder
from attnmix.store.runs import Run
from attnmix.store.writers import write_heads, write_layer_parts, write_matrix, write_plot

CHECKPOINTS = ("pretrained", "finetuned")
POST_LN_STEPS = ("heads", "output_linear", "attention_skip", "attention_norm", "feed_forward", "ffn_skip", "ffn_norm")
HEADS_NUMBER = 2
# ruff: noqa: RUF001, SIM905  # signs that look like others; a list of tokens reads better as words
BYTES = "The ␣film ␣was n ’ t ␣d ull , ␣but ␣the ␣caf é ␣film ␣\U0001f600 … ␣was : ⏎ The ␣end ␣of ␣the ␣film .".split(
    " "
)
SPACES = "␣The ␣film ␣was n ’ t ␣d ull , ␣but ␣the ␣caf é ␣film ␣ \U0001f600 … ␣the ␣end ␣of ␣the ␣film .".split(" ")


@dataclass(frozen=True, kw_only=True, eq=False)
class FamilyRun:
    """A model of 2 layers, or of 2 and 2; one text of it is captured."""

    points: tuple[str, ...]
    steps: tuple[str, ...]
    ratios: tuple[str, ...]
    matrices: tuple[str, ...]
    tokens: tuple[str, ...]
    parts: tuple[str, ...] = ("input_norm", "feed_forward_norm")
    """Norms of each layer, by their names in the table of families, and `parallel`."""
    special: dict[str, str] = field(default_factory=dict)
    """Classes of the special tokens."""
    widths: dict[str, int] = field(default_factory=dict)
    """Of the points that are not as wide as the residual stream, which is 8."""
    text: str = "The film was dull."
    """What is captured, before the tokenizer."""
    decoder_start: str | None = None
    """The token that a decoder beside the encoder sees first."""

    @property
    def layers(self) -> int:
        return 4 if self.decoder_start else 2

    def sites(self) -> list[Site]:
        embedding = [Site(0, point) for point in ("word_embedding", "embedding_output")]
        layers = [
            Site(layer, point)
            for layer in range(1, self.layers + 1)
            for point in self.points
            if layer > 2 or not point.startswith("cross")
        ]
        return embedding + layers + ([Site(2, DECODER_INPUT)] if self.decoder_start else [])

    def steps_of(self, layer: int) -> list[str]:
        return [step for step in self.steps if layer > 2 or not step.startswith("cross")]


PRE_LN = FamilyRun(
    points=("attention_heads", "attention_output", "attention_residual", "ffn_output", "layer_output"),
    steps=("heads", "output_linear", "attention_skip", "feed_forward", "ffn_skip"),
    ratios=("attn_w", "attnres_w", "attn_n", "attnres_n"),
    matrices=("attention", "norm", "value_zeroing", "alti"),
    tokens=tuple(BYTES),
)
PARALLEL = FamilyRun(
    points=("attention_heads", "attention_output", "ffn_output", "layer_output"),
    steps=("heads", "output_linear", "feed_forward", "ffn_skip"),
    ratios=("attn_w", "attn_n"),
    matrices=("attention", "norm", "value_zeroing"),
    tokens=tuple(BYTES),
    parts=("input_norm", "feed_forward_norm", "parallel"),
)
OTHER_WIDTHS = FamilyRun(
    points=PRE_LN.points,
    steps=PRE_LN.steps,
    ratios=PRE_LN.ratios,
    matrices=PRE_LN.matrices,
    tokens=("<bos>", *SPACES),
    special={"<bos>": "cls"},
    widths={"word_embedding": 5, "attention_heads": 12},
)
BESIDE_AN_ENCODER = FamilyRun(
    points=(
        *("attention_heads", "attention_output", "attention_norm", "cross_attention_output", "cross_attention_norm"),
        *("ffn_output", "layer_output"),
    ),
    steps=(*POST_LN_STEPS[:4], "cross_attention", "cross_attention_norm", *POST_LN_STEPS[4:]),
    ratios=tuple(RATIOS),
    matrices=("attention", "norm", "value_zeroing", "alti", "globenc"),
    tokens=("<s>", *BYTES, "</s>"),
    parts=("attention_norm", "cross_attention_norm", "output_norm"),
    special={"<s>": "cls", "</s>": "sep"},
    decoder_start="</s>",
)


def write_family_run(family: FamilyRun) -> pd.DataFrame:
    """Write it into the current folder, as the stages before `reduce` would; the tokens table."""
    generator = np.random.default_rng(0)
    tokens = _write_stores(family, generator)
    rows = [
        tokens[["document", "position", "token"]].assign(checkpoint=checkpoint, layer=layer)
        for checkpoint in CHECKPOINTS
        for layer in range(1, family.layers + 1)
    ]
    ratios = pd.concat(rows, ignore_index=True)
    for method in family.ratios:
        ratios[method] = np.where(ratios["position"] == 0, 0, generator.uniform(size=len(ratios)))  # it sees itself
    classes = [family.special.get(token, "word") for token in ratios["token"]]
    Run(Path()).measured.mkdir(parents=True)
    ratios.assign(token_class=classes, in_statistics=True).to_parquet(
        Run(Path()).measured / "tokens.parquet", index=False
    )
    for checkpoint in CHECKPOINTS:
        place, length = contributions_folder(checkpoint, "text/0", Run(Path()).measured), len(tokens)
        for method in with_rollouts(family.matrices):
            write_matrix(place, method, _causal(generator, family.layers, length), ("layer", "token", "source"), {})
        parts = random_parts(generator, (family.layers, HEADS_NUMBER, length, 4), causal=True)
        write_heads(heads_folder(checkpoint, "text/0", Run(Path()).measured), parts)
    _write_reports(family, ratios, generator)
    return tokens


def _causal(generator: np.random.Generator, matrices: int, length: int) -> npt.NDArray[np.float32]:
    """Lower-triangular; the last row is not to be shared out."""
    found = np.tril(generator.gamma(0.5, size=(matrices, length, length))).astype(np.float32)
    found[:, -1] = np.nan
    return found


def _write_stores(family: FamilyRun, generator: np.random.Generator) -> pd.DataFrame:
    tokens = tokens_table(family.tokens, family.special, "text/0")
    if family.decoder_start:
        tokens["decoder_token"] = [family.decoder_start, *family.tokens[:-1]]
    for site in family.sites():
        width = family.widths.get(site.point, 8)
        store.create_stores(Run(Path()).activations, [site], store.plan_store(len(tokens), width, "float16"))
        block = generator.normal(size=(len(tokens), width)).astype(np.float16)
        store.write_block(Run(Path()).activations, site, slice(0, len(tokens)), block)
    write_captured_tokens(tokens, {"text/0": family.text})
    return tokens


def _write_reports(family: FamilyRun, ratios: pd.DataFrame, generator: np.random.Generator) -> None:
    write_captured_texts(["text/0"])
    write_download_metrics()
    for name in ("metrics/finetune.json", "metrics/measure.json", "plots/finetune/finetune_by_class.csv"):
        (Path("reports") / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / "reports" / name, Path("reports") / name)
    by_layer = ratios.melt(["checkpoint", "layer"], list(family.ratios), "method", "mean")
    means = by_layer.groupby(["checkpoint", "layer", "method"], sort=False)["mean"].mean().reset_index()
    intervals = means.assign(ci_low=means["mean"] - 0.05, ci_high=means["mean"] + 0.05)
    differences = intervals[intervals["checkpoint"] == "finetuned"].assign(checkpoint="difference")
    ends = {"simultaneous_low": intervals["ci_low"] - 0.05, "simultaneous_high": intervals["ci_high"] + 0.05}
    mixing = pd.concat([intervals, differences]).assign(**ends, tokens=100, documents=4)
    write_plot("measure/mixing", mixing, Run(Path()).tables)
    weighed = intervals.assign(weight="review", tokens_of="all", documents=4)
    write_plot("measure/mixing_weighted", weighed, Run(Path()).tables)
    write_plot("measure/mixing_by_review", means.assign(document="test/0", label=0, tokens=100), Run(Path()).tables)
    random = differences.assign(checkpoint="random", control="random_weights")
    own = [pd.concat([intervals, differences]).assign(control=name) for name in ("shuffled_words", "text_mean_value")]
    below = {f"below{end}": 0.1 for end in ("", "_low", "_high")}
    write_plot("measure/mixing_controls", pd.concat([random, *own]).assign(**below), Run(Path()).tables)
    levels = pd.concat([intervals, differences]).query("method == 'attn_n'").assign(quantity="level")
    agreement = means.assign(quantity="agreement", mean=0.5, ci_low=0.4, ci_high=0.6)
    derivatives = pd.concat([*(levels.assign(method=form) for form in FORMS), agreement])
    write_plot("measure/derivatives", derivatives.assign(reference="layer_input", documents=4), Run(Path()).tables)
    steps: list[dict[str, Any]] = []
    for checkpoint in CHECKPOINTS:
        for layer in range(1, family.layers + 1):
            for step in family.steps_of(layer):
                for measure in ("cosine_previous", "cosine_input", "distance_previous", "norm"):
                    value = generator.uniform(-0.2, 1)
                    if step == "heads" and "attention_heads" in family.widths and measure != "norm":
                        value = np.nan
                    where = {"checkpoint": checkpoint, "layer": layer, "point": step, "measure": measure}
                    steps.append(where | {"mean": value, "ci_low": value - 0.1, "ci_high": value + 0.1})
    write_plot("measure/geometry", pd.DataFrame(steps), Run(Path()).tables)
    parts = [[part for part in family.parts if stack or not part.startswith("cross")] for stack in (0, 1)]
    write_layer_parts(Run(Path()).measured, parts if family.decoder_start else parts[:1])

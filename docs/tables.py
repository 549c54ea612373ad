"""Write the generated parts of the documents: tables, and texts that contain measured numbers.

    python -m docs.tables

A table is between `<!-- table: NAME -->` and `<!-- end of table -->`. `docs/texts.py` renders the parts that are marked
`text` instead of `table`.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from transformers import AutoConfig

from attnmix.core.names import DECODER_INPUT, EMBEDDING_POINTS, LAYOUTS, POINTS, SAME_MINUS_OTHER
from attnmix.core.store.files import read_results
from attnmix.figures.labels import CHECKPOINTS, MAP_MEASURES, POINT_MARKS, RATIO_MARKS
from attnmix.measures.controls import CONTROLS
from attnmix.measures.identities import IDENTITIES
from attnmix.measures.matrices import RESULT_MATRICES
from attnmix.measures.ratios import RATIOS
from attnmix.models.families import FAMILIES, Family, family_of
from docs import measured
from docs.number_formats import change, decimal, interval, percent
from docs.texts import render_texts
from experiments.study import SETTINGS
from stages.common.parameters import Parameters
from validation.planted_amounts import CASES as PLANTED_AMOUNTS
from validation.planted_cases import CASES

DOCUMENTS = (
    "README.md",
    *(f"docs/{name}.md" for name in ("classifiers", "reference", "results", "scale")),
    *(
        f"docs/measures/{name}.md"
        for name in ("controls", "exchange", "faithfulness", "geometry", "matrices", "planted", "ratios")
    ),
    *("docs/imdb/README.md", "docs/study/README.md", "benchmarks/RESULTS.md"),
)
"""The documents with generated parts."""
PLOTS, VALIDATION = "reports/plots/", "docs/measures/"
IMDB, STUDY = "docs/imdb/", "docs/study/"
AMOUNTS = {
    "exchange": "exchange",
    "parts": "parts",
    "parts, projected": "parts_projection",
    "`attnresln_n`": "attnresln_n",
    "ALTI": "alti",
    "contribution weights": "contribution_weights",
}
"""The measures in the table `amounts`, by column; for models with two layers, the table shows rollouts."""
PLANTED = {
    "weights": "attention",
    "`attnresln_n`": "attnresln_n",
    "less `text_mean_value`": "attnresln_n - text_mean_value",
    "less `corpus_value`": "attnresln_n - corpus_value",
    "`layer_n`": "layer_n",
    "contribution weights": "contribution_weights",
    "Value Zeroing": "value_zeroing",
    "ALTI": "alti",
    "parts": "parts",
    "parts, projected": "parts_projection",
    "gradient": "sum_of_norms",
    "swap": "swap",
}
"""The measures in the table `planted`, by column; for models with two layers, the table shows rollouts."""
Read = Callable[[str], Any]
"""A function that returns the content of a table or metrics file by its path from the repository's root."""
MARKED = re.compile(r"(<!-- (table|text): (\w+) -->\n)(.*?)(<!-- end of \2 -->)", re.DOTALL)


def tables() -> dict[str, str]:
    """Return, by name, the Markdown tables that are created from declarations in the code and from benchmarks."""
    ratios = [
        (f"`{name}`", RATIO_MARKS[name].label, _code(each.definition), each.source) for name, each in RATIOS.items()
    ]
    matrices = [
        (f"`{each.name}`", _code(each.definition), each.source)
        for each in RESULT_MATRICES.values()
        if "rollout" not in each.name
    ]
    controls = [(f"`{name}`", _code(each.definition)) for name, each in CONTROLS.items()]
    points = [
        (f"`{point}`" + (" (level 0)" if point in EMBEDDING_POINTS else ""), POINT_MARKS[point].meaning)
        for point in POINTS
    ]
    return {
        "ratios": _markdown(("column", "name", "ratio", "source"), ratios),
        "matrices": _markdown(("method", "entry", "source"), matrices),
        "controls": _markdown(("control", "definition"), controls),
        "points": _markdown(("point", "definition"), points),
        "families": _families(),
        "classifiers": _classifiers(),
        "plan": _markdown(measured.PLAN, measured.plan()),
        "identities": _markdown(("identity", "equation"), [(f"`{name}`", text) for name, text in IDENTITIES.items()]),
    }


def _families() -> str:
    """Return a table with the families of each kind of layer, and the capture points and measures that they lack."""
    decoder_only = {DECODER_INPUT, "cross_attention_output", "cross_attention_norm"}
    families_by_kind: dict[tuple[str, str], list[str]] = {}
    for name in FAMILIES:
        family = family_of(AutoConfig.for_model(name))
        hidden = decoder_only if len(family.stacks) == 1 else set()
        absent = [f"`{each}`" for each in family.absent() if each not in hidden]
        kind = (_kind(family), ", ".join(absent) or "none")
        families_by_kind.setdefault(kind, []).append(f"`{name}`")
    rows = [(", ".join(names), layers, absent) for (layers, absent), names in families_by_kind.items()]
    return _markdown(("`model_type`", "layers", "absent points and measures"), rows)


def _classifiers() -> str:
    """Return a table with an example and the outcome of the run for each architecture in docs/classifiers.yaml."""
    architectures = yaml.safe_load(Path("docs/classifiers.yaml").read_text(encoding="utf-8"))
    outcomes = pd.read_csv("docs/classifiers.csv", keep_default_na=False, dtype=str).set_index("architecture")
    rows = []
    for name, architecture in architectures.items():
        checkpoint = architecture.get("checkpoint")
        example = f"[{checkpoint}](https://huggingface.co/{checkpoint})" if checkpoint else ""
        outcome = str(outcomes.loc[name, "outcome"]).removeprefix("model.name: ")
        reason = outcome.removeprefix(f"the model family '{name}' is not supported: ")
        rows.append((f"`{name}`", example, reason))
    return _markdown(("architecture", "example", "outcome"), rows)


def _kind(family: Family) -> str:
    stack, decoder = family.stacks[0], ", encoder and decoder" if len(family.stacks) > 1 else ""
    if stack.parallel:
        return "pre-LN, attention and feed-forward in parallel"
    if stack.attention_norm is not None:
        return "post-LN" + decoder
    if stack.attention_output_norm is None:
        return "pre-LN" + decoder
    return "norms before and after each sublayer" if stack.input_norm else "norms after each sublayer"


def results(read: Read) -> dict[str, str]:
    """Return, by name, the Markdown tables of the default run, the run on IMDb, the study and the validation."""
    return {
        "overall": _overall(read),
        "maps": _maps(read),
        "planted": planted(read),
        "own_share": _own_share(read),
        "amounts": _amounts(read),
        "imdb_own_share": _own_share(read, IMDB),
        "scores": _token_scores(read),
        "study_fit": _study_fit(read),
        "study_tests": _study_tests(read),
    }


def _overall(read: Read) -> str:
    table = read(f"{PLOTS}measure/mixing_weighted.csv")
    chosen = table.query("weight == 'token' and tokens_of == 'all' and layer == 'all'")
    means = chosen.set_index(["method", "checkpoint"])[["mean", "ci_low", "ci_high"]]
    rows = []
    for method in means.index.unique("method"):
        before, after = (percent(means.loc[(method, each), "mean"], 1) for each in ("pretrained", "finetuned"))
        rows.append(
            (f"`{method}`", RATIO_MARKS[method].label, before, after, change(means.loc[(method, "difference")]))
        )
    return _markdown(("column", "name", "pretrained", "fine-tuned", "difference"), rows)


def _own_share(read: Read, folder: str = f"{PLOTS}measure/") -> str:
    """Return a table of own shares by layer, with a row for each kind of donor and each checkpoint or difference."""
    table = read(f"{folder}exchange.csv").query("quantity == 'own_share'")
    rows = []
    for (donor, checkpoint), by_layer in table.groupby(["donor", "checkpoint"], sort=False):
        is_change = "difference" in checkpoint or donor == SAME_MINUS_OTHER
        form = "{:+.0f}" if is_change else "{:.0f}"
        cells = [form.format(100 * mean) for mean in by_layer["mean"]]
        last = by_layer.iloc[-1]
        interval = " to ".join(form.format(100 * last[end]) for end in ("ci_low", "ci_high"))
        rows.append((f"`{donor}`", CHECKPOINTS.get(str(checkpoint), "Difference"), *cells, interval))
    layers = [str(layer) for layer in sorted(table["layer"].unique())]
    return _markdown(("donors", "in %", *layers, f"95 % interval, layer {layers[-1]}"), rows)


def _amounts(read: Read) -> str:
    """Return a table with the known own share of each planted model, and its values by the measures in `AMOUNTS`."""
    table = read(f"{VALIDATION}planted_amounts.csv")
    table["measure"] = table["measure"].str.replace("_rollout", "")  # a case has values of either matrices or rollouts
    values = table.pivot(index="case", columns="measure", values="value")
    expected = table.groupby("case")["expected"].first()
    rows = []
    for case in PLANTED_AMOUNTS:
        numbers = [values.loc[case.name, measure] for measure in AMOUNTS.values()]
        cells = ["" if np.isnan(number) else f"{number:.2f}" for number in numbers]
        rows.append((f"`{case.name}`: {case.planted}", f"{expected[case.name]:.2f}", *cells))
    return _markdown(("case", "own share", *AMOUNTS), rows)


def _token_scores(read: Read) -> str:
    """Return a table with the mean probability drop for each token score and test, and the pointing game's hits."""
    table = read(f"{PLOTS}faithfulness/faithfulness.csv").query("share == 'all'")
    hits = read(f"{VALIDATION}planted_words.csv").set_index("score")["hits"]
    tests = list(table.groupby(["test", "replacement"], sort=False).groups)
    rows = []
    for score, by_test in table.groupby("method", sort=False):
        falls = by_test.set_index(["test", "replacement"])
        cells = [f"{decimal(falls.loc[test, 'drop'])} {interval(falls.loc[test], decimal)}" for test in tests]
        rows.append((f"`{score}`", *cells, percent(hits[score]), str(falls["documents"].iloc[0])))
    names = [f"{test}, {replacement}" for test, replacement in tests]
    return _markdown(("score", *names, "decisive word first, %", "reviews"), rows)


def _study_fit(read: Read) -> str:
    """Return a table with the accuracies and margins of the training runs in each setting; ranges are over runs."""
    runs = read(f"{STUDY}runs.csv")
    fits = runs[runs["layer"].isna()]
    rows = []
    for setting in SETTINGS:
        values = fits[fits["setting"] == setting].groupby("quantity")["value"]
        lowest, highest, counts = values.min(), values.max(), values.size()
        rows.append(
            (
                setting,
                str(counts["train accuracy"]),
                percent(lowest["train accuracy"], 1),
                f"{lowest['train margin']:.1f} to {highest['train margin']:.1f}",
                f"{percent(lowest['test accuracy'], 1)} to {percent(highest['test accuracy'], 1)}",
            )
        )
    head = ("setting", "runs", "lowest training accuracy, %", "training margin", "test accuracy, %")
    return _markdown(head, rows)


def _study_tests(read: Read) -> str:
    """Return a table of the study's planned rows and outcomes; equivalences have 90 % intervals and no p value."""
    rows = []
    for number, row in enumerate(read(f"{STUDY}tests.csv").to_dict("records"), start=1):
        p_values = (f"{row['p']:.3f}", f"{row['p_holm']:.3f}")
        if np.isnan(row["p"]):
            p_values = ("", "")
            row |= {"ci_low": row["ci90_low"], "ci_high": row["ci90_high"]}
        name = f"{row['metric']}: {row['difference']}"
        rows.append((str(number), name, change(row), *p_values, str(row["pairs"]), row["outcome"]))
    return _markdown(("row", "difference of changes", "points", "p", "adjusted p", "pairs", "outcome"), rows)


def _maps(read: Read) -> str:
    """Return a table with the score of each layout (columns) by each measure (rows), and the chance level."""
    quality = read(f"{PLOTS}reduce/map_quality.csv").set_index(["measure", "layout"])
    measured_layouts = quality.index.get_level_values("layout")
    layouts = [layout for layout in LAYOUTS if layout in measured_layouts]
    rows = []
    for measure, label in MAP_MEASURES.items():
        cells = []
        for layout in layouts:
            if (measure, layout) in quality.index:
                score = quality.loc[(measure, layout)]
                cells.append(f"{decimal(score['value'])} ({decimal(score['chance'])})")
            else:
                # For example, only a common map of all points has additional measures within points.
                cells.append("")
        rows.append((label, *cells))
    return _markdown(("", *layouts), rows)


def planted(read: Read) -> str:
    """Return a table of the planted cases (rows) and the measures in `PLANTED` (columns); bold values are wrong."""
    table = read(f"{VALIDATION}planted.csv")
    table["measure"] = table["measure"].str.replace("_rollout", "")  # a case has values of either matrices or rollouts
    is_wrong = table["fooled"]
    numbers = table["value"].map("{:.2f}".format).replace({"nan": "none", "-0.00": "0.00"})
    bold_numbers = "**" + numbers + "**"
    table["cell"] = numbers.where(~is_wrong, bold_numbers)
    all_cells = table.pivot(index="case", columns="measure", values="cell").fillna("")
    cells = all_cells[list(PLANTED.values())]
    rows = []
    for case in CASES:
        rows.append((f"`{case.name}`: {case.planted}", case.comes, *cells.loc[case.name]))
    wrong_counts = []
    for measure in cells:
        is_bold = cells[measure].str.startswith("**")
        wrong_counts.append(str(is_bold.sum()))
    rows.append(("wrong cases", "", *wrong_counts))
    return _markdown(("case", "from others", *PLANTED), rows)


def render_parts(read: Read) -> dict[str, str]:
    """Return every generated part of the documents by its name."""
    return render_texts(read) | tables() | results(read)


def update(document: str, parts: dict[str, str]) -> str:
    """Return a document with updated generated parts; raise `KeyError` for an unknown part."""
    return MARKED.sub(lambda match: match[1] + parts[match[3]] + match[5], document)


def _code(formula: str) -> str:
    return formula.replace("|", "\\|")


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def read_file(path: str) -> Any:
    """Return a csv file as a table, or the content of a metrics file."""
    return parse_results(path, Path(path).read_text(encoding="utf-8"))


def parse_results(path: str, text: str) -> Any:
    """Return the content of a csv file as a table, or of a metrics file as Python objects."""
    return json.loads(text) if path.endswith(".json") else read_results(io.StringIO(text))


def check_default_run() -> None:
    """Exit with an error if a stage in dvc.lock ran with a parameter value other than the default."""
    default = Parameters().model_dump()
    lock = yaml.safe_load(Path("dvc.lock").read_text(encoding="utf-8"))
    for stage, entry in lock["stages"].items():
        parameters = entry.get("params", {}).get("params.yaml", {})
        for key, value in parameters.items():
            section, _, name = key.partition(".")
            # DVC stores whole sections (without a name), such as `umap`, and single keys, such as `umap.seed`.
            default_value = default[section][name] if name else default[section]
            if value != default_value:
                sys.exit(f"error: {stage} ran with another {key} than the default; the tables are of the default run")


def main() -> None:
    check_default_run()
    try:
        parts = render_parts(read_file)
    except ValueError as error:
        sys.exit(f"error: {error}")
    for name in DOCUMENTS:
        path = Path(name)
        path.write_text(update(path.read_text(encoding="utf-8"), parts), encoding="utf-8")


if __name__ == "__main__":
    main()

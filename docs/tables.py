"""Write the generated parts of the documents: tables, and texts that contain measured numbers.

    python -m docs.tables

Tables are between `<!-- table: NAME -->` and `<!-- end of table -->`; `docs/texts.py` renders those marked `text`.
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

from attnmix.comparison import TOO_FEW_RUNS
from attnmix.core.names import DECODER_INPUT, EMBEDDING_POINTS, LAYOUTS, POINTS
from attnmix.core.store.files import read_results
from attnmix.figures.labels import CHECKPOINTS, MAP_MEASURES, MATRIX_LABELS, POINT_MARKS, RATIO_MARKS
from attnmix.measures.controls import CONTROLS
from attnmix.measures.identities import IDENTITIES
from attnmix.measures.matrices import RESULT_MATRICES
from attnmix.measures.ratios import RATIOS
from attnmix.measures.sample_tables import SAME_MINUS_OTHER
from attnmix.models.families import FAMILIES, Family, family_of
from docs import measured
from docs.number_formats import change, decimal, interval, percent, points, share
from docs.texts import render_texts
from stages.common.parameters import Parameters
from validation.planted_amounts import CASES as PLANTED_AMOUNTS
from validation.planted_cases import CASES

DOCUMENTS = (
    "README.md",
    *(f"docs/{name}.md" for name in ("classifiers", "explanation", "guide", "reference", "results", "scale")),
    *(
        f"docs/measures/{name}.md"
        for name in ("controls", "exchange", "geometry", "maps", "matrices", "planted", "ratios")
    ),
    *("docs/measures/statistics.md", "docs/measures/which.md", "docs/study/README.md"),
)
"""The documents that have generated parts."""
PLOTS, STUDY = "reports/plots/", "docs/study/"
AMOUNTS = {
    "exchange": "exchange",
    "parts": "parts",
    "parts, projected": "parts_projection",
    "`attnresln_n`": "attnresln_n",
    "`layer_n`": "layer_n",
    "ALTI": "alti",
    "GlobEnc": "globenc",
    "contribution weights": "contribution_weights",
    "weights": "attention",
}
"""The measures of the table `amounts` by their columns; of two layers the rollout is shown."""
PLANTED = {
    "weights": "attention",
    "`attnresln_n`": "attnresln_n",
    "less text's mean": "attnresln_n - text_mean_value",
    "less corpus mean": "attnresln_n - corpus_value",
    "without b_V": "attnresln_n, without_value_bias",
    "`layer_n`": "layer_n",
    "contribution weights": "contribution_weights",
    "Value Zeroing": "value_zeroing",
    "same, no b_V": "value_zeroing_without_bias",
    "raw, others' sum": "value_zeroing_sum",
    "ALTI": "alti",
    "ALTI, no b_V": "alti, without_value_bias",
    "GlobEnc": "globenc",
    "parts": "parts",
    "parts, projected": "parts_projection",
    "derivative": "sum_of_norms",
    "its `norm_of_sum`": "norm_of_sum",
    "by covariance": "conditional_derivative",
    "swap": "swap",
    "probe": "probe",
    "head": "head",
}
"""The measures of the table `planted` by their columns; of two layers the rollout is shown."""
Read = Callable[[str], Any]
"""Return a table or metrics file by its path from the repository's root."""
MARKED = re.compile(r"(<!-- (table|text): (\w+) -->\n)(.*?)(<!-- end of \2 -->)", re.DOTALL)


def tables() -> dict[str, str]:
    """Return every table of declarations and benchmarks by its name, as Markdown."""
    ratios = [
        (f"`{name}`", RATIO_MARKS[name].label, _code(each.definition), each.covers, each.source)
        for name, each in RATIOS.items()
    ]
    matrices = [
        (f"`{each.name}`", MATRIX_LABELS[each.name], _code(each.definition), each.rows, each.source)
        for each in RESULT_MATRICES.values()
    ]
    controls = [
        (f"`{name}`", _code(each.definition), "its own" if each.own_pass else "the same")
        for name, each in CONTROLS.items()
    ]
    points = [
        (f"`{point}`" + (" (level 0)" if point in EMBEDDING_POINTS else ""), POINT_MARKS[point].meaning)
        for point in POINTS
    ]
    return {
        "ratios": _markdown(("column", "name", "ratio", "of", "source"), ratios),
        "matrices": _markdown(("method", "name", "entry", "rows", "source"), matrices),
        "controls": _markdown(("control", "what is measured", "forward pass"), controls),
        "points": _markdown(("point", "what it is"), points),
        "families": _families(),
        "classifiers": _classifiers(),
        "plan": _markdown(measured.PLAN, measured.plan()),
        "capture": _markdown(measured.CAPTURE, measured.capture()),
        "identities": _markdown(
            ("identity", "what it says"), [(f"`{name}`", text) for name, text in IDENTITIES.items()]
        ),
    }


def _families() -> str:
    """Return a row for each family: what it is, what it lacks, and the test that covers it."""
    decoder_only = {DECODER_INPUT, "cross_attention_output", "cross_attention_norm"}
    rows = []
    for name in FAMILIES:
        family = family_of(AutoConfig.for_model(name))
        hidden = decoder_only if len(family.stacks) == 1 else set()
        absent = [f"`{each}`" for each in family.absent() if each not in hidden]
        rows.append((f"`{name}`", _kind(family), ", ".join(absent) or "nothing", f"`tests/test_families.py -k {name}`"))
    return _markdown(("`model_type`", "layers", "absent", "held by"), rows)


def _classifiers() -> str:
    """Return a row for each architecture of docs/classifiers.yaml: where it was seen, and whether it works."""
    places = yaml.safe_load(Path("docs/classifiers.yaml").read_text(encoding="utf-8"))
    outcomes = pd.read_csv("docs/classifiers.csv", keep_default_na=False, dtype=str).set_index("architecture")
    rows = []
    for name, place in places.items():
        checkpoint = f"`{place['checkpoint']}`" if "checkpoint" in place else ""
        downloads = f"[{place.get('downloads', 'there')}]({place['source']})"
        rows.append((f"`{name}`", checkpoint, downloads, *outcomes.loc[name]))
    working = int((outcomes["outcome"] == "works").sum())
    rows.append((f"{len(rows)} architectures", "", "", f"{working} work, {len(rows) - working} refused", "", "", ""))
    return _markdown(("architecture", "checkpoint", "downloads a month", *outcomes.columns), rows)


def _kind(family: Family) -> str:
    stack, decoder = family.stacks[0], ", encoder and decoder" if len(family.stacks) > 1 else ""
    if stack.parallel:
        return "pre-LN, attention and feed-forward in parallel"
    if stack.attention_norm is not None:
        return "post-LN" + decoder
    if stack.attention_output_norm is None:
        return "pre-LN" + decoder
    return "norms before and after each part" if stack.input_norm else "norms on what each part adds"


def results(read: Read) -> dict[str, str]:
    """Return the tables of the default run and of the study."""
    return {
        "overall": _overall(read),
        "maps": _maps(read),
        "planted": planted(read),
        "own_share": _own_share(read),
        "amounts": _amounts(read),
        "settings": _settings(read),
        "by_layer": _by_layer(read),
        "fits": _fits(read),
        "lengths": _lengths(read),
        "trainings": _trainings(read),
        "second_model": _second_model(read),
        "edits": _edits(read),
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


def _own_share(read: Read) -> str:
    """Return the own share by layer of both checkpoints and their difference, a row for each kind of donors."""
    table = read(f"{PLOTS}measure/exchange.csv").query("quantity == 'own_share'")
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
    """Return the own share of every planted model with a known one, by the measures of `AMOUNTS`."""
    table = read(f"{STUDY}planted_amounts.csv")
    table["measure"] = table["measure"].str.replace("_rollout", "")  # a case has either layers or rollouts
    values = table.pivot(index="case", columns="measure", values="value")
    expected = table.groupby("case")["expected"].first()
    rows = []
    for case in PLANTED_AMOUNTS:
        numbers = [values.loc[case.name, measure] for measure in AMOUNTS.values()]
        cells = ["" if np.isnan(number) else f"{number:.2f}" for number in numbers]
        rows.append((f"`{case.name}`: {case.planted}", f"{expected[case.name]:.2f}", *cells))
    return _markdown(("case", "own share", *AMOUNTS), rows)


def _maps(read: Read) -> str:
    quality = read(f"{PLOTS}reduce/map_quality.csv").set_index(["measure", "layout"])
    names = [name for name in LAYOUTS if name in quality.index.get_level_values("layout")]
    rows = []
    for measure, label in MAP_MEASURES.items():
        # A layout with a map for each point has no measures within points: all of its measures are.
        cells = [quality.loc[(measure, name)] if (measure, name) in quality.index else None for name in names]
        shown = ("" if cell is None else f"{decimal(cell['value'])} ({decimal(cell['chance'])})" for cell in cells)
        rows.append((label, *shown))
    return _markdown(("", *names), rows)


EDITED_SETTINGS = ("permuted labels", "mean pooling", "rare word")
"""Settings whose models were edited as well, besides those with true labels."""


def _settings(read: Read) -> str:
    """Return a row for each setting of the study: what it learned, and what its tokens share."""
    layers, probes = (read(f"{STUDY}answer_{name}.csv") for name in ("layers", "probes"))
    after = layers[layers["checkpoint"] == "after"].set_index(["measure", "setting", "layer"]).sort_index()
    change = layers[layers["checkpoint"] == "difference"].set_index(["measure", "setting", "layer"]).sort_index()
    of_last_the = probes.query("kind == 'the' and layer == 6")
    told = of_last_the[of_last_the["checkpoint"] == "after"].set_index(["target", "setting"])
    told_before = of_last_the[of_last_the["checkpoint"] == "before"].groupby("target")["mean"].first()  # one model
    targets = ("sentiment", "word")
    rows = [["before", *[""] * 6, *(_percent(told_before[target]) for target in targets)]]
    for setting in layers.loc[~layers["setting"].str.contains(" minus "), "setting"].unique():
        ratio = change.loc[("ratio attnresln_n, all layers", setting)].iloc[0]
        cells = [setting, f"{ratio['seeds']:.0f}", _percent(after.loc[("accuracy", setting)]["mean"].iloc[0])]
        cells.append(_change(ratio))
        for kind in ("predicted", "sentiment", "word"):
            key = (f"share class by {kind}", setting, 6)
            cells.append(share(after.loc[key]) if key in after.index else "")
        for target in targets:
            cells.append(share(told.loc[target, setting]) if (target, setting) in told.index else "")
        rows.append(cells)
    head = ("setting", "seeds", "accuracy", "change of the ratio, points", "predicted", "sentiment", "rare word")
    return _markdown((*head, 'probe of "the": sentiment', 'probe of "the": rare word'), rows)


STUDY_MEASURES = {
    "ratio attnresln_n": "mixing ratio",
    "text_mean_value attnresln_n": "with the text's mean value",
    "corpus_value attnresln_n": "with the corpus mean value",
    "ratio attn_w": "attention weight on others",
    "share corpus by predicted": "share: the same in all texts",
    "share class by predicted": "share: the class",
    "share text by predicted": "share: the text",
    "share token by predicted": "share: the token",
    "cosine attention_output within_text by predicted": "cosine within a text",
    "cosine attention_output same_class by predicted": "cosine to texts of the class",
    "cosine attention_output other_class by predicted": "cosine to texts of the other class",
}
SECOND_MODEL_MEASURES = {
    "class_kept text_mean": "class kept with the text's mean from here on",
    "class_kept corpus_mean": "class kept with the corpus's mean",
    "class_kept other_class": "class kept with the other class's mean",
    "lens_agreement others": "the head on other tokens names the class",
}

CLAIMED = ("own share, layer 6", "ratio", "ratio less text's mean", "ratio less corpus mean")
"""The rows that `compare` shows first, in docs/study/trainings.csv."""


def _by_layer(read: Read) -> str:
    """Return measures by layer, before and after fine-tuning for the true labels and for permuted ones."""
    table = read(f"{STUDY}answer_layers.csv")
    columns = {
        "before": "setting == 'true labels' and checkpoint == 'before'",
        "true labels": "setting == 'true labels' and checkpoint == 'after'",
        "permuted labels": "setting == 'permuted labels' and checkpoint == 'after'",
    }
    return _layers(STUDY_MEASURES, "labels", {name: table.query(rows) for name, rows in columns.items()})


def _fits(read: Read) -> str:
    """Return what trainings on given and permuted labels change in each layer, and by how much they differ."""
    table = read(f"{STUDY}fits_layers.csv").query("checkpoint == 'difference' and layer > 0")
    rows = []
    for (measure, labels), by_layer in table.groupby(["measure", "setting"], sort=False):
        changes = [_change(row) for _, row in by_layer.sort_values("layer").iterrows()]
        rows.append((measure, labels, *changes))
    return _markdown(("change in points", "labels", *map(str, range(1, 7))), rows)


def _lengths(read: Read) -> str:
    """Return what trainings on given labels change in each layer, by the length to which the reviews are cut."""
    table = read(f"{STUDY}lengths.csv").query("checkpoint == 'difference'")
    rows = []
    for (measure, length), by_layer in table.groupby(["measure", "length"], sort=False):
        changes = [_change(row) for _, row in by_layer.sort_values("layer").iterrows()]
        rows.append((measure, f"{length}", f"{by_layer['tokens'].iloc[0]:.0f}", *changes))
    return _markdown(("change in points", "cut to", "tokens on average", *map(str, range(1, 7))), rows)


def _trainings(read: Read) -> str:
    """Return what `compare` claims of trainings whose labels are known; its verdict on trainings in bold."""
    table = read(f"{STUDY}trainings.csv")
    rows = []
    for comparison, shown in table.groupby("comparison", sort=False):
        first = shown.iloc[0]
        counts = [str(first[name]) for name in ("rows", "told_alone", "told_at_once", "told_of_trainings")]
        if first["between_seeds"] == TOO_FEW_RUNS:
            counts[-1] = "-"
        cells = [_claimed_change(row) for _, row in shown.iterrows()]
        rows.append((comparison, *counts, *cells))
    columns = ("compared", "rows", "each alone", "all at once", "as trainings", *CLAIMED)
    return _markdown(columns, rows)


def _claimed_change(row: Any) -> str:
    """Return a change with its interval over trainings, where it has one; in bold where it is claimed of trainings."""
    cell = points(row["difference"])
    if not pd.isna(row["between_seeds_low"]):
        cell += f" {interval({'ci_low': row['between_seeds_low'], 'ci_high': row['between_seeds_high']})}"
    is_claimed = row["between_seeds"] in ("higher", "lower")
    return f"**{cell}**" if is_claimed else cell


def _second_model(read: Read) -> str:
    """Return the measures of the second model by layer, before and after fine-tuning."""
    table = read(f"{STUDY}mpnet.csv")
    columns = {"before": "pretrained", "after": "finetuned"}
    measures = STUDY_MEASURES | SECOND_MODEL_MEASURES
    return _layers(measures, "", {name: table[table["checkpoint"] == each] for name, each in columns.items()})


def _layers(measures: dict[str, str], title: str, parts: dict[str, pd.DataFrame]) -> str:
    """Return a row for each measure of each part that has it, in percent by layer."""
    rows = []
    for measure, label in measures.items():
        for name, part in parts.items():
            if len(means := part[part["measure"] == measure].sort_values("layer")["mean"]):
                rows.append((label, name, *(percent(mean) for mean in means)))
    return _markdown(("in %", title, *map(str, range(1, len(rows[0]) - 1))), rows)


def _edits(read: Read) -> str:
    """Return the share of reviews that keep their class, and the accuracy, by edit; of true labels, then of others."""
    table = read(f"{STUDY}answer_interventions.csv").query("extent == 'from' and not edit.str.contains(' minus ')")
    kept = table.pivot(index="edit", columns=["setting", "measure", "layer"], values="mean")
    columns = {f"from {layer}": ("true labels", "same_class", layer) for layer in (4, 5)}
    columns["in 6"] = ("true labels", "same_class", 6)
    columns["accuracy, from 4"] = ("true labels", "accuracy", 4)
    columns |= {f"{setting}, from 4": (setting, "same_class", 4) for setting in EDITED_SETTINGS}
    rows = [(edit, *(_percent(row[column]) for column in columns.values())) for edit, row in kept.iterrows()]
    itself = table[table["edit"] == "donor: the review itself"]  # whose class is the review's
    by_measure = itself.pivot(index=["setting", "layer"], columns="measure", values="mean")
    constants = (by_measure["donors_class"] - by_measure["above_constant"]).xs(4, level="layer")
    cells = [_percent(constants[setting]) if kind == "same_class" else "" for setting, kind, _ in columns.values()]
    return _markdown(("values or edges", *columns), [*rows, ("better constant answer", *cells)])


def _percent(part: float) -> str:
    return f"{percent(part)} %"


def _change(row: Any) -> str:
    """Return a change with its interval, which a single seed does not have."""
    return points(row["mean"]) if pd.isna(row["ci_low"]) else change(row)


def planted(read: Read) -> str:
    """Return every planted case and its answer by the measures of `PLANTED`, in bold where the case fools one."""
    table = read(f"{STUDY}planted.csv")
    table["measure"] = table["measure"].str.replace("_rollout", "")  # a case has either layers or rollouts
    numbers = table["value"].map("{:.2f}".format).replace({"nan": "none", "-0.00": "0.00"})
    table["cell"] = numbers.where(~table["fooled"], "**" + numbers + "**")
    cells = table.pivot(index="case", columns="measure", values="cell").fillna("")[list(PLANTED.values())]
    rows = [(f"`{case.name}`: {case.planted}", case.comes, *cells.loc[case.name]) for case in CASES]
    fooled = [str(count) for count in cells.apply(lambda column: column.str.startswith("**")).sum()]
    return _markdown(("case", "from others", *PLANTED), [*rows, ("cases that fool it", "", *fooled)])


def render_parts(read: Read) -> dict[str, str]:
    """Return every generated part of the documents by its name."""
    return render_texts(read) | tables() | results(read)


def update(document: str, parts: dict[str, str]) -> str:
    """Return a document with its generated parts filled in; `KeyError` for one that is not in `parts`."""
    return MARKED.sub(lambda match: match[1] + parts[match[3]] + match[5], document)


def _code(formula: str) -> str:
    return formula.replace("|", "\\|")


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def read_file(path: str) -> Any:
    """Return a csv as a table, a metrics file as what it holds."""
    return parse_results(path, Path(path).read_text(encoding="utf-8"))


def parse_results(path: str, text: str) -> Any:
    """Return the content of a csv as a table, of a metrics file as what it holds."""
    return json.loads(text) if path.endswith(".json") else read_results(io.StringIO(text))


def check_default_run() -> None:
    """Exit with one line where dvc.lock names another value than the default of a parameter that a stage ran with."""
    default = Parameters().model_dump()
    for stage, entry in yaml.safe_load(Path("dvc.lock").read_text(encoding="utf-8"))["stages"].items():
        for key, value in entry.get("params", {}).get("params.yaml", {}).items():
            section, _, name = key.partition(".")
            if value != (default[section][name] if name else default[section]):
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

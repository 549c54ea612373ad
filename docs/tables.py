"""The tables in the documents that follow from the code's declarations, or from the last run.

    python -m docs.tables

Writes them between `<!-- table: NAME -->` and `<!-- end of table -->`: in README.md and docs/measures.md those that
follow from the code's declarations, which a test holds equal to them; in docs/results.md those of the last run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoConfig

from stages.mixing.identities import IDENTITIES
from stages.mixing.matrices import MATRICES
from stages.mixing.ratios import RATIOS
from stages.models.families import Family, family_of, known_families
from stages.outputs.reports import read_plot
from stages.sites import DECODER_INPUT, EMBEDDING_POINTS, POINTS
from stages.vocabulary import LAYOUTS, MAP_MEASURES, POINT_MARKS

DOCUMENTS = ("README.md", "docs/measures.md")
RESULTS = "docs/results.md"
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def tables() -> dict[str, str]:
    """Every table by its name, as Markdown."""
    ratios = [
        (f"`{each.name}`", each.mark.label, _code(each.definition), each.covers, each.source)
        for each in RATIOS.values()
    ]
    matrices = [
        (f"`{each.name}`", each.label, _code(each.definition), each.rows, each.source) for each in MATRICES.values()
    ]
    points = [
        (f"`{point}`" + (" (level 0)" if point in EMBEDDING_POINTS else ""), POINT_MARKS[point].meaning)
        for point in POINTS
    ]
    return {
        "ratios": _markdown(("column", "name", "ratio", "of", "source"), ratios),
        "matrices": _markdown(("method", "name", "entry", "rows", "source"), matrices),
        "points": _markdown(("point", "what it is"), points),
        "families": _families(),
        "identities": _markdown(
            ("identity", "what it says"), [(f"`{name}`", text) for name, text in IDENTITIES.items()]
        ),
    }


def _families() -> str:
    """What each family is, what it does not have, and the test that holds it."""
    decoder_only = {DECODER_INPUT, "cross_attention_output", "cross_attention_norm"}
    rows = []
    for name in known_families():
        family = family_of(AutoConfig.for_model(name))
        absent = [f"`{each}`" for each in family.absent() if each not in decoder_only]
        rows.append((f"`{name}`", _kind(family), ", ".join(absent) or "nothing", f"`tests/test_families.py -k {name}`"))
    return _markdown(("`model_type`", "layers", "absent", "held by"), rows)


def _kind(family: Family) -> str:
    stack = family.stacks[0]
    if stack.parallel:
        return "pre-LN, attention and feed-forward in parallel"
    if stack.attention_norm is not None:
        return "post-LN" + (", encoder and decoder" if len(family.stacks) > 1 else "")
    if stack.attention_output_norm is None:
        return "pre-LN"
    return "norms before and after each part" if stack.input_norm else "norms on what each part adds"


def results() -> dict[str, str]:
    """The tables of the last run, from `reports/plots/`."""
    return {"overall": _overall(), "maps": _maps(), "movement": _movement()}


def _overall() -> str:
    means = read_plot("mixing_overall", "measure").set_index(["method", "checkpoint"])
    rows = []
    for method in means.index.unique("method"):
        before, after, change = (100 * means.loc[(method, each)] for each in ("pretrained", "finetuned", "difference"))
        interval = f"{change['mean']:+.1f} [{change['ci_low']:+.1f}, {change['ci_high']:+.1f}]"
        rows.append(
            (f"`{method}`", RATIOS[method].mark.label, f"{before['mean']:.1f}", f"{after['mean']:.1f}", interval)
        )
    return _markdown(("column", "name", "pretrained", "fine-tuned", "difference"), rows)


def _maps() -> str:
    quality = read_plot("map_quality", "reduce").set_index(["measure", "layout"])
    rows = []
    for measure, label in MAP_MEASURES.items():
        cells = [quality.loc[(measure, layout)] for layout in LAYOUTS]
        rows.append((label, *(f"{cell['value']:.2f} ({cell['chance']:.2f})" for cell in cells)))
    return _markdown(("", *LAYOUTS), rows)


def _movement() -> str:
    movement = read_plot("movement", "reduce")
    movement = movement[movement["step"] == "attention"]
    rows = []
    for layout in ("joint", "aligned"):
        for against in ("full_space", "attnresln_n", "attn_w"):
            chosen = movement[(movement["layout"] == layout) & (movement["against"] == against)]
            by_layer = chosen.groupby("layer")["spearman"]
            cells = [f"{low:.2f} to {high:.2f}" for low, high in zip(by_layer.min(), by_layer.max(), strict=True)]
            rows.append((layout, "moves in the full space" if against == "full_space" else f"`{against}`", *cells))
    return _markdown(("layout", "against", *map(str, sorted(movement["layer"].unique()))), rows)


def with_tables(text: str, made: dict[str, str]) -> str:
    """A document with its tables made anew."""
    return MARKED.sub(lambda match: match[1] + made[match[2]] + match[3], text)


def _code(formula: str) -> str:
    return formula.replace("|", "\\|")


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main() -> None:
    for names, made in ((DOCUMENTS, tables()), ((RESULTS,), results())):
        for name in names:
            path = Path(name)
            path.write_text(with_tables(path.read_text(encoding="utf-8"), made), encoding="utf-8")


if __name__ == "__main__":
    main()

"""The page: one file in the style of the run's page, with the figure and the tables, and no script."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from attnmix import page
from attnmix.measures.ratios import RATIOS
from attnmix.page.arrays import visible
from attnmix.store.files import writing
from compare.experiments import Compared
from study.aggregate import DIFFERENCE
from study.figure import TITLES

HERE = Path(__file__).parent


def write_page(found: Compared, tables: Mapping[str, pd.DataFrame], methods: Sequence[str], to: Path) -> None:
    """Write `index.html` beside `mixing.png`."""
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"visible": visible}
    overall, by_layer = (tables[name][tables[name]["method"].isin(methods)] for name in ("mixing_overall", "mixing"))
    columns = {each: title.replace("\n", " ") for each, title in TITLES.items() if each in set(overall["checkpoint"])}
    layers = sorted(by_layer["layer"].unique().tolist())
    groups = [(found.label(group), found.differing(group), sorted(group.tables["mixing"])) for group in found.groups]
    text = environment.get_template("template.html.j2").render(
        style=Markup((Path(page.__file__).with_name("page.css")).read_text(encoding="utf-8")),
        figure=base64.b64encode((to / "mixing.png").read_bytes()).decode("ascii"),
        keys=found.keys,
        groups=groups,
        left_out=found.left_out,
        columns=columns,
        layers=layers,
        overall=_rows(overall, ["method", "group"], "checkpoint", list(columns)),
        by_layer=_rows(by_layer, ["method", "checkpoint", "group"], "layer", layers),
        labels={method: RATIOS[method].mark.label for method in methods},
        difference=DIFFERENCE,
    )
    with writing(to / "index.html") as path:
        path.write_text(text, encoding="utf-8", newline="\n")


def _rows(
    table: pd.DataFrame, keys: Sequence[str], across: str, columns: Sequence[object]
) -> list[tuple[tuple[str, ...], list[str]]]:
    """For each combination of `keys`, in the table's order, a cell for each of `columns`, the values of `across`."""
    cells = {tuple(row[key] for key in (*keys, across)): _cell(row) for _, row in table.iterrows()}
    return [
        (key, [cells.get((*key, each), "") for each in columns]) for key in dict.fromkeys(key[:-1] for key in cells)
    ]


def _cell(row: pd.Series) -> str:
    """In per cent; of a difference in percentage points."""
    if pd.isna(row["mean"]):
        return ""
    sign = "+" if row["checkpoint"] == DIFFERENCE else ""
    mean, low, high = (f"{100 * row[name]:{sign}.1f}" for name in ("mean", "ci_low", "ci_high"))
    return mean if pd.isna(row["ci_low"]) else f"{mean} [{low}, {high}]"

"""Texts of the documents that contain measured numbers, rendered from the result files.

`docs/texts/NAME.md.j2` is the Jinja template of the text between `<!-- text: NAME -->` and `<!-- end of text -->`. The
numbers in the text are computed by expressions in the template: `table(path)` returns a csv file as a `Table`,
`metrics(path)` returns the content of a JSON file, and the functions in `docs/number_formats.py` are filters.
`require(condition, claim)` checks a claim that the text makes in words: a false condition is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError

from docs import measured
from docs.number_formats import change, decimal, interval, percent, points, rounded, share

TEMPLATES = Path(__file__).with_name("texts")
SUFFIX = ".md.j2"
FORMATS = {function.__name__: function for function in (decimal, rounded, percent, points, interval, change, share)}


class Table:
    """Rows of a results file, selected by column values."""

    def __init__(self, frame: pd.DataFrame, name: str) -> None:
        self.frame = frame
        self.name = name

    def __getitem__(self, column: str) -> pd.Series:
        """Return a column."""
        self._require_columns(column)
        return self.frame[column]

    def where(self, **values: object) -> Table:
        """Return the rows with the given column values; raise `LookupError` if there are none."""
        self._require_columns(*values)
        frame = self.frame
        for column, value in values.items():
            frame = frame[frame[column] == value]
        return self._select(frame, ", ".join(f"{column}={value!r}" for column, value in values.items()))

    def query(self, condition: str) -> Table:
        """Return the rows that meet a condition in the syntax of pandas; raise `LookupError` if there are none."""
        return self._select(self.frame.query(condition), condition)

    def rows(self) -> list[dict[str, Any]]:
        """Return all rows as dictionaries of values by column."""
        return self.frame.to_dict("records")

    def row(self, **values: object) -> dict[str, Any]:
        """Return the only row with the given column values; raise `LookupError` if there is not exactly one."""
        table = self.where(**values)
        if len(table.frame) > 1:
            raise LookupError(f"{table.name}: {len(table.frame)} rows instead of one")
        return table.rows()[0]

    def _require_columns(self, *columns: str) -> None:
        for column in columns:
            if column not in self.frame:
                raise LookupError(f"{self.name}: no column {column}; its columns: {', '.join(self.frame)}")

    def _select(self, frame: pd.DataFrame, condition: str) -> Table:
        if frame.empty:
            raise LookupError(f"{self.name}: no row with {condition}")
        return Table(frame, f"{self.name} where {condition}" if condition else self.name)


def render_texts(read: Any, templates: Path = TEMPLATES) -> dict[str, str]:
    """Return the rendered texts by name; raise `ValueError` with the template and the reason if rendering fails.

    Args:
        read: Function that returns a csv file as a table, or the content of a JSON file, by its path from the
            repository's root.
        templates: The folder of the templates.
    """
    environment = Environment(
        loader=FileSystemLoader(templates),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        extensions=["jinja2.ext.do"],
        autoescape=False,  # Markdown
    )
    environment.filters |= FORMATS
    environment.globals |= FORMATS | {
        "table": lambda path: Table(read(path), path),
        "metrics": read,
        "require": require,
        "terabytes": measured.terabytes,
        "read_rates": measured.read_rates,
    }
    rendered = {}
    for file in sorted(templates.glob(f"*{SUFFIX}")):
        try:
            rendered[file.name.removesuffix(SUFFIX)] = environment.get_template(file.name).render()
        except (LookupError, TemplateError, ValueError) as error:
            raise ValueError(f"docs/texts/{file.name}: {error}") from error
    return rendered


def require(condition: object, claim: str) -> None:
    """Raise an error if a claim that a template makes in words does not hold."""
    if not condition:
        raise ValueError(f"no longer true: {claim}")

"""Put experiments side by side: mixing by layer and method, means over seeds with 95 % intervals (Student's t).

    python -m compare                              # the experiments of the current commit
    python -m compare NAME ... [--methods attnresln_n attn_w] [--to reports/compare]

Experiments that differ in nothing but the seed are one group; a name may be an experiment's or a commit's. Writes
`mixing.csv`, `mixing_overall.csv`, `mixing.png`, `mixing.pdf` and `index.html`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from attnmix.core.errors import InputError
from attnmix.measures.ratios import RATIOS
from compare.experiments import Compared, compared
from compare.figure import draw
from compare.page import write_page
from study.aggregate import over_seeds
from study.figure import METHODS

KEYS = {"mixing": ("checkpoint", "layer", "method"), "mixing_overall": ("checkpoint", "method")}
OUTPUT = Path("reports/compare")
DIGITS = 6


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="experiments or commits; else all experiments of the current commit")
    parser.add_argument("--methods", nargs="+", help="ratios of the figure and of the page; the tables have all")
    parser.add_argument("--to", type=Path, default=OUTPUT, help="folder")
    options = parser.parse_args()
    unknown = [method for method in options.methods or () if method not in RATIOS]
    if unknown:
        raise InputError(f"--methods: there is no ratio {', '.join(unknown)}; allowed: {', '.join(RATIOS)}")
    write(compared(Path(), options.names), options.methods, options.to)
    return 0


def write(found: Compared, methods: Sequence[str] | None, to: Path) -> None:
    """Tables, figure and page; what is left out is said."""
    tables = {name: _table(found, name) for name in KEYS}
    there = tables["mixing"]
    measured = list(dict.fromkeys(there["method"]))
    chosen = [method for method in methods or METHODS if method in measured]
    if methods and not chosen:
        raise InputError(f"--methods: no experiment has {', '.join(methods)}; they have {', '.join(measured)}")
    chosen = chosen or measured
    for group in found.groups:
        for seed, own in group.tables["mixing"].items():
            lacking = [method for method in chosen if method not in set(own["method"])]
            found.left_out.extend(f"{found.label(group)}, seed {seed}, has no {method}" for method in lacking)
    to.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        table.drop(columns="group").to_csv(to / f"{name}.csv", index=False, lineterminator="\n")
    draw(there, chosen, to / "mixing")
    write_page(found, tables, chosen, to)
    for reason in found.left_out:
        print(f"left out: {reason}", file=sys.stderr)
    print(f"{len(found.groups)} groups of experiments, by {', '.join(found.keys) or 'nothing'}: {to / 'index.html'}")


def _table(found: Compared, name: str) -> pd.DataFrame:
    """A row for each group and combination of keys: `group`, the group's parameters, keys, means over seeds."""
    frames = []
    for group in found.groups:
        table = over_seeds(name, group.tables[name], KEYS[name], ["mean"]).drop(columns="quantity")
        own = dict(zip(found.keys, group.values, strict=True))
        frames.append(pd.concat([_constant(table, {"group": found.label(group)} | own), table], axis=1))
    return pd.concat(frames, ignore_index=True).round(DIGITS)


def _constant(table: pd.DataFrame, values: dict[str, str]) -> pd.DataFrame:
    return pd.DataFrame(values, index=table.index)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(f"error: {error}")

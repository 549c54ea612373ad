"""Say as Markdown what changed since a commit in metrics, parameters and plots: `python .ci/report.py BASE FOLDER`.

FOLDER gets the plots that changed, before and after, as `dvc plots diff` draws them; it is not made where none did.
A job's summary shows pictures by address alone, so the workflow keeps the folder as an artifact and links it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

import yaml

FIGURES = "reports/figures/"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", help="the commit to compare the working tree with")
    parser.add_argument("folder", type=Path, help="where the plots that changed are drawn")
    arguments = parser.parse_args()
    base = output("git", "rev-parse", "--short", f"{arguments.base}^{{commit}}").strip()
    for what in ("metrics", "params"):
        table = output("dvc", what, "diff", "--md", base).strip()
        rows = len(table.splitlines()) - 2
        print(f"## Of {what}, {rows} changed since {base}\n")
        print(f"{table}\n" if rows else "")
    plots = changed_plots(base)
    print(f"## Of plots, {len(plots)} changed since {base}\n")
    print(*(f"- {plot}" for plot in plots), sep="\n")
    if plots:
        output("dvc", "plots", "diff", base, "--out", str(arguments.folder), "--targets", *plots)


def output(*command: str) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def changed_plots(base: str) -> list[str]:
    """Return the plots in dvc.yaml whose data or picture differs; without the pictures of `base`, all of them do."""
    data = set(output("git", "diff", "--name-only", base).splitlines())
    diff = json.loads(output("dvc", "diff", "--json", base, "--targets", FIGURES))
    # DVC prints `{}` where no figure differs.
    pictures = {each["path"] for kind in ("added", "modified") for each in diff.get(kind, ())}
    plots = []
    for plot in yaml.safe_load(Path("dvc.yaml").read_text(encoding="utf-8"))["plots"]:
        if isinstance(plot, str):
            plots += [plot] if plot in pictures or pictures == {FIGURES} else []
        else:
            plots += [title for title, content in plot.items() if data & set(content["y"])]
    return plots


if __name__ == "__main__":
    main()

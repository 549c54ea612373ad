"""Print, as Markdown, changes in metrics, parameters and plots since a commit: `python .ci/report.py BASE FOLDER`.

`dvc plots diff` draws each changed plot, before and after the change, into FOLDER. FOLDER is created only if plots have
changed. `--pictures ADDRESS` is the address at which FOLDER/static will be published. Without this option, the report
lists pictures by name, but does not display them.
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
    parser.add_argument("--pictures", metavar="ADDRESS", help="show the pictures in FOLDER/static from there")
    arguments = parser.parse_args()
    base = output("git", "rev-parse", "--short", f"{arguments.base}^{{commit}}").strip()
    for what, title in (("metrics", "Metrics"), ("params", "Parameters")):
        table = output("dvc", what, "diff", "--md", base).strip()
        rows = len(table.splitlines()) - 2
        print(f"## {title}: {rows} changed since {base}\n")
        print(f"{table}\n" if rows else "")
    plots = changed_plots(base)
    print(f"## Plots: {len(plots)} changed since {base}\n")
    print(*(f"- {plot}" for plot in plots), sep="\n")
    if plots:
        output("dvc", "plots", "diff", base, "--out", str(arguments.folder), "--targets", *plots)
    for plot in plots if arguments.pictures else ():
        if plot.startswith(FIGURES):
            cells = (picture(f"{revision}_{plot.replace('/', '_')}", arguments) for revision in (base, "workspace"))
            print(f"\n**{plot.removeprefix(FIGURES)}**\n\n| {base} | now |\n|---|---|\n| {' | '.join(cells)} |")


def picture(name: str, arguments: argparse.Namespace) -> str:
    """Return the Markdown that displays a picture, or `not in the cache` if DVC did not draw the picture."""
    found = (arguments.folder / "static" / name).is_file()
    return f"![]({arguments.pictures}/{name})" if found else "not in the cache"


def output(*command: str) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def changed_plots(base: str) -> list[str]:
    """Return the changed plots of dvc.yaml; if DVC lacks the pictures of `base`, all pictures count as changed."""
    data = set(output("git", "diff", "--name-only", base).splitlines())
    diff = json.loads(output("dvc", "diff", "--json", base, "--targets", FIGURES))
    # DVC prints `{}` if all figures are equal.
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

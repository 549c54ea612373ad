"""Put the page together: template, style, script, charting library and data in one file."""

from __future__ import annotations

import base64
import hashlib
import logging
import re
from collections.abc import Callable, Sequence
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from mpld3.urls import D3_LOCAL

from attnmix.core.names import LAYOUTS
from attnmix.core.options import Parameters
from attnmix.figures.labels import POINT_MARKS, in_text
from attnmix.page.arrays import packed, visible
from attnmix.page.payload import page_data, shown_tokens
from attnmix.page.sentences import called, versions
from attnmix.page.told import Told, of_run
from attnmix.store.files import whole
from attnmix.store.reports import PAGE
from attnmix.store.runs import open_run
from attnmix.store.tokens import SPACE

HERE = Path(__file__).parent
IMPORT = re.compile(r'^import (?:[^;]+ from )?"\./(\w+)\.js";\n', re.MULTILINE)
EXPORT = re.compile(r"^export ", re.MULTILINE)


def write_page(parameters: Parameters, told: Callable[[Parameters, pd.DataFrame], Told] = of_run) -> None:
    """Write `reports/index.html`, from what the earlier stages left; `told` puts it into words."""
    run = open_run()
    tokens, left_out = shown_tokens(run.tokens)
    words = told(parameters, tokens)
    data = page_data(run, tokens, parameters.render.points_per_second, words.checkpoints)
    own = page_script()
    charts = Path(D3_LOCAL).read_text(encoding="utf-8")
    if "</script" in charts.lower():
        raise AssertionError("d3's script would end the element that holds it")
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"visible": visible}
    not_chosen, lacking, points_left_out = _points_left_out(data, parameters.umap.joint_points)
    text = environment.get_template("template.html.j2").render(
        policy=_policy(charts, own),
        # The project's own files and d3's, no one's text.
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        charts=Markup(charts),
        script=Markup(own),
        data=packed(data),
        model=called(parameters.model.name),
        revision=parameters.model.revision,
        epochs=parameters.finetune.epochs,
        **words._asdict(),
        versions=versions(),
        left_out=left_out,
        texts=[(each["name"], run.texts[each["name"]]) for each in data["documents"]],
        matrices=data["matrices"],
        heads=data["attention"]["number"],
        layouts_left_out=[layout for layout in LAYOUTS if layout not in data["maps"]],
        lacking=lacking,
        points_left_out=points_left_out,
        not_chosen=not_chosen,
        own_basis=_own_basis(data),
        space=SPACE if any(SPACE in name for name in data["readings"][0]["names"]) else "",
        encoder=data["encoder"],
        decoders=data["ratios"]["layers"] - (data["encoder"] or 0),
        heads_compared=any(row["step"] == "heads" and row["measure"] == "cosine_input" for row in data["steps"]),
    )
    with whole(PAGE) as part:
        part.write_text(text, encoding="utf-8", newline="\n")
    logging.info("wrote %s, %.1f MB", PAGE, PAGE.stat().st_size / 1e6)


def _points_left_out(data: dict[str, Any], joint_points: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Points that `umap.joint_points` leaves out; layouts that cannot hold every point, and the points they lack."""
    absent = {
        name: [data["sites"][number]["point"] for number in each["absent"]] for name, each in data["maps"].items()
    }
    not_chosen = {point for point in absent.get("joint", ()) if joint_points and point not in joint_points}
    absent |= {"joint": [point for point in absent.get("joint", ()) if point not in not_chosen]}
    lacking = [name for name, points in absent.items() if points]
    return _labels(not_chosen), lacking, _labels({point for points in absent.values() for point in points})


def _own_basis(data: dict[str, Any]) -> list[str]:
    """Points on the joint map whose places there cannot be compared with those of others."""
    absent = data["maps"].get("joint", {"absent": range(len(data["sites"]))})["absent"]
    return _labels(
        {site["point"] for number, site in enumerate(data["sites"]) if number not in absent} & set(data["ownBasis"])
    )


def _labels(points: set[str]) -> list[str]:
    """In forward order."""
    return [in_text(mark.label) for point, mark in POINT_MARKS.items() if point in points]


def page_script(folder: Path = HERE / "script") -> str:
    """The modules in `folder` as one classic script, as a page that is opened from disk may not import any.

    Every module's text follows those of the modules that it imports, without its `import` and `export`. All share one
    scope, so a name that two of them define at their top level is one name; `tests/test_page.py` looks for such names.
    """
    modules = {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.js"))}
    order = TopologicalSorter({name: IMPORT.findall(text) for name, text in modules.items()}).static_order()
    bodies = [EXPORT.sub("", IMPORT.sub("", modules[name])) for name in order]
    return "\n".join(['(async () => {\n"use strict";', *bodies, "})();\n"])


def _policy(*scripts: str) -> str:
    """The page runs these scripts and nothing else, and asks no one for anything; marks are styled one by one."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii") for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )

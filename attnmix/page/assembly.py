"""Put the page together: template, style, script, charting library and data in one file."""

from __future__ import annotations

import base64
import hashlib
import logging
import re
from graphlib import TopologicalSorter
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from mpld3.urls import D3_LOCAL

from attnmix.core.names import LAYOUTS, SPACE
from attnmix.figures.labels import POINT_MARKS, in_text
from attnmix.page.arrays import pack, visible
from attnmix.page.payload import page_data, shown_tokens
from attnmix.page.sentences import Subject, describe, package_versions, short_name
from attnmix.store.files import whole
from attnmix.store.runs import Run

HERE = Path(__file__).parent
IMPORT = re.compile(r'^import (?:[^;]+ from )?"\./(\w+)\.js";\n', re.MULTILINE)
EXPORT = re.compile(r"^export ", re.MULTILINE)


def write_page(run: Run, subject: Subject) -> None:
    """Write `run.page`, which shows what the stages before it wrote into `run`."""
    tokens, documents_left_out = shown_tokens(run.tokens)
    words = describe(subject, tokens, run)
    data = page_data(run, tokens, words["checkpoints"])
    script, charts = page_script(), Path(D3_LOCAL).read_text(encoding="utf-8")
    if "</script" in charts.lower():
        raise AssertionError("d3's script would end the element that holds it")
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"visible": visible, "short_name": short_name}
    points = [site["point"] for site in data["sites"]]
    absent = {layout: {points[number] for number in each["absent"]} for layout, each in data["maps"].items()}
    text = environment.get_template("template.html.j2").render(
        policy=_content_security_policy(charts, script),
        # Only the project's own files and d3's are marked as safe.
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        charts=Markup(charts),
        script=Markup(script),
        data=pack(data),
        **subject._asdict() | words,
        versions=package_versions(),
        documents_left_out=documents_left_out,
        texts=[(each["name"], run.texts[each["name"]]) for each in data["documents"]],
        matrices=data["matrices"],
        heads=data["attention"]["number"],
        layouts_left_out=[layout for layout in LAYOUTS if layout not in data["maps"]],
        incomplete_layouts=[layout for layout, names in absent.items() if names],
        absent_points=_labels(set().union(*absent.values())),
        own_basis=_labels(set(points) & set(data["ownBasis"]) - absent.get("joint", set(points))),
        space=SPACE if any(SPACE in name for name in data["readings"][0]["names"]) else "",
        encoder_layers=data["encoder"],
        layers=data["ratios"]["layers"],
        heads_compared=any(row["step"] == "heads" and row["measure"] == "cosine_input" for row in data["steps"]),
    )
    with whole(run.page) as part:
        part.write_text(text, encoding="utf-8", newline="\n")
    logging.info("wrote %s, %.1f MB", run.page, run.page.stat().st_size / 1e6)


def _labels(points: set[str]) -> list[str]:
    """Return the points' labels in forward order."""
    return [in_text(mark.label) for point, mark in POINT_MARKS.items() if point in points]


def page_script() -> str:
    """Return the modules in `script/` as one classic script; a page that is opened from disk may not import any.

    Every module's text follows those of the modules that it imports, without its `import` and `export`. All share one
    scope, so a name that two of them define at their top level is one name; `tests/test_page.py` looks for such names.
    """
    modules = {path.stem: path.read_text(encoding="utf-8") for path in sorted((HERE / "script").glob("*.js"))}
    order = TopologicalSorter({name: IMPORT.findall(text) for name, text in modules.items()}).static_order()
    bodies = [EXPORT.sub("", IMPORT.sub("", modules[name])) for name in order]
    return "\n".join(['(async () => {\n"use strict";', *bodies, "})();\n"])


def _content_security_policy(*scripts: str) -> str:
    """Return a policy under which the page runs these scripts and nothing else, and loads nothing."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii") for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )

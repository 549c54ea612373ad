"""Put the page together: template, style, script, charting library and data in one file."""

from __future__ import annotations

import base64
import hashlib
import logging
import re
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from stages.page.arrays import packed
from stages.page.contents import LAYOUTS, captured_tokens, page_data
from stages.page.findings import (
    cautions,
    changed_parameters,
    findings,
    percent,
    preferred_method,
    read_metrics,
    versions,
)
from stages.parameters import Parameters

PAGE = Path("reports/index.html")
HERE = Path(__file__).parent
IMPORT = re.compile(r'^import [^;]+ from "\./(\w+)\.js";\n', re.MULTILINE)
EXPORT = re.compile(r"^export ", re.MULTILINE)
REVIEWS = Path("data/reviews/test.parquet")


def write_page(parameters: Parameters, root: Path = Path()) -> None:
    """Write `reports/index.html`, from what the earlier stages left under `root`."""
    captured = captured_tokens(root)
    data = page_data(captured, parameters.figures.frames_per_second, root)
    data["method"] = preferred_method(data["ratios"]["methods"])
    metrics = read_metrics(root)
    own = page_script()
    charts = get_plotlyjs()
    if "</script" in charts.lower():
        raise AssertionError("plotly's script would end the element that holds it")
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"percent": percent, "visible": visible}
    text = environment.get_template("template.html.j2").render(
        policy=_policy(charts, own),
        # The project's own files and plotly's, no one's text.
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        charts=Markup(charts),
        script=Markup(own),
        data=packed(data),
        model=parameters.model.name,
        revision=parameters.model.revision,
        dataset=parameters.dataset.name,
        metrics=metrics,
        findings=findings(metrics, root),
        cautions=cautions(metrics, data["method"]),
        changed=changed_parameters(parameters),
        versions=versions(),
        texts=_texts(data, parameters, root),
        left_out=captured.left_out,
        layouts_left_out=[name for name in LAYOUTS if name not in data["maps"]],
    )
    path = root / PAGE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")
    logging.info("wrote %s, %.1f MB", path, path.stat().st_size / 1e6)


def page_script(folder: Path = HERE / "script") -> str:
    """The modules in `folder` as one classic script, as a page that is opened from disk may not import any.

    Every module's text follows those of the modules that it imports, without its `import` and `export`. All share one
    scope, so a name that two of them define at their top level is one name; `tests/test_page.py` looks for such names.
    """
    modules = {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.js"))}
    order = TopologicalSorter({name: IMPORT.findall(text) for name, text in modules.items()}).static_order()
    bodies = [EXPORT.sub("", IMPORT.sub("", modules[name])) for name in order]
    return "\n".join(['(async () => {\n"use strict";', *bodies, "})();\n"])


def visible(text: str) -> str:
    """Text whose control characters, which a page drops or obeys, are signs that stand for them."""
    found = []
    for char in text:
        code = ord(char)
        if code < 0x20 and char not in "\n\t":
            found.append(chr(0x2400 + code))
        elif code in DIRECTIONS or 0x7F <= code < 0xA0 or 0xD800 <= code < 0xE000:
            found.append(f"⟨U+{code:04X}⟩")
        else:
            found.append(char)
    return "".join(found)


DIRECTIONS = frozenset([0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)])


def _policy(*scripts: str) -> str:
    """The page runs these scripts and nothing else, and asks no one for anything; plotly styles its own drawings."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii") for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _texts(data: dict[str, Any], parameters: Parameters, root: Path) -> list[tuple[str, str]]:
    """Name and full text of each document on the page."""
    reviews: Any = pd.read_parquet(root / REVIEWS)["text"]
    found = []
    for document in data["documents"]:
        split, number = document["name"].split("/")
        source: Any = parameters.capture.texts if split == "text" else reviews
        found.append((document["name"], str(source[int(number)])))
    return found

"""The page of two experiments side by side: the page of each in a frame, and one bar that moves both.

The frames are sandboxed and hold the pages as text, so that the file asks for nothing. Page and bar tell each other
what is chosen as the part of an address after #, and a page checks it as it checks an address.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import dvc.api
from dvc.exceptions import DvcException
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from attnmix import page
from attnmix.core.errors import InputError
from attnmix.page.arrays import packed, visible
from attnmix.store.files import writing
from attnmix.store.reports import PAGE

HERE = Path(__file__).parent
NAME = "side_by_side.html"
DIGEST = re.compile(r"'sha256-[A-Za-z0-9+/]{43}='")  # of a script that a page may run
LISTENS = '<meta name="beside"'
HEAD = 4000  # characters, in which a page's policy stands


class Side(NamedTuple):
    """One of the two."""

    name: str
    commit: str
    values: Mapping[str, str]
    """Its parameters, by key."""


def write_side_by_side(sides: Sequence[Side], folder: Path, to: Path) -> None:
    """Write `to`/side_by_side.html of the pages that two experiments in the repository `folder` rendered.

    `InputError` where a page is neither in DVC's cache nor in a remote, or was made before pages could be framed.
    """
    pages = [_page(side, folder) for side in sides]
    script = (HERE / "side_by_side.js").read_text(encoding="utf-8")
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"visible": visible}
    text = environment.get_template("side_by_side.html.j2").render(
        policy=_policy(script, pages),
        style=Markup(Path(page.__file__).with_name("page.css").read_text(encoding="utf-8")),
        names=[side.name for side in sides],
        differing=_differing(sides),
        pages=[packed(each) for each in pages],
        script=Markup(script),
    )
    with writing(to / NAME) as path:
        path.write_text(text, encoding="utf-8", newline="\n")


def _page(side: Side, folder: Path) -> str:
    try:
        text: str = dvc.api.read(PAGE.as_posix(), repo=str(folder), rev=side.commit, encoding="utf-8")
    except DvcException as error:
        why = " ".join(str(error).split())
        raise InputError(f"the page of {side.name}, {PAGE}, is not in DVC's cache or its remote: {why}") from None
    if LISTENS not in text[:HEAD]:
        raise InputError(f"the page of {side.name} was made by code that is too old to put it beside another")
    return text


def _differing(sides: Sequence[Side]) -> list[list[str]]:
    """For each of the two, `key=value` of the parameters in which they differ."""
    keys = dict.fromkeys(key for side in sides for key in side.values)
    apart = [key for key in keys if len({side.values.get(key) for side in sides}) > 1]
    return [[f"{key}={side.values.get(key, 'absent')}" for key in apart] for side in sides]


def _policy(script: str, pages: Sequence[str]) -> str:
    """What a frame holds obeys this policy beside its own: so its scripts are allowed here too, by their digests."""
    own = f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode('ascii')}'"
    allowed = dict.fromkeys([own, *(each for text in pages for each in DIGEST.findall(html.unescape(text[:HEAD])))])
    return (
        f"default-src 'none'; script-src {' '.join(allowed)}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )

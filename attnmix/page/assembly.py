"""Assembly of the page as one file from a template, a style sheet, a script and data."""

from __future__ import annotations

import base64
import hashlib
import logging
import platform
from collections.abc import Mapping, Set
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from attnmix.core.names import OWN_SHARE, SPACE
from attnmix.core.settings import MIN_UMAP_VECTORS
from attnmix.core.store.files import atomic_path
from attnmix.core.store.results import Results
from attnmix.core.store.runs import Run
from attnmix.figures.labels import POINT_MARKS, in_text
from attnmix.page.arrays import as_json, pack, visible
from attnmix.page.cautions import list_cautions
from attnmix.page.payload import page_data, shown_tokens
from attnmix.page.sentences import Subject, describe, details_note
from attnmix.page.shape import Data
from attnmix.page.static_picture import draw_result
from attnmix.page.wording import RUN_WORDING, Wording, detailed_documents_of, wording_of

HERE = Path(__file__).parent
PACKAGES = ("torch", "transformers", "umap-learn", "numba", "zarr")
BUNDLE = HERE / "bundle.js"  # built by esbuild from the modules in `src/`
LICENCES = HERE / "licences.txt"  # licences of the bundled packages, written by tools/licences.py


def write_page(run: Run, subject: Subject) -> None:
    """Write the page of a pipeline run to `run.page`, from the outputs of the previous stages."""
    text = page_text(run, subject)
    with atomic_path(run.page) as part:
        part.write_text(text, encoding="utf-8", newline="\n")
    logging.info("wrote %s, %.1f MB", run.page, run.page.stat().st_size / 1e6)


def page_text(run: Results, subject: Subject) -> str:
    """Return the page of `run` as self-contained HTML; `subject` describes the model and the data of the run.

    The template receives the files and the data of the interactive views, and the parts of the page that are readable
    without JavaScript: notes, the answer, and facts about the run. Each dictionary that is unpacked in the call of
    `render` contains variables of the template by name.
    """
    tokens, documents_left_out = shown_tokens(run.tokens)
    sentences_and_facts = describe(subject, tokens, run)
    wording = wording_of(run)
    checkpoint_labels = sentences_and_facts["checkpoints"]
    cautions = list_cautions(subject, run)
    data = page_data(run, tokens, checkpoint_labels, cautions, finetuned=subject.finetuned, synthetic=subject.synthetic)
    # The template inserts three kinds of text without escaping: files of the project, JSON in which "<" is already
    # escaped, and the picture, in which the names of tokens are already escaped.
    return _compile_template().render(
        **_read_files(),
        **_encode_data(data),
        **(asdict(subject) | sentences_and_facts),
        **_present_answer(run, data, checkpoint_labels),
        **_describe_model_and_maps(data, wording),
        versions=package_versions(),
        documents_left_out=_note_left_out_documents(documents_left_out, wording),
        details_note=details_note(detailed_documents_of(run), tokens["document"].nunique()),
        cautions=cautions,
        texts_noun=wording.texts,
        texts=[(document["name"], run.texts[document["name"]]) for document in data["documents"]],
    )


def _read_files() -> dict[str, str]:
    """Return the style sheet, the script and the licences of the page, and a policy that allows only this script."""
    script = _read_script()
    return {
        "policy": _write_content_security_policy(script),
        "style": (HERE / "page.css").read_text(encoding="utf-8"),
        "script": script,
        "licences": LICENCES.read_text(encoding="utf-8"),
    }


def _encode_data(data: Data) -> dict[str, str]:
    """Return the JSON of the page's data, and separately that of its largest part, the arrays of attention heads."""
    attention = dict(data["attention"])
    head_parts = attention.pop("documents")
    return {"data": pack(data | {"attention": attention}), "head_parts": as_json(head_parts)}


def _present_answer(run: Results, data: Data, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the variables of the template for the answer: headline, sentences, and a picture of one text.

    The text is the one that the page shows first. `data` is a result of `page_data`; `labels` contains the labels of
    the checkpoints by name.
    """
    answer = data["answer"]
    first_shown = data["opens"]["document"]
    text = data["documents"][first_shown]
    mean_own_shares = data["curves"].get(OWN_SHARE, {})  # by checkpoint
    return {
        "headline": answer["headline"],
        "lead": [_remove_term_marks(sentence) for sentence in answer["sentences"]],
        "picture_title": text["title"],
        "picture": draw_result(run, text["name"], labels, mean_own_shares),
    }


def _describe_model_and_maps(data: Data, wording: Wording) -> dict[str, Any]:
    """Return the variables of the template that describe the model, its tokens and the maps; see the comments below.

    `data` is a result of `page_data`.
    """
    encoder_inputs = data["readings"][0]
    has_space_marks = any(SPACE in name for name in encoder_inputs["names"])
    return {
        "heads": data["attention"]["number"],  # number of heads per layer; 0 if no text has stored heads
        "more": bool(data["classShares"] or data["probes"]),  # True if the page has the view “More”
        "absence_notes": absence_notes(_list_absent_points(data), wording),  # capture points that maps lack
        "space": SPACE if has_space_marks else "",  # the mark of a space in the names of tokens, if they contain it
        "encoder_layers": data["encoder"],  # number of encoder layers in an encoder-decoder model; otherwise None
        "layers": data["ratios"]["layers"],  # number of all layers
    }


def _read_script() -> str:
    """Return the script of the page, after checking that no text in it ends the element that contains it."""
    script = BUNDLE.read_text(encoding="utf-8")
    if "</script" in script.lower():
        raise AssertionError("bundle.js contains </script, which would end its script element")
    return script


def _list_absent_points(data: Data) -> dict[str, set[str]]:
    """Return, by layout, the capture points that have no map in at least one layer."""
    points = [site["point"] for site in data["sites"]]
    absent = {}
    for layout, encoded_map in data["maps"].items():
        absent[layout] = {points[number] for number in encoded_map["absent"]}
    return absent


def _remove_term_marks(sentence: str) -> str:
    """Return a sentence without the braces that mark terms of the glossary."""
    return sentence.replace("{", "").replace("}", "")


@cache
def _compile_template() -> Template:
    """Return the page's template, compiled once per process."""
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(visible=visible, short_name=short_name)
    return environment.get_template("template.html.j2")


def _note_left_out_documents(number: int, wording: Wording) -> str:
    """Return a note on the captured texts that are not on the page; an empty string if there are none."""
    if number == 0:
        return ""
    more = "1 more captured text is" if number == 1 else f"{number} more captured texts are"
    return f"{more} not on this page, to limit its size. {wording.documents_elsewhere}"


def absence_notes(absent: Mapping[str, Set[str]], wording: Wording = RUN_WORDING) -> list[str]:
    """Return notes on the capture points that are missing from maps, with the reasons.

    `absent` contains the missing points by layout. The reason follows from the layout: the joint map omits points whose
    vectors differ in width from the residual stream, the separate map omits points with too few distinct vectors, and
    the aligned map omits points for either reason.
    """
    few_distinct = f"Fewer than {MIN_UMAP_VECTORS} of their vectors are distinct, or not more than {wording.neighbours}"
    number_reason = f"{few_distinct}, which is too few for UMAP"
    width_reason = "Their vectors differ in width from the residual stream and cannot be projected onto the same plane"
    absent_from_aligned = absent.get("aligned", set())
    if "separate" in absent:
        with_few_vectors = absent["separate"]  # this map has points of any width
    elif "joint" in absent:
        # Points with another width are missing from the joint map, too, so the other points have too few vectors.
        with_few_vectors = absent_from_aligned - absent["joint"]
    else:
        # The aligned map alone does not show which of the two reasons applies.
        either_reason = f"{width_reason}, or too few of them are distinct"
        return _note_absence(absent, absent_from_aligned, either_reason)
    # All other missing points are missing because of their width.
    absent_from_any = set().union(*absent.values())
    with_other_width = absent_from_any - with_few_vectors
    width_notes = _note_absence(absent, with_other_width, width_reason)
    number_notes = _note_absence(absent, with_few_vectors, number_reason)
    return width_notes + number_notes


def _note_absence(absent: Mapping[str, Set[str]], points: Set[str], reason: str) -> list[str]:
    """Return a list with one note on the layouts that lack some of the `points`; it is empty if no layout lacks any."""
    layouts = [layout for layout, names in absent.items() if names & points]
    if not layouts:
        return []
    labels = [in_text(mark.label) for point, mark in POINT_MARKS.items() if point in points]
    return [f"Not on the {' and the '.join(layouts)} map: {', '.join(labels)}. {reason}."]


def _write_content_security_policy(script: str) -> str:
    """Return a policy that allows only `script`, and no external resources."""
    script_hash = hashlib.sha256(script.encode())
    digest = base64.b64encode(script_hash.digest()).decode("ascii")
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


@cache
def package_versions() -> dict[str, str]:
    """Return the versions of Python and the numerical packages, without build names such as `+cpu`."""
    versions = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in PACKAGES:
        versions[name], _, _ = version(name).partition("+")
    return versions


def short_name(name: str) -> str:
    """Return the name of a model or dataset without its path.

    For a model in a package (`package://NAME/FOLDER`), return the name of the package; for a local path, return the
    last component. Identifiers of the hub are not changed.
    """
    if "://" in name:
        _, _, location = name.partition("://")
        package, _, _ = location.partition("/")
        return package
    if name.startswith(("/", ".", "~")):
        return Path(name).name
    return name

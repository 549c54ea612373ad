"""Descriptions of the texts on the page: names, label, prediction, and warnings about unknown words."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any

import pandas as pd

from attnmix.core import names
from attnmix.core.store.results import Results
from attnmix.page.arrays import visible
from attnmix.page.sentences import document_note
from attnmix.page.shape import Data
from attnmix.page.wording import detailed_documents_of, wording_of

HEADING_CHARACTERS = 40  # maximum length of the excerpt of a text in a list
TITLE_CHARACTERS = 24  # maximum length of the excerpt of a text in a sentence
OWN_TEXT = "text/"  # prefix of the names of user texts, which are not from a dataset
MAX_LETTERS = 0.5  # fraction of single letters among word tokens from which a caution is shown


def describe_documents(tokens: pd.DataFrame, run: Results) -> list[Data]:
    """Return the description of each text in `tokens`; `attnmix.page.shape` documents the keys of a description."""
    details = _read_details(run)
    detailed = detailed_documents_of(run)
    truncation = wording_of(run).truncation
    headings = name_documents(run.texts)
    descriptions = []
    for document, rows in tokens.groupby("document", sort=False):
        name = str(document)
        row = details[name]
        # If only some texts have token-level measures, `detailed` lists the names of these texts; otherwise it is
        # empty.
        lacks_details = bool(detailed) and name not in detailed
        description = {
            "name": document,
            "start": int(rows.index[0]),
            "length": len(rows),
            **headings[name],
            "direction": _find_direction(run.texts[name]),
            "note": document_note(row, truncation, lacks_details),
            "caution": find_cautions(rows, row["unknown_tokens"]),
            **_read_classes(row),
        }
        descriptions.append(description)
    return descriptions


def _read_details(run: Results) -> dict[str, Data]:
    """Return, by text, the columns of `run.documents` and, if any, of `run.predictions`; missing values are None."""
    table = run.documents
    if len(run.predictions) > 0:
        table = table.merge(run.predictions, on="document")
    details = {}
    for row in table.to_dict("records"):
        known: Data = {}
        for name, value in row.items():
            known[str(name)] = None if pd.isna(value) else value
        details[str(known["document"])] = known
    return details


def _read_classes(row: Mapping[str, Any]) -> Data:
    """Return the `label` of a text, its `predicted` class and the `probability` of this class; None if missing.

    `reads` is the position of the token whose vector the classifier reads, or None if it reads several vectors or there
    is no classifier.
    """
    label = row["label_name"]
    label_text = None if label is None else visible(label, kept="")
    if "predicted" not in row:
        return {"label": label_text, "predicted": None, "probability": None, "reads": None}
    position = int(row["read_position"])
    return {
        "label": label_text,
        "predicted": visible(row["predicted"], kept=""),
        "probability": float(row["probability"]),
        "reads": position if position >= 0 else None,
    }


def _find_direction(text: str) -> str:
    """Return `rtl` if the first letter with a direction is written from right to left, else `ltr`."""
    for character in text:
        direction = unicodedata.bidirectional(character)
        if direction == "L":
            return "ltr"
        if direction in ("R", "AL"):
            return "rtl"
    return "ltr"


def name_documents(texts: Mapping[str, str]) -> dict[str, Data]:
    """Return the `title` (for sentences) and the `heading` (for lists) of each text; the keys are names of texts.

    The title of a user text consists of the first words; the title of a text from a dataset is the text's name.
    """
    headings = {name: _shorten(text, HEADING_CHARACTERS) for name, text in texts.items()}
    titles = {name: _shorten(text, TITLE_CHARACTERS) for name, text in texts.items()}
    named = {}
    for name in texts:
        if name.startswith(OWN_TEXT):
            title = f"“{_number_alike(name, titles)}”"
            named[name] = {"title": title, "heading": _number_alike(name, headings)}
        else:
            named[name] = {"title": name, "heading": f"{name}: {headings[name]}"}
    return named


def _number_alike(name: str, beginnings: Mapping[str, str]) -> str:
    """Return the beginning of the user text `name`, with a number if other user texts have the same beginning.

    `beginnings` contains the beginnings of all texts by the name of the text.
    """
    beginning = beginnings[name]
    names_alike = []
    for other_name, other_beginning in beginnings.items():
        if other_name.startswith(OWN_TEXT) and other_beginning == beginning:
            names_alike.append(other_name)
    if len(names_alike) == 1:
        return beginning
    number = names_alike.index(name) + 1
    return f"{beginning} ({number})"


def _shorten(text: str, characters: int) -> str:
    """Return a text's first words with at most `characters` characters; a longer first word is truncated."""
    line = visible(" ".join(text.split()), kept="")
    if len(line) <= characters:
        return line
    # One more character shows whether the last word is complete.
    beginning = line[: characters + 1]
    complete_words, _, _ = beginning.rpartition(" ")
    shortened = complete_words or beginning
    return f"{shortened[:characters].rstrip()}…"


def find_cautions(tokens: pd.DataFrame, unknown: int) -> str:
    """Return warnings about unknown tokens and single letters in a text; an empty string if there are none."""
    sentences = []
    if unknown:
        verb = "is" if unknown == 1 else "are"
        sentences.append(f"{unknown} of the text's {len(tokens)} tokens {verb} unknown to the model.")
    words = tokens[tokens["token_class"].isin(["word", "subword"])]
    pieces = words[words["token_class"] == "subword"]  # without complete words of one letter, such as "I"
    letters = sum(_is_letter(str(token)) for token in pieces["token"])
    has_many_letters = letters >= MAX_LETTERS * len(words)
    if len(words) > 0 and has_many_letters:
        sentences.append(
            f"The vocabulary has few words of this text: {letters} of {len(words)} tokens are single letters."
        )
    return " ".join(sentences)


def _is_letter(token: str) -> bool:
    """Return True if a token is a single letter.

    Wide East Asian characters do not count as letters, because one of them can be a word.
    """
    character = token.removeprefix(names.WORDPIECE_PREFIX).removeprefix(names.SPACE)
    return len(character) == 1 and character.isalpha() and unicodedata.east_asian_width(character) not in ("W", "F")

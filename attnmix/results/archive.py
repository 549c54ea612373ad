"""The file format of results: a zip file that contains the measured values, texts and tokens, but not the model.

    facts.json       the model's name; the model's source, unless this is a local folder; the names of methods, controls
                     and measured quantities; the number of encoder layers; a digest of the weights
    texts.parquet    a row for each text
    tokens.parquet   a row for each token
    arrays.npz       the arrays of the table below; `<text>` is the index of a text

    `ratios`                                           `[methods, layers, tokens]`, all texts one after the other
    `predicted`                                        the class index of each text, from `labels` or from the
                                                       classifier of a run; -1 if unknown
    `sums/<name>`                                      two arrays for each measured quantity: the sums over the tokens
                                                       of each text (`/values`), and their divisors (`/counts`)
    `own_share/<max_texts>/<max_length>/<by>/<name>`   the same two arrays for each sample and method of `own_share`
    `token_shares/<text>`                              `[layers, tokens]`
    `matrices/<text>/<name>`                           `[layers, tokens, sources]`
    `heads/<text>/<name>`                              tensors of the attention heads
    `parts/<text>/<rule>/<rows>/<variable>`            variables of `Measures.parts`; `<rows>` is empty for all rows

Any reader of zip, JSON, parquet and NumPy files can open a result file. The file contains no code.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.core.errors import InputError, first_line
from attnmix.core.statistics import Sums
from attnmix.core.store.files import DAMAGE, PARQUET_OPTIONS, atomic_path
from attnmix.measures.documents import Texts, documents_of
from attnmix.measures.engine import Measurements

FORMAT = 4
FACTS_FILE = "facts.json"
TEXTS_FILE = "texts.parquet"
TOKENS_FILE = "tokens.parquet"
ARRAYS_FILE = "arrays.npz"
FIRST_DATE = (1980, 1, 1, 0, 0, 0)  # the earliest date in zip files; a fixed date makes files reproducible
Arrays = Mapping[str, npt.NDArray[Any]]


class SavedResult(NamedTuple):
    """The contents of a result file."""

    facts: Mapping[str, Any]
    texts: pd.DataFrame
    tokens: pd.DataFrame
    measurements: Measurements


def shareable_source(source: str) -> str:
    """Return `source` if it refers to a hub or a package; return an empty string for a local folder."""
    is_local = source.startswith(("/", ".", "~")) or Path(source).exists()
    if is_local:
        return ""
    return source


def write_result(path: Path, result: SavedResult) -> None:
    """Write a result to a zip file. The file appears at `path` only when it is complete."""
    measured = sorted(result.measurements.measured)
    facts = {"format": FORMAT, **result.facts, "measured": measured}
    arrays = _pack_measurements(result.measurements)
    members = {
        FACTS_FILE: json.dumps(facts, indent=2).encode(),
        TEXTS_FILE: _encode_parquet(result.texts),
        TOKENS_FILE: _encode_parquet(result.tokens),
        ARRAYS_FILE: _encode_arrays(arrays),
    }
    with atomic_path(path) as part, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            member = zipfile.ZipInfo(name, FIRST_DATE)
            archive.writestr(member, content, zipfile.ZIP_DEFLATED)


def read_result(path: Path) -> SavedResult:
    """Return the result in a file; raise `InputError` if the file is missing, damaged or not a result."""
    if not path.is_file():
        raise InputError(f"path: there is no file {path}; pass a file written by result.save(path)")
    try:
        with zipfile.ZipFile(path) as archive:
            facts = json.loads(archive.read(FACTS_FILE))
            if facts["format"] != FORMAT:
                raise ValueError(f"its format is {facts['format']}, but this version of attnmix needs {FORMAT}")
            texts = _decode_parquet(archive.read(TEXTS_FILE))
            tokens = _decode_parquet(archive.read(TOKENS_FILE))
            arrays = _decode_arrays(archive.read(ARRAYS_FILE))
    except (*DAMAGE, zipfile.BadZipFile, EOFError) as error:
        problem = f"{path} is damaged or not a result ({first_line(error)})"
        raise InputError(f"path: {problem}; pass a file written by result.save(path)") from error
    measurements = _unpack_measurements(arrays, texts, tokens)
    measurements.measured.update(facts["measured"])
    return SavedResult(facts, texts, tokens, measurements)


def _pack_measurements(measured: Measurements) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of all measurements by their names in the file, such as `matrices/0/alti`.

    `Measurements` documents the keys of its fields, and this module the names of the arrays.
    """
    documents = measured.texts.documents
    ratios = [measured.ratios[number] for number in range(len(documents))]
    predicted = [document.predicted for document in documents]
    arrays: dict[str, npt.NDArray[Any]] = {
        "ratios": np.concatenate(ratios, axis=-1),
        "predicted": np.array(predicted),
    }
    for name, sums in measured.sums.items():
        arrays.update(_pack_sums(f"sums/{name}", sums))
    for (max_texts, max_length, by), sums_by_name in measured.own_share.items():  # by sample of texts and method
        for name, sums in sums_by_name.items():
            arrays.update(_pack_sums(f"own_share/{max_texts}/{max_length}/{by}/{name}", sums))
    for text, shares in measured.token_shares.items():
        arrays[f"token_shares/{text}"] = shares
    for text, matrices in measured.matrices.items():
        for name, matrix in matrices.items():
            arrays[f"matrices/{text}/{name}"] = matrix
    for text, heads in measured.heads.items():
        for name, tensor in heads.items():
            arrays[f"heads/{text}/{name}"] = tensor
    for (text, rule, *rows), variables in measured.parts.items():
        joined_rows = "-".join(str(row) for row in rows)
        for name, variable in variables.items():
            arrays[f"parts/{text}/{rule}/{joined_rows}/{name}"] = variable
    return arrays


def _unpack_measurements(arrays: Arrays, texts: pd.DataFrame, tokens: pd.DataFrame) -> Measurements:
    """Return the measurements from the arrays that `_pack_measurements` created, except `Measurements.measured`.

    Arrays have names such as `matrices/3/alti` (see `_add_array`); sums consist of two arrays, `.../values` and
    `.../counts`.
    """
    documents = []
    for document, predicted in zip(documents_of(texts, tokens), arrays["predicted"].tolist(), strict=True):
        # The table has no label (-1) unless the texts are those of a run. Labels passed to `measure` are saved as
        # predicted classes.
        label = predicted if document.label < 0 else document.label
        documents.append(replace(document, label=label, predicted=predicted))
    measured = Measurements(Texts(documents))
    # The array `ratios` contains all texts one after the other; it is split after each text except the last.
    ends = np.cumsum([len(document) for document in documents])
    ratios_by_text = np.split(arrays["ratios"], ends[:-1], axis=-1)
    measured.ratios.update(enumerate(ratios_by_text))
    for name, array in arrays.items():
        kind, _, path = name.partition("/")
        if kind not in ("sums", "own_share"):
            _add_array(measured, kind, path, array)
        elif path.endswith("/values"):  # the array `/counts` is read together with `/values`
            sums = _unpack_sums(arrays, name.removesuffix("/values"))
            _add_sums(measured, kind, path.removesuffix("/values"), sums)
    return measured


def _add_array(measured: Measurements, kind: str, path: str, array: npt.NDArray[Any]) -> None:
    """Add the array named `<kind>/<path>` to the measurements of one text; ignore arrays that cover all texts.

    The `path` is `<text>` or `<text>/<name>`; for `parts`, it is `<text>/<rule>/<rows>/<name>`.
    """
    if kind == "token_shares":
        measured.token_shares[int(path)] = array
    elif kind == "matrices":
        text, name = path.split("/")
        matrices = measured.matrices.setdefault(int(text), {})
        matrices[name] = array
    elif kind == "heads":
        text, name = path.split("/")
        heads = measured.heads.setdefault(int(text), {})
        heads[name] = array
    elif kind == "parts":
        text, rule, joined_rows, name = path.split("/")
        rows = [int(row) for row in joined_rows.split("-") if row]
        variables = measured.parts.setdefault((int(text), rule, *rows), {})
        variables[name] = array


def _add_sums(measured: Measurements, kind: str, path: str, sums: Sums) -> None:
    """Add sums to the measurements.

    The `path` is `<name>` for the kind `sums`, and `<max_texts>/<max_length>/<by>/<name>` for the kind `own_share`,
    whose sums describe a sample of the texts.
    """
    if kind == "sums":
        measured.sums[path] = sums
    else:
        max_texts, max_length, by, name = path.split("/")
        sample = (int(max_texts), int(max_length), by)
        sums_of_sample = measured.own_share.setdefault(sample, {})
        sums_of_sample[name] = sums


def _pack_sums(place: str, sums: Sums) -> dict[str, npt.NDArray[Any]]:
    """Return the two arrays of `sums` by their names in the file."""
    return {f"{place}/values": sums.values, f"{place}/counts": sums.counts}


def _unpack_sums(arrays: Arrays, place: str) -> Sums:
    """Return the sums from the two arrays that `_pack_sums` created."""
    return Sums(arrays[f"{place}/values"], arrays[f"{place}/counts"])


def _encode_parquet(table: pd.DataFrame) -> bytes:
    buffer = io.BytesIO()
    table.to_parquet(buffer, **PARQUET_OPTIONS)
    return buffer.getvalue()


def _decode_parquet(content: bytes) -> pd.DataFrame:
    buffer = io.BytesIO(content)
    return pd.read_parquet(buffer)


def _encode_arrays(arrays: Arrays) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def _decode_arrays(content: bytes) -> dict[str, npt.NDArray[Any]]:
    buffer = io.BytesIO(content)
    with np.load(buffer, allow_pickle=False) as stored:
        return dict(stored)

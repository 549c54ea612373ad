"""The file format of a result: measured values with texts and tokens, in one zip file without the model.

    facts.json       the model's name and, unless it is a local folder, its source; the names of methods, controls and
                     measured quantities; the number of encoder layers; a digest of the weights
    texts.parquet    a row for each text
    tokens.parquet   a row for each token
    arrays.npz       `ratios` `[methods, layers, tokens]`, `predicted`, and all computed values by name: sums over the
                     tokens of each text, `/values`, and their divisors, `/counts`, for `sums/<name>` and
                     `own_share/<maximum number of texts>/<of tokens>/<by>/<name>`; `token_shares/<text>`,
                     `[layers, tokens]`; `matrices/<text>/<name>`, `[layers, tokens, sources]`; `heads/<text>/<name>`;
                     `parts/<text>/<rule>/<rows>/<variable>`

Any reader of zip, JSON, parquet and NumPy files can open it. It contains no code.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
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
from attnmix.results.arguments import add_classes

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
    """Return `source` if it refers to a hub or a package; an empty string for a local folder."""
    is_local = source.startswith(("/", ".", "~")) or Path(source).exists()
    return "" if is_local else source


def write_result(path: Path, result: SavedResult) -> None:
    """Write the file atomically."""
    facts = {"format": FORMAT, **result.facts, "measured": sorted(result.measurements.measured)}
    arrays = io.BytesIO()
    np.savez(arrays, allow_pickle=False, **_pack_measurements(result.measurements))
    members = {
        FACTS_FILE: json.dumps(facts, indent=2).encode(),
        TEXTS_FILE: _encode_parquet(result.texts),
        TOKENS_FILE: _encode_parquet(result.tokens),
        ARRAYS_FILE: arrays.getvalue(),
    }
    with atomic_path(path) as part, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name, FIRST_DATE), content, zipfile.ZIP_DEFLATED)


def read_result(path: Path) -> SavedResult:
    """Return the result in a file; raise `InputError` if the file is missing, damaged or not a result."""
    if not path.is_file():
        raise InputError(f"path: there is no file {path}; pass a file written by result.save(path)")
    try:
        with zipfile.ZipFile(path) as archive:
            facts = json.loads(archive.read(FACTS_FILE))
            if facts["format"] != FORMAT:
                raise ValueError(f"its format is {facts['format']}, but this version of attnmix needs {FORMAT}")
            texts = pd.read_parquet(io.BytesIO(archive.read(TEXTS_FILE)))
            tokens = pd.read_parquet(io.BytesIO(archive.read(TOKENS_FILE)))
            with np.load(io.BytesIO(archive.read(ARRAYS_FILE)), allow_pickle=False) as stored:
                arrays = dict(stored)
    except (*DAMAGE, zipfile.BadZipFile, EOFError) as error:
        problem = f"{path} is damaged or not a result ({first_line(error)})"
        raise InputError(f"path: {problem}; pass a file written by result.save(path)") from error
    measurements = _unpack_measurements(arrays, texts, tokens)
    measurements.measured.update(facts["measured"])
    return SavedResult(facts, texts, tokens, measurements)


def _pack_measurements(measured: Measurements) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of all measurements by name."""
    documents = measured.texts.documents
    arrays: dict[str, npt.NDArray[Any]] = {
        "ratios": np.concatenate([measured.ratios[number] for number in range(len(documents))], axis=-1),
        "predicted": np.array([document.predicted for document in documents]),
    }
    for name, sums in measured.sums.items():
        arrays.update(_pack_sums(f"sums/{name}", sums))
    for sample, sums_by_name in measured.own_share.items():
        for name, sums in sums_by_name.items():
            arrays.update(_pack_sums("/".join(["own_share", *map(str, sample), name]), sums))
    arrays.update((f"token_shares/{text}", shares) for text, shares in measured.token_shares.items())
    for kind, by_text in (("matrices", measured.matrices), ("heads", measured.heads)):
        for text, by_name in by_text.items():
            arrays.update((f"{kind}/{text}/{name}", array) for name, array in by_name.items())
    for (text, rule, *rows), by_name in measured.parts.items():
        place = f"parts/{text}/{rule}/{'-'.join(map(str, rows))}"
        arrays.update((f"{place}/{name}", array) for name, array in by_name.items())
    return arrays


def _unpack_measurements(arrays: Arrays, texts: pd.DataFrame, tokens: pd.DataFrame) -> Measurements:
    """Return the measurements from arrays as created by `_pack_measurements`."""
    documents = add_classes(documents_of(texts, tokens), arrays["predicted"])
    measured = Measurements(Texts(documents))
    ends = np.cumsum([len(document) for document in documents])[:-1]
    measured.ratios.update(enumerate(np.split(arrays["ratios"], ends, axis=-1)))
    for place, array in arrays.items():
        kind, *path = place.split("/")
        if kind == "sums" and path[-1] == "values":
            measured.sums["/".join(path[:-1])] = _unpack_sums(arrays, place.removesuffix("/values"))
        elif kind == "own_share" and path[-1] == "values":
            max_texts, max_length, by, name, _ = path
            sample = (int(max_texts), int(max_length), by)
            measured.own_share.setdefault(sample, {})[name] = _unpack_sums(arrays, place.removesuffix("/values"))
        elif kind == "token_shares":
            measured.token_shares[int(path[0])] = array
        elif kind == "matrices":
            measured.matrices.setdefault(int(path[0]), {})[path[1]] = array
        elif kind == "heads":
            measured.heads.setdefault(int(path[0]), {})[path[1]] = array
        elif kind == "parts":
            text, rule, rows, name = path
            key = (int(text), rule, *(int(row) for row in rows.split("-") if row))
            measured.parts.setdefault(key, {})[name] = array
    return measured


def _pack_sums(place: str, sums: Sums) -> dict[str, npt.NDArray[Any]]:
    """Return the two arrays of `sums` by name."""
    return {f"{place}/values": sums.values, f"{place}/counts": sums.counts}


def _unpack_sums(arrays: Arrays, place: str) -> Sums:
    """Return the sums from arrays as created by `_pack_sums`."""
    return Sums(arrays[f"{place}/values"], arrays[f"{place}/counts"])


def _encode_parquet(table: pd.DataFrame) -> bytes:
    """Return the bytes of a parquet file."""
    buffer = io.BytesIO()
    table.to_parquet(buffer, **PARQUET_OPTIONS)
    return buffer.getvalue()

"""The file of a result: measured numbers with the names of their texts and tokens, in one zip without the model.

    facts.json       the model's name, the methods, the number of an encoder's layers, a digest of the weights
    texts.parquet    a row for each text
    tokens.parquet   a row for each token
    arrays.npz       by name `ratios` `[methods, layers, tokens]`, `predicted`, and what was computed: sums over the
                     tokens of each text, `/values`, and their divisors, `/counts`, of `controls/<name>`, `sums/<name>`
                     and `own_share/<largest number of texts>/<of tokens>/<by>/<name>`; `token_shares/<text>`,
                     `[layers, tokens]`; `matrices/<text>/<name>`, `[layers, tokens, sources]`; `heads/<text>/<name>`;
                     `parts/<text>/<rule>/<rows>/<variable>`

Any reader of zip, JSON, parquet and NumPy opens it. It holds no code.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.core.errors import InputError, first_line
from attnmix.core.statistics import Sums
from attnmix.core.store.files import DAMAGE, PARQUET_OPTIONS, atomic_path
from attnmix.measures.documents import Texts
from attnmix.measures.engine import Measurements

FORMAT = 3
FACTS_FILE = "facts.json"
TEXTS_FILE = "texts.parquet"
TOKENS_FILE = "tokens.parquet"
ARRAYS_FILE = "arrays.npz"
FIRST_DATE = (1980, 1, 1, 0, 0, 0)  # zip's earliest, so that equal results are equal bytes


class SavedModel(NamedTuple):
    """The model of a loaded result, of which only the name is known."""

    name: str
    source: str = ""


class SavedResult(NamedTuple):
    """The contents of the file."""

    facts: Mapping[str, Any]
    texts: pd.DataFrame
    tokens: pd.DataFrame
    arrays: Mapping[str, npt.NDArray[Any]]

    def named(self, prefix: str) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays whose names begin with `prefix`, by the rest of their names."""
        names = [name for name in self.arrays if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.arrays[name] for name in names}

    def sums(self, place: str) -> Sums:
        """Return the sums at a place, as `pack_sums` named them."""
        return Sums(self.arrays[f"{place}/values"], self.arrays[f"{place}/counts"])


def pack_sums(place: str, sums: Sums) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of sums by name."""
    return {f"{place}/values": sums.values, f"{place}/counts": sums.counts}


def pack_measurements(measured: Measurements, without: Collection[str]) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of all measurements but ratios by name; `without` the sums of these names."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, sums in measured.sums.items():
        if name not in without:
            arrays.update(pack_sums(f"sums/{name}", sums))
    for sample, sums_by_name in measured.own_share.items():
        for name, sums in sums_by_name.items():
            arrays.update(pack_sums("/".join(["own_share", *map(str, sample), name]), sums))
    arrays.update((f"token_shares/{text}", shares) for text, shares in measured.token_shares.items())
    for kind, by_text in (("matrices", measured.matrices), ("heads", measured.heads)):
        for text, by_name in by_text.items():
            arrays.update((f"{kind}/{text}/{name}", array) for name, array in by_name.items())
    for (text, rule, *rows), by_name in measured.parts.items():
        place = f"parts/{text}/{rule}/{'-'.join(map(str, rows))}"
        arrays.update((f"{place}/{name}", array) for name, array in by_name.items())
    return arrays


def unpack_measurements(saved: SavedResult, texts: Texts) -> Measurements:
    """Return the measurements that `pack_measurements` packed."""
    measured = Measurements(texts)
    for place in saved.arrays:
        kind, *path = place.split("/")
        array = saved.arrays[place]
        if kind == "sums" and path[-1] == "values":
            measured.sums["/".join(path[:-1])] = saved.sums(place.removesuffix("/values"))
        elif kind == "own_share" and path[-1] == "values":
            max_texts, max_length, by, name, _ = path
            sample = (int(max_texts), int(max_length), by)
            measured.own_share.setdefault(sample, {})[name] = saved.sums(place.removesuffix("/values"))
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


def write_result(path: Path, result: SavedResult) -> None:
    """Write the file in one step."""
    arrays = io.BytesIO()
    np.savez(arrays, allow_pickle=False, **result.arrays)
    members = {
        FACTS_FILE: json.dumps({"format": FORMAT} | dict(result.facts), indent=2).encode(),
        TEXTS_FILE: _parquet(result.texts),
        TOKENS_FILE: _parquet(result.tokens),
        ARRAYS_FILE: arrays.getvalue(),
    }
    with atomic_path(path) as part, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name, FIRST_DATE), content, zipfile.ZIP_DEFLATED)


def read_result(path: Path) -> SavedResult:
    """Return what `write_result` wrote; raise `InputError` for a file that is missing, damaged or something else."""
    if not path.is_file():
        raise InputError(f"path: there is no file {path}; allowed: one that result.save(path) wrote")
    try:
        with zipfile.ZipFile(path) as archive:
            facts = json.loads(archive.read(FACTS_FILE))
            if facts["format"] != FORMAT:
                raise ValueError(f"its format is {facts['format']}, and this version of attnmix reads {FORMAT}")
            texts = pd.read_parquet(io.BytesIO(archive.read(TEXTS_FILE)))
            tokens = pd.read_parquet(io.BytesIO(archive.read(TOKENS_FILE)))
            with np.load(io.BytesIO(archive.read(ARRAYS_FILE)), allow_pickle=False) as stored:
                arrays = dict(stored)
    except (*DAMAGE, zipfile.BadZipFile, EOFError) as error:
        problem = f"{path} is damaged, or no result: {first_line(error)}"
        raise InputError(f"path: {problem}; allowed: a file that result.save(path) wrote") from error
    return SavedResult(facts, texts, tokens, arrays)


def _parquet(table: pd.DataFrame) -> bytes:
    buffer = io.BytesIO()
    table.to_parquet(buffer, **PARQUET_OPTIONS)
    return buffer.getvalue()

"""The file of a result: measured numbers with the names of their texts and tokens, in one zip without the model.

    facts.json       the model's name, the methods, the number of an encoder's layers, a digest of the weights
    texts.parquet    a row for each text
    tokens.parquet   a row for each token
    arrays.npz       by name `ratios` `[methods, layers, tokens]`, `predicted`, `controls/<name>/sums` and `/counts`,
                     `own_share/<largest number of texts>/<of tokens>/sums` and `/counts`, `matrices/<text>/<name>`
                     `[layers, tokens, sources]`

Any reader of zip, JSON, parquet and NumPy opens it. It holds no code.
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
from attnmix.core.store.files import DAMAGE, PARQUET_OPTIONS, atomic_path

FORMAT = 1
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

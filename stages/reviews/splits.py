"""The reviews as the pipeline keeps them: one parquet file for each split."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from stages.errors import InputError

REVIEWS = Path("data/reviews")


def write_split(split: str, reviews: pd.DataFrame, folder: Path = REVIEWS) -> None:
    """Write columns `text`, `label` (0 or 1), `label_name`."""
    folder.mkdir(parents=True, exist_ok=True)
    reviews.to_parquet(folder / f"{split}.parquet", index=False)


def read_split(split: str, folder: Path = REVIEWS) -> pd.DataFrame:
    """Columns `text`, `label` (0 or 1), `label_name`."""
    path = folder / f"{split}.parquet"
    if not path.is_file():
        raise InputError(f"{path} is missing; `dvc repro download` makes it")
    return pd.read_parquet(path)


def chosen_texts(documents: list[int], texts: list[str], folder: Path = REVIEWS) -> dict[str, str]:
    """Document name (`test/3`, `text/0`) to text; `InputError` for a number past the end."""
    reviews = read_split("test", folder)["text"]
    outside = [str(number) for number in documents if number >= len(reviews)]
    if outside:
        raise InputError(
            f"capture.documents: there is no test review {', '.join(outside)}; "
            f"rows 0 to {len(reviews) - 1} of {folder / 'test.parquet'} are allowed"
        )
    if not documents and not texts:
        raise InputError("capture.documents and capture.texts are both empty; name at least one review or text")
    named = {f"test/{number}": reviews[number] for number in documents}
    return named | {f"text/{number}": text for number, text in enumerate(texts)}

"""Select, truncate and tokenise the texts for all later stages: the captured texts and the sampled test texts.

    python -m stages tokenize

Writes `features/tokenize/`, which `attnmix.core.store.texts` documents.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from attnmix.core.draw import stratified_draw, typical_reviews
from attnmix.core.store import texts as store
from attnmix.core.store.files import read_table
from attnmix.core.store.runs import Run
from attnmix.models.checkpoint import check_max_length
from attnmix.runs.tokens import TextRow, free_texts, with_texts, write_tokens
from stages.common.parameters import Parameters


def main(parameters: Parameters) -> None:
    """Write the tokens of the captured texts, and of the reviews sampled for the statistics and for token removal."""
    run = Run(Path())
    max_length = parameters.capture.max_length
    check_max_length("capture.max_length", max_length, run.finetuned)
    write_tokens(captured_texts(parameters, run), max_length, run.finetuned, run.captured)
    write_tokens(drawn_reviews(parameters, run), max_length, run.finetuned, run.drawn_reviews, warn=False)


def captured_texts(parameters: Parameters, run: Run) -> Iterator[TextRow]:
    """Yield the texts to capture: selected reviews, then `capture.drawn` random reviews, then `capture.texts`.

    The selected reviews are those of `capture.documents`; random reviews that are already selected are omitted. If no
    texts are specified, which is the default, the reviews are selected by `typical_reviews`.
    """
    capture = parameters.capture
    reviews = _tabulate_test_reviews(run)
    capture.check_documents(len(reviews))
    selected = capture.documents
    if capture.typical:
        selected = typical_reviews(read_table(run.test_predictions_file, "finetune"))
    yield from _read_in_order(selected, reviews, run)
    if capture.drawn:
        drawn = stratified_draw(reviews["label"].to_numpy(), capture.drawn, parameters.seed)
        others = np.setdiff1d(drawn, np.array(selected, np.int64))
        yield from with_texts(others, "test", reviews, run.reviews)
    yield from free_texts(capture.texts)


def _read_in_order(rows: Sequence[int], reviews: pd.DataFrame, run: Run) -> Iterator[TextRow]:
    """Yield the test reviews with the row indices `rows`, in the order of `rows`."""
    sorted_rows = np.sort(np.array(rows, np.int64))  # `with_texts` requires sorted indices
    sorted_reviews = with_texts(sorted_rows, "test", reviews, run.reviews)
    review_by_row = dict(zip(sorted_rows.tolist(), sorted_reviews, strict=True))
    for row in rows:
        yield review_by_row[row]


def drawn_reviews(parameters: Parameters, run: Run) -> Iterator[TextRow]:
    """Yield the reviews sampled for the statistics, then the reviews sampled only for token removal.

    The columns `measured` and `removed` state whether a review belongs to the first and to the second sample.
    """
    reviews = _tabulate_test_reviews(run)
    labels = reviews["label"].to_numpy()
    measured_rows = stratified_draw(labels, parameters.measure.documents, parameters.seed)
    removed_rows = stratified_draw(labels, parameters.faithfulness.documents, parameters.seed)
    is_measured = reviews.index.isin(measured_rows)
    is_removed = reviews.index.isin(removed_rows)
    reviews = reviews.assign(measured=is_measured, removed=is_removed)
    yield from with_texts(np.sort(measured_rows), "test", reviews, run.reviews)
    only_removed_rows = np.setdiff1d(removed_rows, measured_rows)
    yield from with_texts(only_removed_rows, "test", reviews, run.reviews)


def _tabulate_test_reviews(run: Run) -> pd.DataFrame:
    """Return a table of the test reviews with columns of `texts.parquet`, but without the texts."""
    reviews = store.read_split("test", run.reviews, ["label", "label_name"])
    predicted = read_table(run.test_predictions_file, "finetune")["predicted"]
    names = "test/" + reviews.index.astype(str)
    return reviews.assign(document=names, predicted_label=predicted, measured=False, removed=False)

"""Select, truncate and tokenise the texts for all later stages: the captured texts and the sampled test texts.

    python -m stages tokenize

Writes `features/tokenize/`, which `attnmix.core.store.texts` documents.
"""

from collections.abc import Iterator
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
    # `with_texts` requires sorted row indices; the reviews are yielded in the order of their selection.
    sorted_rows = np.sort(np.array(selected, np.int64))
    selected_reviews = with_texts(sorted_rows, "test", reviews, run.reviews)
    review_by_row = dict(zip(sorted_rows.tolist(), selected_reviews, strict=True))
    for row in selected:
        yield review_by_row[row]
    if capture.drawn:
        drawn = stratified_draw(reviews["label"].to_numpy(), capture.drawn, parameters.seed)
        yield from with_texts(np.setdiff1d(drawn, sorted_rows), "test", reviews, run.reviews)
    yield from free_texts(capture.texts)


def drawn_reviews(parameters: Parameters, run: Run) -> Iterator[TextRow]:
    """Yield the reviews sampled for the statistics, then the reviews sampled only for token removal."""
    reviews = _tabulate_test_reviews(run)
    labels = reviews["label"].to_numpy()
    measured = stratified_draw(labels, parameters.measure.documents, parameters.seed)
    removed = stratified_draw(labels, parameters.faithfulness.documents, parameters.seed)
    flags = {"measured": reviews.index.isin(measured), "removed": reviews.index.isin(removed)}
    reviews = reviews.assign(**flags)
    yield from with_texts(np.sort(measured), "test", reviews, run.reviews)
    yield from with_texts(np.setdiff1d(removed, measured), "test", reviews, run.reviews)


def _tabulate_test_reviews(run: Run) -> pd.DataFrame:
    """Return a table of the test reviews with columns of `texts.parquet`, but without the texts."""
    reviews = store.read_split("test", run.reviews, ["label", "label_name"])
    predicted = read_table(run.test_predictions_file, "finetune")["predicted"]
    names = "test/" + reviews.index.astype(str)
    return reviews.assign(document=names, predicted_label=predicted, measured=False, removed=False)
